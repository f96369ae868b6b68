"""A Prometheus histogram without locks: everything that observes and reads lives on trio's thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Values counted by upper bound; a value equal to a bound is within it. Constant memory."""

    __slots__ = ("_bounds", "_counts", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.count += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(le, number of values not above it), the last one "+Inf"."""
        labels = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(labels, map(float, accumulate(self._counts)), strict=True))


def doubling(first: int, last: int) -> tuple[float, ...]:
    """first, 2 first, 4 first ... up to last."""
    bounds = [float(first)]
    while bounds[-1] < last:
        bounds.append(2 * bounds[-1])
    return tuple(bounds)
