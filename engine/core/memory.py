"""Bytes a worker will hold, from shapes alone: weights and KV, and how many blocks a memory budget buys.

The same numbers size the cache at start, stand in ``twinfer model show`` and are compared with what a worker reports. They
describe this engine's storage: cached rows in the compute dtype (the FP8/FP4 formats are emulated in it), not the packed formats
of the published kernels, whose sizes ``core.counts`` gives.
"""

from __future__ import annotations

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.sharding import RankPlace, held_kv_heads, held_tensors
from engine.core.specs import DenseSpec, ModelSpec, V41Spec
from engine.core.tensors import FP32, TensorSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_STATE_BYTES = 4  # the compressor's pending rows are float32
# Held in float32 whatever the compute dtype; see held_weight_bytes.
_WIDE = (
    "head.weight", "ffn.gate.weight", "markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight",
)  # fmt: skip
_DENSE_WIDE = "mlp.gate.weight"
_ENGRAM_TABLE = "engram.embed.weight"
_FOLDED = "engram.q_weight"
_FOLDED_AWAY = "engram.k_weight"
ONE_RANK = RankPlace()
_WINDOW_SLACK_ROWS = 2  # see the V4.1 cache: room for a fork that lags one token behind


class MemoryPlan(msgspec.Struct, frozen=True):
    """Device bytes of one rank, predicted."""

    weight_bytes: int
    block_size: int
    block_bytes: int
    fixed_cache_bytes: int
    num_blocks: int

    @property
    def cache_bytes(self) -> int:
        return self.fixed_cache_bytes + self.num_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def held_weight_bytes(spec: ModelSpec, dtype: str, place: RankPlace = ONE_RANK) -> int:
    """Device bytes of the weights as the rank at ``place`` holds them, which is a little more than its part of the checkpoint.

    V4.1: the float32 parts of the maths are kept in float32 (head, router, ratio-2 compressor, Markov and confidence heads), and Engram's
    two gate gains are folded into one. Dense: each weight once, a tied head shared with the embedding; Qwen3-MoE's routers in float32.
    """
    element = DTYPE_BYTES[dtype]
    held = held_tensors(spec, place)
    if isinstance(spec, DenseSpec):
        return sum(tensor.num_elements * (4 if name.endswith(_DENSE_WIDE) else element) for name, tensor in held)
    return sum(tensor.num_elements * _v41_element_bytes(spec, place, name, tensor, element) for name, tensor in held)


def _v41_element_bytes(spec: V41Spec, place: RankPlace, name: str, tensor: TensorSpec, element: int) -> int:
    if name.endswith(_FOLDED_AWAY) or (place.engram == "host" and name.endswith(_ENGRAM_TABLE)):
        return 0
    wide = tensor.kind == FP32 or name.endswith((_FOLDED, *_WIDE)) or _is_pair_projection(spec, name)
    return 4 if wide else element


def _is_pair_projection(spec: V41Spec, name: str) -> bool:
    if not name.endswith(("compressor.wkv.weight", "compressor.wgate.weight")):
        return False
    return spec.compress_ratios[int(name.split(".")[1])] == 2


def block_bytes(spec: ModelSpec, block_size: int, dtype: str, place: RankPlace = ONE_RANK) -> int:
    """Bytes one KV block takes on the device. V4.1's one latent head is whole on every tensor rank."""
    element = DTYPE_BYTES[dtype]
    if isinstance(spec, DenseSpec):
        return 2 * spec.num_layers * held_kv_heads(spec, place) * spec.head_dim * block_size * element
    rows = sum(block_size // spec.compress_ratios[layer] for layer in spec.kv_source_layer_ids)
    return rows * (spec.head_dim + spec.index_head_dim) * element


def fixed_cache_bytes(spec: ModelSpec, config: CacheConfig, dtype: str) -> int:
    """Bytes of what does not grow with blocks: window rings, staging rows, tails and compressor state (V4.1 only)."""
    if isinstance(spec, DenseSpec):
        return 0
    element = DTYPE_BYTES[dtype]
    drafted_rows = config.max_running * spec.dspark.block_size if spec.dspark else 0
    rows = (
        config.max_running * (spec.sliding_window + config.max_draft_tokens + _WINDOW_SLACK_ROWS)
        + max(config.max_batched_tokens, drafted_rows)
        + config.num_tails * spec.sliding_window
    )
    pair_layers = sum(1 for layer in spec.kv_source_layer_ids if spec.compress_ratios[layer] == 2)
    pair_rows = config.max_running * (config.max_draft_tokens + _WINDOW_SLACK_ROWS) + config.max_batched_tokens
    return rows * spec.num_window_layers * spec.head_dim * element + pair_layers * pair_rows * 2 * spec.head_dim * _STATE_BYTES


def plan_memory(spec: ModelSpec, config: CacheConfig, dtype: str, place: RankPlace = ONE_RANK) -> MemoryPlan:
    """The prediction for one rank and a cache of ``config``'s sizes."""
    return MemoryPlan(
        weight_bytes=held_weight_bytes(spec, dtype, place),
        block_size=config.block_size,
        block_bytes=block_bytes(spec, config.block_size, dtype, place),
        fixed_cache_bytes=fixed_cache_bytes(spec, config, dtype),
        num_blocks=config.num_blocks,
    )


def blocks_for(spec: ModelSpec, config: CacheConfig, dtype: str, budget_bytes: int, place: RankPlace = ONE_RANK) -> int:
    """Blocks that fit beside the weights. Raises ConfigError with the sum and two remedies where not even one does."""
    plan = plan_memory(spec, config, dtype, place)
    left = budget_bytes - plan.weight_bytes - plan.fixed_cache_bytes
    if left < plan.block_bytes:
        raise ConfigError(
            f"{spec.name} does not fit: weights {plan.weight_bytes} B + window state {plan.fixed_cache_bytes} B + one block "
            f"{plan.block_bytes} B exceed the budget of {budget_bytes} B; raise --mem-fraction-static or lower --max-running-requests"
        )
    return left // plan.block_bytes


def smallest_block_multiple(spec: ModelSpec) -> int:
    """Blocks must hold whole compressed rows: the largest compress ratio, 1 for the dense family."""
    return max((1, *spec.compress_ratios)) if isinstance(spec, V41Spec) else 1
