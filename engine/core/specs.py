"""What a model is, in numbers: everything that shapes, costs and caches follow from. Pure data, no torch.

Two families: ``V41Spec`` (DeepSeek-V4.1: compressed sparse attention, mHC, MoE, Engram, DSpark) and ``DenseSpec``
(Llama, Qwen2, Qwen3, and Qwen3-MoE, whose MLPs are routed experts). ``engine.core.model_config`` makes them from a config.json's dict.
"""

from __future__ import annotations

import enum
from typing import Union

import msgspec

from engine.core.errors import ConfigError

# The closed list of components: traces, cost model, breakdown plots and metrics use these names and no others.
COMPONENTS: tuple[str, ...] = (
    "embed", "norm", "attention.window", "attention.sparse", "attention.full", "indexer", "compressor", "projection", "mhc",
    "router", "expert_gemm", "shared_expert", "dense_ffn", "dispatch", "combine", "all_reduce", "all_gather", "engram.fetch",
    "engram.gate", "lm_head", "sampler", "draft", "kv_write", "kv_transfer", "barrier_wait", "host_gap", "other",
)  # fmt: skip


class RopeScaling(msgspec.Struct, frozen=True):
    """Rotary frequency scaling. ``kind`` is one of "yarn", "llama3", "linear"; unused numbers stay at their defaults.

    ``attention_factor`` multiplies cos and sin (YaRN's mscale; 1 for V4.1, which has none).
    """

    kind: str
    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0


class AttentionRole(enum.Enum):
    """What a V4.1 layer does beside its own sliding window."""

    WINDOW = "window"  # ratio 0: nothing
    FULL = "full"  # owns compressed KV and index keys, scans all of them
    REINDEX = "reindex"  # own scores over the KV of the nearest source, inside the candidate set where there is one
    REUSE = "reuse"  # KV and selection of the nearest source before


class EngramSpec(msgspec.Struct, frozen=True):
    """Hashed n-gram embedding tables (reference: TileKernels' torch Engram; DeepSeek-V4.1 config keys ``engram_*``)."""

    layer_ids: tuple[int, ...]
    num_rows: tuple[int, ...]  # table rows per layer in layer_ids
    max_ngram: int  # orders 2..max_ngram
    heads_per_order: int
    head_dim: int
    prime_search_start: int  # ``engram_vocab_size``: the first number that may be a prime of the hash
    pad_token_id: int
    num_classes: int  # compressed vocabulary

    @property
    def num_columns(self) -> int:
        return (self.max_ngram - 1) * self.heads_per_order


class DSparkSpec(msgspec.Struct, frozen=True):
    """The block draft head: ``num_layers`` window-only layers that propose ``block_size`` tokens at once."""

    num_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    noise_token_id: int
    num_experts: int
    experts_per_token: int


class V41Spec(msgspec.Struct, frozen=True, tag="v41"):
    """DeepSeek-V4.1. Field names follow the official config where they have one there."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_num_heads: int
    index_head_dim: int
    index_top_k: int
    candidate_source_layer_id: int | None
    candidate_top_k_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    engram: EngramSpec | None
    dspark: DSparkSpec | None
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    image_token_id: int | None

    def role(self, layer: int) -> AttentionRole:
        if self.compress_ratios[layer] == 0:
            return AttentionRole.WINDOW
        if layer in self.kv_source_layer_ids:
            return AttentionRole.FULL
        return AttentionRole.REINDEX if layer in self.index_source_layer_ids else AttentionRole.REUSE

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows and index keys ``layer`` reads (itself where it owns them)."""
        return _nearest(self.kv_source_layer_ids, layer, "kv_source_layer_ids")

    def index_source(self, layer: int) -> int:
        """The layer whose top-k selection ``layer`` uses."""
        return _nearest(self.index_source_layer_ids, layer, "index_source_layer_ids")

    @property
    def has_sequence_state(self) -> bool:
        return True

    @property
    def num_window_layers(self) -> int:
        """Layers with a window ring: the backbone's and the draft's."""
        return self.num_layers + (self.dspark.num_layers if self.dspark else 0)

    @property
    def max_draft_tokens(self) -> int:
        return self.dspark.block_size if self.dspark else 0

    def validate(self) -> None:
        """Raise ConfigError where the numbers contradict each other."""
        if len(self.compress_ratios) != self.num_layers:
            raise ConfigError(f"compress_ratios has {len(self.compress_ratios)} entries for {self.num_layers} layers")
        for name, value, divisor in (
            ("num_attention_heads", self.num_heads, self.o_groups),
            ("qk_rope_head_dim", self.rope_dim, 2),
        ):
            if value % divisor:
                raise ConfigError(f"{name} {value} is not a multiple of {divisor}")
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio not in (0, 1, 2):
                raise ConfigError(f"compress_ratios[{layer}] is {ratio}; a V4.1 model has 0, 1 or 2")
            if ratio and self.compress_ratios[self.kv_source(layer)] != ratio:
                raise ConfigError(f"layer {layer} (ratio {ratio}) reads KV of layer {self.kv_source(layer)} with another ratio")
            if ratio and self.compress_ratios[self.index_source(layer)] != ratio:
                raise ConfigError(
                    f"layer {layer} (ratio {ratio}) uses the selection of layer {self.index_source(layer)} with another ratio"
                )
        for layer in self.kv_source_layer_ids:
            if layer not in self.index_source_layer_ids:
                raise ConfigError(f"layer {layer} owns KV but is not in index_source_layer_ids")
        if self.rope_dim > self.head_dim or self.rope_dim > self.index_head_dim:
            raise ConfigError(f"qk_rope_head_dim {self.rope_dim} exceeds head_dim {self.head_dim} or index_head_dim {self.index_head_dim}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"num_experts_per_tok {self.experts_per_token} exceeds n_routed_experts {self.num_experts}")
        ids = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        if self.engram:
            ids.append(("engram_pad_token_id", self.engram.pad_token_id))
        if self.dspark:
            ids.append(("dspark_noise_token_id", self.dspark.noise_token_id))
            if self.dspark.experts_per_token > self.dspark.num_experts:
                raise ConfigError(f"dspark_num_experts_per_tok {self.dspark.experts_per_token} exceeds {self.dspark.num_experts} experts")
        _check_token_ids(self.vocab_size, ids, self.eos_token_ids)


class MoeSpec(msgspec.Struct, frozen=True):
    """Routed experts in place of the MLP of the layers ``layer_ids`` (Qwen3-MoE): a float32 softmax over all experts, the
    ``experts_per_token`` likeliest chosen."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalise_weights: bool  # ``norm_topk_prob``: the chosen probabilities are divided by their sum
    layer_ids: tuple[int, ...]


class DenseSpec(msgspec.Struct, frozen=True, tag="dense"):
    """LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM: grouped-query attention and a gated MLP. Qwen3MoeForCausalLM: the same with
    experts for the MLP of some or all layers."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k, v (Qwen2, some Llamas)
    output_bias: bool  # on o (Llama's attention_bias)
    mlp_bias: bool
    qk_norm: bool  # RMSNorm per head on q and k (Qwen3)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    moe: MoeSpec | None = None

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` has routed experts instead of an MLP."""
        return self.moe is not None and layer in self.moe.layer_ids

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe.layer_ids) if self.moe else 0

    @property
    def has_sequence_state(self) -> bool:
        return False

    @property
    def max_draft_tokens(self) -> int:
        return 0

    def validate(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}")
        if self.moe is not None:
            if self.moe.experts_per_token > self.moe.num_experts:
                raise ConfigError(f"num_experts_per_tok {self.moe.experts_per_token} exceeds num_experts {self.moe.num_experts}")
            if any(not 0 <= layer < self.num_layers for layer in self.moe.layer_ids):
                raise ConfigError(f"expert layers {self.moe.layer_ids} are not all among the {self.num_layers} layers")
        _check_token_ids(self.vocab_size, [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)], self.eos_token_ids)


ModelSpec = Union[V41Spec, DenseSpec]


def _check_token_ids(vocab_size: int, ids: list[tuple[str, int | None]] | list[tuple[str, int]], eos_token_ids: tuple[int, ...]) -> None:
    """Raise ConfigError for an id outside the vocabulary: it would be an index error in the middle of a step."""
    for name, token in (*ids, *(("eos_token_id", token) for token in eos_token_ids)):
        if token is not None and not 0 <= token < vocab_size:
            raise ConfigError(f"{name} is {token}; allowed: 0 to {vocab_size - 1}")


def _nearest(sources: tuple[int, ...], layer: int, name: str) -> int:
    before = [source for source in sources if source <= layer]
    if not before:
        raise ConfigError(f"layer {layer} has no entry of {name} {sources} at or before it")
    return before[-1]
