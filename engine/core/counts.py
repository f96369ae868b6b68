"""Parameters, bytes and FLOP of a spec, from its shapes alone. A multiply-add is 2 FLOP.

Vision towers are outside this release and not counted. Formulas: DeepSeek-V4.1's published shapes; causal attention of one query at
position n-1 sees n keys.
"""

from __future__ import annotations

import msgspec

from engine.core.specs import AttentionRole, DenseSpec, ModelSpec, V41Spec
from engine.core.tensors import FP32, expected_tensors

# Where a tensor's parameters are counted: the first entry whose text occurs in its name.
_GROUPS: tuple[tuple[str, str], ...] = (
    ("mtp.", "draft"), ("engram.embed", "engram_tables"), ("engram.", "engram_projection"), ("compressor.", "compressor"),
    ("indexer.", "indexer"), ("attn_norm", "norm"), ("ffn_norm", "norm"), ("layernorm", "norm"), (".experts.", "routed_experts"),
    ("shared_experts", "shared_experts"), ("ffn.gate", "router"), ("mlp.gate.", "router"), ("hc_", "mhc"), ("attn.", "attention"),
    ("mlp.", "dense_ffn"), ("embed", "embedding"), ("lm_head", "lm_head"), ("head.", "lm_head"), ("norm", "norm"),
)  # fmt: skip


class ParameterCounts(msgspec.Struct, frozen=True):
    """``by_group`` adds up to ``total``; ``fp32`` of them are stored in float32 whatever the dtype, ``fp32_by_group`` says which."""

    total: int
    fp32: int
    by_group: dict[str, int]
    fp32_by_group: dict[str, int]


class KVFormat(msgspec.Struct, frozen=True):
    """Bytes of one cache row of each kind."""

    window_row_bytes: int
    compressed_row_bytes: int
    index_key_bytes: int


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    by_group: dict[str, int] = {}
    fp32_by_group: dict[str, int] = {}
    for name, tensor in expected_tensors(spec).items():
        group = next(group for text, group in _GROUPS if text in name)
        count = tensor.num_elements
        by_group[group] = by_group.get(group, 0) + count
        if tensor.kind == FP32:
            fp32_by_group[group] = fp32_by_group.get(group, 0) + count
    return ParameterCounts(sum(by_group.values()), sum(fp32_by_group.values()), by_group, fp32_by_group)


def weight_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Unquantised weights with ``element_bytes`` an element (2: bf16), float32 parameters at 4."""
    counts = count_parameters(spec)
    return (counts.total - counts.fp32) * element_bytes + counts.fp32 * 4


def touched_experts(num_experts: int, experts_per_token: int, num_tokens: int) -> float:
    """Expected number of distinct experts that ``num_tokens`` tokens choose, where every expert is equally likely."""
    return num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens)


def step_weight_bytes(spec: ModelSpec, num_tokens: int, element_bytes: int = 2) -> float:
    """Bytes of backbone weights that a step of ``num_tokens`` tokens reads, each once: of the routed experts those it touches (expected,
    under even routing), of embedding and Engram tables one row a look-up. The draft's are read in rounds of their own and not counted."""
    counts = count_parameters(spec)
    share, rows = 0.0, {"embedding": num_tokens * spec.hidden_size}
    if isinstance(spec, V41Spec):
        share = touched_experts(spec.num_experts, spec.experts_per_token, num_tokens) / spec.num_experts
        if spec.engram is not None:
            looked_up = num_tokens * spec.engram.num_columns * spec.engram.head_dim * len(spec.engram.layer_ids)
            rows["engram_tables"] = looked_up
    elif spec.moe is not None:
        share = touched_experts(spec.moe.num_experts, spec.moe.experts_per_token, num_tokens) / spec.moe.num_experts
    if isinstance(spec, DenseSpec) and spec.tie_word_embeddings:
        del rows["embedding"]  # read whole, as the head
    total = 0.0
    for group, count in counts.by_group.items():
        if group == "draft":
            continue
        wide = counts.fp32_by_group.get(group, 0)
        read = share * count if group == "routed_experts" else min(count, rows.get(group, count))
        total += 4 * wide + element_bytes * (read - wide)
    return total


# --- KV ------------------------------------------------------------------------------------------------------------------


def native_kv_format(spec: V41Spec) -> KVFormat:
    """DeepSeek's own: window rows E4M3 with a scale byte per 32, compressed rows E2M1 with one per 16, index keys E2M1 with one per 32."""
    dim, index_dim = spec.head_dim, spec.index_head_dim
    return KVFormat(dim + dim // 32, dim // 2 + dim // 16, index_dim // 2 + index_dim // 32)


def plain_kv_format(spec: V41Spec, element_bytes: int) -> KVFormat:
    """Unquantised rows."""
    return KVFormat(spec.head_dim * element_bytes, spec.head_dim * element_bytes, spec.index_head_dim * element_bytes)


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int = 2, kv_format: KVFormat | None = None) -> float:
    """Global KV (what lives in blocks) that one more token costs. ``kv_format`` is for V4.1; None is plain rows of ``element_bytes``."""
    if isinstance(spec, DenseSpec):
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes
    rows = kv_format or plain_kv_format(spec, element_bytes)
    per_row = rows.compressed_row_bytes + rows.index_key_bytes
    return sum(per_row / spec.compress_ratios[layer] for layer in spec.kv_source_layer_ids)


def sequence_bytes(
    spec: ModelSpec,
    element_bytes: int = 2,
    kv_format: KVFormat | None = None,
    *,
    slack_rows: int = 0,
    state_rows: int = 2,
    with_draft: bool = True,
) -> int:
    """Fixed bytes of one running sequence: window rings of window + ``slack_rows`` rows, and float32 compressor state (two vectors for each
    of ``state_rows`` tokens in every KV source of a ratio above 1). 0 for a dense model."""
    if isinstance(spec, DenseSpec):
        return 0
    row_bytes = (kv_format or plain_kv_format(spec, element_bytes)).window_row_bytes
    layers = spec.num_window_layers if with_draft else spec.num_layers
    rings = (spec.sliding_window + slack_rows) * row_bytes * layers
    sources = sum(spec.compress_ratios[layer] > 1 for layer in spec.kv_source_layer_ids)
    return rings + sources * state_rows * 2 * spec.head_dim * 4


# --- FLOP ----------------------------------------------------------------------------------------------------------------


class GemmFlops(msgspec.Struct, frozen=True):
    """Per token. ``layers[i]`` is everything of backbone layer i that does not depend on the context; ``lm_head`` per emitted row."""

    layers: tuple[int, ...]
    lm_head: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.lm_head


def gemm_flops(spec: ModelSpec) -> GemmFlops:
    head = 2 * spec.hidden_size * spec.vocab_size
    if isinstance(spec, DenseSpec):
        hidden, width, kv_width = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections, mlp = hidden * (2 * width + 2 * kv_width), 3 * hidden * spec.intermediate_size
        experts = 0
        if spec.moe is not None:
            experts = hidden * (spec.moe.num_experts + 3 * spec.moe.experts_per_token * spec.moe.intermediate_size)
        layers = tuple(2 * (projections + (experts if spec.is_moe(layer) else mlp)) for layer in range(spec.num_layers))
        return GemmFlops(layers, head)
    return GemmFlops(tuple(2 * _v41_layer_macs(spec, layer) for layer in range(spec.num_layers)), head)


def _v41_layer_macs(spec: V41Spec, layer: int) -> int:
    hidden, width, rank = spec.hidden_size, spec.num_heads * spec.head_dim, spec.o_groups * spec.o_lora_rank
    macs = hidden * spec.q_lora_rank + spec.q_lora_rank * width + hidden * spec.head_dim + width * spec.o_lora_rank + rank * hidden
    experts = spec.experts_per_token + spec.num_shared_experts
    macs += hidden * spec.num_experts + experts * 3 * hidden * spec.moe_intermediate_size
    streams = spec.hc_mult
    macs += 2 * (streams * (2 + streams)) * streams * hidden
    role = spec.role(layer)
    if role is AttentionRole.FULL:
        macs += hidden * spec.head_dim * (2 if spec.compress_ratios[layer] > 1 else 1)  # compressor, with its gate
        macs += spec.head_dim * spec.index_head_dim
    if role in (AttentionRole.FULL, AttentionRole.REINDEX):
        macs += spec.q_lora_rank * spec.index_num_heads * spec.index_head_dim + hidden * spec.index_num_heads
    if spec.engram and layer in spec.engram.layer_ids:
        macs += spec.engram.num_columns * spec.engram.head_dim * (streams + 1) * hidden
    return macs


def attention_flops(spec: ModelSpec, context_tokens: int) -> float:
    """Core attention and index scores of one decoded token that sees ``context_tokens`` keys."""
    pair = 4 * spec.num_heads * spec.head_dim
    if isinstance(spec, DenseSpec):
        return float(pair * context_tokens * spec.num_layers)
    index_pair = 2 * spec.index_num_heads * spec.index_head_dim
    flops = 0.0
    for layer, ratio in enumerate(spec.compress_ratios):
        flops += pair * min(context_tokens, spec.sliding_window)
        if ratio == 0:
            continue
        rows = context_tokens / ratio
        flops += pair * min(rows, spec.index_top_k)
        role = spec.role(layer)
        if role is AttentionRole.FULL:
            flops += index_pair * rows
        elif role is AttentionRole.REINDEX:
            flops += index_pair * min(rows, candidate_rows(spec, layer) or rows)
    return flops


def candidate_rows(spec: V41Spec, layer: int) -> int | None:
    """Compressed rows that a reindexing layer looks at, at most; None where it looks at all."""
    source = spec.candidate_source_layer_id
    return None if source is None or layer <= source else spec.candidate_top_k_blocks * spec.candidate_block_size


def active_parameters(spec: ModelSpec) -> int:
    """Parameters one decoded token multiplies with."""
    return gemm_flops(spec).total // 2
