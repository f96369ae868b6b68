"""Steady decode in one event: a stretch that the core has proved, priced as a whole, taken back where something comes in between.

Nothing of the scheduler moves before the leap ends. A message that comes before ends it at the end of the step that is then under way,
which is when the replica reads its mailbox: what a step-by-step replica had done by then is what is done at that moment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Protocol, runtime_checkable

from engine.core.plan import RequestId
from engine.core.request import Sequence
from engine.core.scheduler import Scheduler
from engine.core.stretch import Answer, Stretch, StretchCost, StretchPrice, find_stretch
from twin.outcomes import Outcomes

# Prices are made for so many steps at once; a leap that ends sooner has made some for nothing.
MAX_STEPS = 128
# A stretch costs about as much as two steps one by one.
MIN_STEPS = 3


@runtime_checkable
class Foreknown(Outcomes, Protocol):
    """Outcomes that are known before the steps."""

    def answer_of(self, sequence: Sequence) -> Answer: ...

    def skip(self, request: RequestId, count: int) -> None:
        """``count`` results of ``request`` have been given, without ``result``."""
        ...


class Leap:
    """Rounds that end at ``ends_s``; the first is of a step under way. ``price`` is of the steps that they plan, one later each."""

    def __init__(self, stretch: Stretch, price: StretchPrice, begin_s: float, first_end_s: float) -> None:
        self.stretch = stretch
        self.begin_s = begin_s
        self.price = price
        self.ends_s = list(accumulate(price.step_s[:-1], initial=first_end_s))

    def cut(self, now_s: float, has_ended: bool) -> float:
        """Something comes at ``now_s``; ``has_ended``: a step that ends at this very instant has done so. Returns the new end."""
        place = bisect_right(self.ends_s, now_s) if has_ended else bisect_left(self.ends_s, now_s)
        del self.ends_s[place + 1 :]
        return self.ends_s[-1]


def find_leap(
    core: Scheduler, outcomes: Foreknown, cost: StretchCost, begin_s: float, first_end_s: float, *, keeps_cache: bool
) -> Leap | None:
    """From ``begin_s``, when the next plan would be made; the step under way ends at ``first_end_s``. None where it is not worth it."""
    stretch = find_stretch(core, outcomes.answer_of, MAX_STEPS, min_steps=MIN_STEPS, keeps_cache=keeps_cache)
    if stretch is None:
        return None
    return Leap(stretch, cost.price_stretch(stretch.contexts, stretch.num_steps, stretch.saved_tails), begin_s, first_end_s)
