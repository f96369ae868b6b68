"""The tensors a checkpoint must hold for a spec: official names, shapes as [out, in], and what kind of thing each is.

The loader verifies a folder against this table, the random initialiser fills it, and ``counts`` adds it up.
Vision tensors (``vision.*``, ``image_*``) are outside this release and not listed.
"""

from __future__ import annotations

import math

import msgspec

from engine.core.specs import AttentionRole, DenseSpec, DSparkSpec, ModelSpec, V41Spec

LINEAR = "linear"  # a GEMM weight [out, in]
EMBEDDING = "embedding"  # rows looked up by id [rows, dim]
NORM = "norm"  # an RMSNorm gain (also Engram's q_weight, k_weight); a fresh model has ones
BIAS = "bias"  # an additive bias of the model's dtype
FP32 = "fp32"  # stored and used in float32 whatever the model's dtype: hc_*, attn_sink, gate.bias*
KINDS: tuple[str, ...] = (LINEAR, EMBEDDING, NORM, BIAS, FP32)


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape in elements and one of KINDS."""

    shape: tuple[int, ...]
    kind: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def expected_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of ``spec``, in the order embedding, layers, head, draft."""
    if isinstance(spec, V41Spec):
        return _v41_tensors(spec)
    return _dense_tensors(spec)


class _Table:
    """Collects names under a prefix; ``.weight`` is added for everything but the float32 parameters."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorSpec] = {}

    def weight(self, name: str, kind: str, *shape: int) -> None:
        self.tensors[f"{name}.weight"] = TensorSpec(shape, kind)

    def bare(self, name: str, kind: str, *shape: int) -> None:
        self.tensors[name] = TensorSpec(shape, kind)


def _v41_tensors(spec: V41Spec) -> dict[str, TensorSpec]:
    table = _Table()
    table.weight("embed", EMBEDDING, spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        _v41_attention(table, spec, f"{prefix}.attn")
        if spec.role(layer) is AttentionRole.FULL:
            _v41_compressor(table, spec, f"{prefix}.attn.compressor", spec.compress_ratios[layer])
        if spec.role(layer) in (AttentionRole.FULL, AttentionRole.REINDEX):
            _v41_indexer(table, spec, f"{prefix}.attn.indexer", spec.role(layer) is AttentionRole.FULL)
        if spec.engram and layer in spec.engram.layer_ids:
            _v41_engram(table, spec, f"{prefix}.engram", spec.engram.layer_ids.index(layer))
        _v41_block_rest(table, spec, prefix, spec.num_experts, image_bias=True)
    table.weight("norm", NORM, spec.hidden_size)
    table.weight("head", LINEAR, spec.vocab_size, spec.hidden_size)
    if spec.dspark:
        _v41_draft(table, spec, spec.dspark)
    return table.tensors


def _v41_attention(table: _Table, spec: V41Spec, prefix: str) -> None:
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
    table.weight(f"{prefix}.wq_a", LINEAR, spec.q_lora_rank, hidden)
    table.weight(f"{prefix}.q_norm", NORM, spec.q_lora_rank)
    table.weight(f"{prefix}.wq_b", LINEAR, width, spec.q_lora_rank)
    table.weight(f"{prefix}.wkv", LINEAR, spec.head_dim, hidden)
    table.weight(f"{prefix}.kv_norm", NORM, spec.head_dim)
    table.bare(f"{prefix}.attn_sink", FP32, spec.num_heads)
    table.weight(f"{prefix}.wo_a", LINEAR, spec.o_groups * spec.o_lora_rank, width // spec.o_groups)
    table.weight(f"{prefix}.wo_b", LINEAR, hidden, spec.o_groups * spec.o_lora_rank)


def _v41_compressor(table: _Table, spec: V41Spec, prefix: str, ratio: int) -> None:
    table.weight(f"{prefix}.wkv", LINEAR, spec.head_dim, spec.hidden_size)
    if ratio > 1:  # the mix over a group needs a gate; a group of one token is that token
        table.weight(f"{prefix}.wgate", LINEAR, spec.head_dim, spec.hidden_size)
    table.weight(f"{prefix}.norm", NORM, spec.head_dim)


def _v41_indexer(table: _Table, spec: V41Spec, prefix: str, owns_keys: bool) -> None:
    table.weight(f"{prefix}.wq_b", LINEAR, spec.index_num_heads * spec.index_head_dim, spec.q_lora_rank)
    table.weight(f"{prefix}.weights_proj", LINEAR, spec.index_num_heads, spec.hidden_size)
    if owns_keys:
        table.weight(f"{prefix}.wk", LINEAR, spec.index_head_dim, spec.head_dim)
        table.weight(f"{prefix}.k_norm", NORM, spec.index_head_dim)


def _v41_engram(table: _Table, spec: V41Spec, prefix: str, index: int) -> None:
    assert spec.engram is not None
    engram, hidden, streams = spec.engram, spec.hidden_size, spec.hc_mult
    table.weight(f"{prefix}.embed", EMBEDDING, engram.num_rows[index], engram.head_dim)
    # One key per stream and one value shared by all of them.
    table.weight(f"{prefix}.wkv", LINEAR, (streams + 1) * hidden, engram.num_columns * engram.head_dim)
    table.bare(f"{prefix}.q_weight", NORM, streams, hidden)
    table.bare(f"{prefix}.k_weight", NORM, streams, hidden)


def _v41_block_rest(table: _Table, spec: V41Spec, prefix: str, num_experts: int, *, image_bias: bool) -> None:
    """Norms, mixture of experts and hyper-connections: what backbone and draft layers share."""
    hidden, inner, streams = spec.hidden_size, spec.moe_intermediate_size, spec.hc_mult
    table.weight(f"{prefix}.attn_norm", NORM, hidden)
    table.weight(f"{prefix}.ffn_norm", NORM, hidden)
    table.weight(f"{prefix}.ffn.gate", LINEAR, num_experts, hidden)
    table.bare(f"{prefix}.ffn.gate.bias", FP32, num_experts)
    if image_bias:
        table.bare(f"{prefix}.ffn.gate.bias_vl", FP32, num_experts)
    for expert in range(num_experts):
        _gated_mlp(table, f"{prefix}.ffn.experts.{expert}", hidden, inner)
    if spec.num_shared_experts:
        _gated_mlp(table, f"{prefix}.ffn.shared_experts", hidden, inner * spec.num_shared_experts)
    # pre and post: one number a stream; the mixing matrix: one a pair of streams.
    coefficients = streams * (2 + streams)
    for site in ("attn", "ffn"):
        table.bare(f"{prefix}.hc_{site}_fn", FP32, coefficients, streams * hidden)
        table.bare(f"{prefix}.hc_{site}_base", FP32, coefficients)
        table.bare(f"{prefix}.hc_{site}_scale", FP32, 3)


def _gated_mlp(table: _Table, prefix: str, hidden: int, inner: int) -> None:
    table.weight(f"{prefix}.w1", LINEAR, inner, hidden)
    table.weight(f"{prefix}.w2", LINEAR, hidden, inner)
    table.weight(f"{prefix}.w3", LINEAR, inner, hidden)


def _v41_draft(table: _Table, spec: V41Spec, draft: DSparkSpec) -> None:
    hidden = spec.hidden_size
    for layer in range(draft.num_layers):
        prefix = f"mtp.{layer}"
        _v41_attention(table, spec, f"{prefix}.attn")
        # The draft routes with the text bias only.
        _v41_block_rest(table, spec, prefix, draft.num_experts, image_bias=False)
    table.weight("mtp.0.main_proj", LINEAR, hidden, len(draft.target_layer_ids) * hidden)
    table.weight("mtp.0.main_norm", NORM, hidden)
    last = f"mtp.{draft.num_layers - 1}"
    table.weight(f"{last}.norm", NORM, hidden)
    table.weight(f"{last}.markov_head.embed", EMBEDDING, spec.vocab_size, draft.markov_rank)
    table.weight(f"{last}.markov_head.head", LINEAR, spec.vocab_size, draft.markov_rank)
    table.weight(f"{last}.confidence_head.proj", LINEAR, 1, hidden + draft.markov_rank)


def _dense_tensors(spec: DenseSpec) -> dict[str, TensorSpec]:
    table = _Table()
    hidden, width, kv_width = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table.weight("model.embed_tokens", EMBEDDING, spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        projections = (
            ("self_attn.q_proj", width, hidden, spec.attention_bias),
            ("self_attn.k_proj", kv_width, hidden, spec.attention_bias),
            ("self_attn.v_proj", kv_width, hidden, spec.attention_bias),
            ("self_attn.o_proj", hidden, width, spec.output_bias),
        )
        for name, rows, columns, biased in (*projections, *_dense_mlp(spec, layer)):
            table.weight(f"{prefix}.{name}", LINEAR, rows, columns)
            if biased:
                table.bare(f"{prefix}.{name}.bias", BIAS, rows)
        if spec.qk_norm:
            table.weight(f"{prefix}.self_attn.q_norm", NORM, spec.head_dim)
            table.weight(f"{prefix}.self_attn.k_norm", NORM, spec.head_dim)
        table.weight(f"{prefix}.input_layernorm", NORM, hidden)
        table.weight(f"{prefix}.post_attention_layernorm", NORM, hidden)
    table.weight("model.norm", NORM, hidden)
    if not spec.tie_word_embeddings:
        table.weight("lm_head", LINEAR, spec.vocab_size, hidden)
    return table.tensors


def _dense_mlp(spec: DenseSpec, layer: int) -> list[tuple[str, int, int, bool]]:
    """(name, rows, columns, has a bias) of the layer's MLP, or of its router and experts."""
    moe = spec.moe
    if moe is None or not spec.is_moe(layer):
        return _gate_up_down("mlp", spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
    parts = [("mlp.gate", moe.num_experts, spec.hidden_size, False)]
    for expert in range(moe.num_experts):
        parts += _gate_up_down(f"mlp.experts.{expert}", spec.hidden_size, moe.intermediate_size, False)
    return parts


def _gate_up_down(prefix: str, hidden: int, inner: int, biased: bool) -> list[tuple[str, int, int, bool]]:
    return [
        (f"{prefix}.gate_proj", inner, hidden, biased),
        (f"{prefix}.up_proj", inner, hidden, biased),
        (f"{prefix}.down_proj", hidden, inner, biased),
    ]
