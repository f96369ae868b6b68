"""The scheduler's options, with their bounds checked at start."""

from __future__ import annotations

import math

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.policies import EVICTION_POLICIES, ORDER_POLICIES, RANK_POLICIES, named_policy


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's scheduler. ``cache`` gives the bounds of *each* rank: blocks, slots (max_running), tokens a step, context length.

    chunked_prefill_size   prompt tokens one request may compute in one step; None: as many as the step's token budget allows
    draft_tokens           drafts a decoding request verifies in each step; 0 allows overlap (two uncommitted plans)
    has_sequence_state     prefix hits need a window tail (V4.1); cache.num_tails bounds them
    max_waiting            requests in the queue; above it submit raises CapacityError
    max_passes             later arrivals that may be admitted before a request until a rank is kept free for it
    max_scanned            waiting requests looked at in one plan
    watermark_blocks       blocks an admission leaves free for the growth of running requests; None: 1 % of the pool
    max_preemptions        after so many, a request is started only with all the blocks it can ever need, and is not preempted again
    swap_threshold_tokens  a victim with at least so many computed tokens goes to host memory if there is room; None: never
    tpot_slo_s             seconds a running request may wait for its next token, by the cost model's prices: bounds prompt chunks and
                           admissions (``slo_policy``); None: neither
    min_prompt_tokens      prompt tokens a step may compute under that limit, whatever they cost
    replay_tokens          bounded replay at a prefix hit without a tail; not implemented, so 0 only
    """

    cache: CacheConfig
    num_ranks: int = 1
    eos_token_ids: tuple[int, ...] = ()
    chunked_prefill_size: int | None = None
    draft_tokens: int = 0
    has_sequence_state: bool = False
    prefix_caching: bool = True
    order_policy: str = "fcfs"
    eviction_policy: str = "lru"
    rank_policy: str = "shortest-queue"
    max_waiting: int = 1024
    max_passes: int = 64
    max_scanned: int = 64
    watermark_blocks: int | None = None
    max_preemptions: int = 3
    swap_threshold_tokens: int | None = None
    tpot_slo_s: float | None = None
    min_prompt_tokens: int = 32
    replay_tokens: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens one request may have, prompt and output: the context length, or the whole pool of a rank where that is smaller."""
        return min(self.cache.context_length, self.cache.num_blocks * self.cache.block_size)

    @property
    def clamp_warning(self) -> str | None:
        """What an operator should read at start where the cache is smaller than the context; None where it is not."""
        if self.context_tokens == self.cache.context_length:
            return None
        blocks, size = self.cache.num_blocks, self.cache.block_size
        return (
            f"context_length {self.cache.context_length} exceeds the KV cache of a rank ({blocks} blocks of {size} tokens): "
            f"requests are limited to {self.context_tokens} tokens"
        )

    def validate(self) -> None:
        """Raise ConfigError naming the option, its value and what is allowed."""
        cache = self.cache
        at_least = (
            ("num_blocks", cache.num_blocks, 1), ("block_size", cache.block_size, 1), ("max_running", cache.max_running, 1),
            ("context_length", cache.context_length, 2), ("num_ranks", self.num_ranks, 1), ("max_waiting", self.max_waiting, 1),
            ("max_passes", self.max_passes, 1), ("max_scanned", self.max_scanned, 1), ("max_preemptions", self.max_preemptions, 1),
            ("draft_tokens", self.draft_tokens, 0), ("num_tails", cache.num_tails, 0), ("num_host_blocks", cache.num_host_blocks, 0),
            ("num_host_states", cache.num_host_states, 0), ("watermark_blocks", self.watermark_blocks or 0, 0),
            ("swap_threshold_tokens", 1 if self.swap_threshold_tokens is None else self.swap_threshold_tokens, 1),
            ("min_prompt_tokens", self.min_prompt_tokens, 1),
            ("chunked_prefill_size", 1 if self.chunked_prefill_size is None else self.chunked_prefill_size, 1),
        )  # fmt: skip
        for name, value, low in at_least:
            if value < low:
                raise ConfigError(f"{name} is {value}; allowed: {low} or more")
        if cache.max_batched_tokens < cache.max_running:
            # Every running request must get its token in each step, or the last ones would never move.
            raise ConfigError(f"max_batched_tokens {cache.max_batched_tokens} is less than max_running {cache.max_running}")
        if self.tpot_slo_s is not None and not 0 < self.tpot_slo_s < math.inf:
            raise ConfigError(f"tpot_slo_s is {self.tpot_slo_s}; allowed: more than 0 seconds, finite")
        if self.draft_tokens > cache.max_draft_tokens:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}; the cache is built for at most {cache.max_draft_tokens}")
        if self.replay_tokens:
            raise ConfigError(f"replay_tokens is {self.replay_tokens}: bounded replay is not implemented; allowed: 0")
        named_policy(ORDER_POLICIES, self.order_policy, "order_policy")
        named_policy(EVICTION_POLICIES, self.eviction_policy, "eviction_policy")
        named_policy(RANK_POLICIES, self.rank_policy, "rank_policy")
