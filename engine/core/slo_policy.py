"""Limits on a step that keep the gaps between a running request's tokens within ``tpot_slo_s``, by the prices of a StepCost.

    prompt tokens   the largest chunk, per rank, with which the step still fits; at least ``min_prompt_tokens``, so that prompts progress
    running         as many requests a rank as decode together within the limit: a prompt is not begun that would break it for all others.
                    Those that run end in finite time, and the door is shut for all alike, so nobody is passed and nobody starves

Sarathi-Serve (Agrawal et al., OSDI 2024) bounds chunks by a token budget that is profiled ahead for one batch size; here it follows the
step at hand. Every rank is priced as busy as the busiest: they step together, and the slowest decides.

A price is asked for rounded loads (contexts upwards) and kept, so that a decision is a function of the plan alone and costs a few
look-ups. No clock is read: the same arrivals and results give the same plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.core.plan import PlanItem, RankPlan, StepPlan
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepCost

# Chunk sizes and contexts are told apart in steps of this factor: a chunk is at most so much smaller than the largest that fits.
_RATIO = 1.19
# Prices kept; beyond it they are asked for anew. A price is the same whenever it is asked for.
_MAX_PRICES = 1 << 14


class RankLoad(NamedTuple):
    """What a rank's step is about, before its prompt chunks: the requests that get a token, their tokens in cache, and where the first
    prompt goes on (None: no prompt has begun)."""

    num_decodes: int
    context_tokens: int
    prompt_position: int | None


class StepLimits(NamedTuple):
    prompt_tokens: int  # of each rank in this step
    max_running: int  # requests of each rank up to which more may be admitted


class SloPolicy:
    """Keeps prices between plans; one per scheduler."""

    def __init__(self, cost: StepCost, config: SchedulerConfig) -> None:
        if config.tpot_slo_s is None:
            raise ConfigError("tpot_slo_s is None; needed: the limit that the policy keeps")
        self._cost = cost
        self._slo_s = config.tpot_slo_s
        self._num_ranks = config.num_ranks
        self._tokens_each = 1 + config.draft_tokens
        self._max_running = config.cache.max_running
        self._all_tokens = config.cache.max_batched_tokens
        self._chunks = _grid(min(config.min_prompt_tokens, self._all_tokens), self._all_tokens)
        self._contexts = _grid(1, config.cache.context_length)
        self._prices: dict[tuple[int, int, int, int], float] = {}

    def limits(self, loads: Sequence[RankLoad], price_factor: float = 1.0) -> StepLimits:
        """``loads`` of all ranks. Chunks have no limit while nobody waits for a token; nothing has where one request alone is too slow.
        Prices are multiplied by ``price_factor``."""
        limit_s = self._slo_s / price_factor
        num_decodes = max(load.num_decodes for load in loads)
        context = self._rounded(max((load.context_tokens / load.num_decodes for load in loads if load.num_decodes), default=1))
        if self._step_s(1, context, 0, 0) > limit_s:
            return StepLimits(self._all_tokens, self._max_running)
        position = self._rounded(max(load.prompt_position or 0 for load in loads))

        def fits_chunk(index: int) -> bool:
            return num_decodes == 0 or self._step_s(num_decodes, context, self._chunks[index], position) <= limit_s

        def fits_running(count: int) -> bool:
            return self._step_s(count, context, 0, 0) <= limit_s

        chunk = self._chunks[_last(fits_chunk, 0, len(self._chunks) - 1)]
        return StepLimits(chunk, _last(fits_running, 1, self._max_running))

    def _rounded(self, tokens: float) -> int:
        """The next larger context of the grid; 0 stays 0."""
        if tokens <= 0:
            return 0
        return next((size for size in self._contexts if size >= tokens), self._contexts[-1])

    def _step_s(self, num_decodes: int, context_tokens: int, prompt_tokens: int, prompt_position: int) -> float:
        """Expected seconds of a step in which each rank decodes so many requests and computes one chunk from ``prompt_position``."""
        key = (num_decodes, context_tokens, prompt_tokens, prompt_position)
        price = self._prices.get(key)
        if price is None:
            if len(self._prices) >= _MAX_PRICES:
                self._prices.clear()
            price = self._cost.price(self._imagined(*key)).step_s
            self._prices[key] = price
        return price

    def _imagined(self, num_decodes: int, context_tokens: int, prompt_tokens: int, prompt_position: int) -> StepPlan:
        each = self._tokens_each
        computed = max(context_tokens - each, 0)
        items = [PlanItem(slot, slot, computed, each, each - 1, True) for slot in range(num_decodes)]
        if prompt_tokens:
            items.append(PlanItem(num_decodes, num_decodes, prompt_position, prompt_tokens, 0, True))  # it may be the prompt's end
        return StepPlan(0, (RankPlan(items=tuple(items)),) * self._num_ranks)


def _grid(first: int, last: int) -> list[int]:
    """first, then each about _RATIO times the one before, to last."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, max(sizes[-1] + 1, math.ceil(sizes[-1] * _RATIO))))
    return sizes


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The last of [low, high] that fits, by bisection: fitting ends somewhere and does not begin again. ``low`` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
