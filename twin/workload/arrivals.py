"""When requests come by themselves: a renewal process run on the clock of a changing rate.

Gaps of mean 1 (gamma distributed with the wanted coefficient of variation; 1 is a Poisson process, 0 a metronome) are summed; the sum is
the number of requests expected until the arrival, and the profile's inverse turns it into seconds. With the gaps of a Poisson process this
is exactly the inhomogeneous one of that rate (time change by the cumulated rate: Cinlar, "Introduction to stochastic processes", 1975).
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec


class Profile(Protocol):
    """A rate over time, by the inverse of its integral."""

    def time_s(self, expected: float) -> float:
        """When ``expected`` requests should have come; never falls as ``expected`` grows."""
        ...


class Steady(msgspec.Struct, frozen=True):
    """The same rate for ever; infinite: everything at time 0."""

    rate_per_s: float

    def time_s(self, expected: float) -> float:
        return expected / self.rate_per_s


class Ramp(msgspec.Struct, frozen=True):
    """From ``start_per_s`` in a straight line to ``end_per_s`` over ``ramp_s``, then steady.

    The integral is a t + (b - a) t^2 / 2T; its inverse is written so that nothing cancels where a and b are close.
    """

    start_per_s: float
    end_per_s: float
    ramp_s: float

    def time_s(self, expected: float) -> float:
        within = (self.start_per_s + self.end_per_s) / 2 * self.ramp_s
        if expected >= within:
            return self.ramp_s + (expected - within) / self.end_per_s
        square = self.start_per_s**2 + 2 * (self.end_per_s - self.start_per_s) * expected / self.ramp_s
        return 2 * expected / (self.start_per_s + math.sqrt(max(square, 0.0)))


class Bursts(msgspec.Struct, frozen=True):
    """On for the first ``on_share`` of each period, then off. ``rate_per_s`` is the mean over on and off."""

    rate_per_s: float
    period_s: float
    on_share: float

    def time_s(self, expected: float) -> float:
        on_s = expected / self.rate_per_s * self.on_share
        periods, rest_s = divmod(on_s, self.period_s * self.on_share)
        return periods * self.period_s + rest_s


class Steps:
    """A rate for each stretch of time: ``rates_per_s[i]`` from ``starts_s[i]`` on; the last one holds for ever. Rates may be 0: what is
    expected after the last that is not never comes."""

    def __init__(self, starts_s: Sequence[float], rates_per_s: Sequence[float]) -> None:
        self._starts_s, self._rates_per_s = starts_s, rates_per_s
        widths_s = [end_s - start_s for start_s, end_s in itertools.pairwise(starts_s)]
        within = (width_s * rate_per_s for width_s, rate_per_s in zip(widths_s, rates_per_s, strict=False))
        self._expected_before = list(itertools.accumulate(within, initial=0.0))

    def time_s(self, expected: float) -> float:
        # The last stretch that begins with no more than expected: one of rate 0 begins with as much as the one after it.
        index = bisect.bisect_right(self._expected_before, expected) - 1
        left = expected - self._expected_before[index]
        return self._starts_s[index] + left / self._rates_per_s[index] if self._rates_per_s[index] else math.inf


def arrival_times_s(profile: Profile, cv: float, seed: str, *, from_start: bool = True) -> Iterator[float]:
    """Ascending, without end. The first request comes at the profile's start, as a load generator sends it, or after a first gap: so that
    many clients do not begin together."""
    source = random.Random(seed)
    shape = 1.0 / cv**2 if cv else math.inf

    def gap() -> float:
        return 1.0 if not cv else source.expovariate(1.0) if cv == 1.0 else source.gammavariate(shape, 1.0 / shape)

    expected = 0.0 if from_start else gap()
    while True:
        yield profile.time_s(expected)
        expected += gap()
