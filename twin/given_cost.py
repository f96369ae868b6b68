"""A step cost that is stated, not fitted: seconds = base + per token + per token in cache, on the rank that has most to do.

For what no calibration covers: what-if questions, published step times, workloads longer than the calibrated models. Its prices say that
they are given; their interval has no width, because nothing is known of how wrong they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine.core.errors import ConfigError
from engine.core.plan import DecodeItems, StepPlan
from engine.core.step_cost import ComponentPrice, StepPrice
from engine.core.stretch import StretchPrice

MAX_SECONDS = 1e6
_GRAMMAR = "BASE,PER_TOKEN,PER_CONTEXT_TOKEN in seconds, such as 0.008,2e-5,1e-9"


class GivenCost(msgspec.Struct, frozen=True, tag="given"):
    """Implements ``core.step_cost.StepCost``. ``context_token_s`` is of the tokens in cache after the step, of all requests of a rank."""

    base_s: float
    token_s: float
    context_token_s: float

    def price(self, plan: StepPlan) -> StepPrice:
        slowest_s = 0.0
        for rank in plan.ranks:
            if isinstance(rank.items, DecodeItems):
                tokens, context_tokens = len(rank.items), rank.items.context_tokens
            else:
                tokens = context_tokens = 0
                for item in rank.items:
                    tokens += item.num_new_tokens
                    context_tokens += item.num_computed_tokens + item.num_new_tokens
            slowest_s = max(slowest_s, tokens * self.token_s + context_tokens * self.context_token_s)
        step_s = self.base_s + slowest_s
        return StepPrice(step_s, step_s, step_s, {"other": ComponentPrice(step_s, "given")}, note=self.note)

    def price_stretch(self, contexts: Sequence[Sequence[int]], num_steps: int, saved_tails: Sequence[Sequence[int]]) -> StretchPrice:
        """Implements ``core.stretch.StretchCost``. Saved tails take no time of their own."""
        del saved_tails
        ranks = [(len(rank), sum(rank)) for rank in contexts]
        step_s = [
            self.base_s + max(count * self.token_s + (context + step * count) * self.context_token_s for count, context in ranks)
            for step in range(num_steps)
        ]
        return StretchPrice(step_s, step_s, step_s, {"other": step_s}, {"other": "given"}, [False] * num_steps, self.note)

    @property
    def note(self) -> str:
        return f"given step cost: {self.base_s:g} s + {self.token_s:g} s a token + {self.context_token_s:g} s a token in cache"


def parse_given_cost(text: str) -> GivenCost:
    """One to three numbers; those left out are 0. Raises ConfigError."""
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > 3 or not all(0.0 <= number <= MAX_SECONDS for number in numbers):
        raise ConfigError(f"--step-cost is {text[:60]!r}; needed: {_GRAMMAR}, each from 0 to {MAX_SECONDS:g}")
    base_s, token_s, context_token_s = (*numbers, 0.0, 0.0)[:3]
    if base_s == token_s == 0.0:
        raise ConfigError(f"--step-cost is {text[:60]!r}: steps would take no time; needed: {_GRAMMAR}, the first or second above 0")
    return GivenCost(base_s, token_s, context_token_s)
