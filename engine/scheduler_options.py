"""From options to what the core is given: sizes of a rank's caches, the scheduler's rules. Engine and twin both read them here."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.memory import blocks_for, held_weight_bytes, smallest_block_multiple
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec
from engine.options import Resolved

# A CPU's memory is shared with everything else on the machine, so the default KV pool is modest.
CPU_KV_BYTES = 1 << 30
TAILS_PER_REQUEST = 4


def cpu_budget_bytes(spec: ModelSpec, dtype: str, place: RankPlace) -> int:
    """What a rank on a CPU takes at most, where the machine has several times as much."""
    return held_weight_bytes(spec, dtype, place) + CPU_KV_BYTES


def scheduler_config(options: Resolved, spec: ModelSpec, cache: CacheConfig, num_ranks: int) -> SchedulerConfig:
    """The rules of one replica of ``num_ranks`` data ranks."""
    return SchedulerConfig(
        cache=cache,
        eos_token_ids=spec.eos_token_ids,
        chunked_prefill_size=options["chunked_prefill_size"],
        draft_tokens=options["draft_tokens"],
        has_sequence_state=spec.has_sequence_state,
        prefix_caching=not options["disable_radix_cache"],
        num_ranks=num_ranks,
        order_policy=options["order_policy"],
        rank_policy=options["rank_policy"],
        eviction_policy=options["eviction_policy"],
        max_waiting=options["max_waiting_requests"],
        swap_threshold_tokens=max(options["swap_threshold_tokens"], 1) if cache.num_host_blocks else None,
    )


def cache_config(options: Resolved, spec: ModelSpec, dtype: str, budget_bytes: int, place: RankPlace) -> CacheConfig:
    """A rank's caches: as asked for, else as many blocks as the budget holds. Raises ConfigError for what cannot be."""
    block_size = options["block_size"]
    multiple = smallest_block_multiple(spec)
    if block_size % multiple:
        raise ConfigError(f"--block-size is {block_size}; {spec.name} needs a multiple of {multiple}")
    if options["draft_tokens"] > spec.max_draft_tokens:
        raise ConfigError(f"--draft-tokens is {options['draft_tokens']}; {spec.name} drafts at most {spec.max_draft_tokens}")
    max_running = options["max_running_requests"]
    batched = max(options["max_num_batched_tokens"], max_running * (1 + options["draft_tokens"]))
    tails = options["num_window_tails"]
    if tails is None:
        tails = TAILS_PER_REQUEST * max_running
    if not spec.has_sequence_state or options["disable_radix_cache"]:
        tails = 0
    host_blocks = options["swap_space_tokens"] // block_size
    base = CacheConfig(
        num_blocks=1,
        block_size=block_size,
        max_running=max_running,
        max_batched_tokens=batched,
        context_length=_context_length(options, spec),
        max_draft_tokens=options["draft_tokens"],
        num_tails=tails,
        num_host_blocks=host_blocks,
        num_host_states=max_running if host_blocks else 0,
    )
    if options["max_total_tokens"] is not None:
        num_blocks = options["max_total_tokens"] // block_size
        if not num_blocks:
            raise ConfigError(f"--max-total-tokens is {options['max_total_tokens']}; needed: at least one block of {block_size} tokens")
    else:
        # More blocks than every slot at full length could use would only cost memory.
        useful = max_running * base.max_blocks_per_sequence
        num_blocks = min(blocks_for(spec, base, dtype, budget_bytes, place), useful)
    changes: dict[str, Any] = {"num_blocks": num_blocks}
    if options["context_length"] is None:
        changes["context_length"] = min(base.context_length, num_blocks * block_size)
    return msgspec.structs.replace(base, **changes)


def _context_length(options: Resolved, spec: ModelSpec) -> int:
    asked = options["context_length"]
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(f"--context-length is {asked}; {spec.name} has {spec.max_positions} positions")
    return spec.max_positions if asked is None else int(asked)
