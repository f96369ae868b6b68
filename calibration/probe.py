"""How fast this machine is right now, by resource: a few short loops, well under a second in total.

A shared machine's speed moves by tens of percent within minutes. A calibration stores what the probe said when it was made; a prediction
probes again and scales by the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from calibration.cost_model import ProbeFactors

_REPEATS, _MIN_REPEATS, _LIMIT_S = 90, 6, 0.8
# Short enough to fit between two interruptions, long enough for the clock. Sizes: in the cache of a core; far beyond any cache.
_VECTOR_FLOATS, _VECTOR_ROUNDS = 4096, 100
_COPY_BYTES = 48 << 20
# What differs less than the probe repeats itself is no drift.
_DEAD_BAND = 0.03
_MAX_FACTOR = 20.0


class Probe(msgspec.Struct, frozen=True):
    """Seconds of each loop: arithmetic on a vector, a copy of memory, interpreted Python."""

    compute_s: float
    memory_s: float
    host_s: float


def run_probe() -> Probe:
    """About half a second, on a busy machine little more; the loops in turn, so that a disturbance hits all three alike.

    Means of the middle half: a neighbour that is there for a part of the time counts for that part, a lone interruption for nothing.
    """
    # No matrix product: a BLAS library's threads go on spinning after it, which slows the loops that follow, or does not.
    vector, result = np.linspace(-1.0, 1.0, _VECTOR_FLOATS, dtype=np.float32), np.empty(_VECTOR_FLOATS, dtype=np.float32)
    source = np.zeros(_COPY_BYTES // 8)
    target = np.empty_like(source)

    def compute() -> None:
        for _ in range(_VECTOR_ROUNDS):
            np.exp(vector, out=result)

    def copy() -> None:
        np.copyto(target, source)

    def host() -> None:
        total = 0
        for index in range(30_000):
            total += index & 7

    times: dict[str, list[float]] = {"compute": [], "memory": [], "host": []}
    loops: tuple[tuple[str, Callable[[], None]], ...] = (("compute", compute), ("memory", copy), ("host", host))
    end_s = time.perf_counter() + _LIMIT_S
    for count in range(_REPEATS):
        if count >= _MIN_REPEATS and time.perf_counter() > end_s:
            break
        for name, loop in loops:
            begin_s = time.perf_counter()
            loop()
            times[name].append(time.perf_counter() - begin_s)
    return Probe(*(_middle_mean(times[name][2:]) for name in ("compute", "memory", "host")))


def _middle_mean(values: list[float]) -> float:
    ordered, quarter = np.sort(values), len(values) // 4
    return float(ordered[quarter : len(values) - quarter].mean())


def factors(then: Probe | None, now: Probe) -> ProbeFactors:
    """How much slower the machine is now than then; 1 where nothing was probed then."""
    if then is None:
        return ProbeFactors()
    return ProbeFactors(
        compute=_factor(now.compute_s / then.compute_s),
        memory=_factor(now.memory_s / then.memory_s),
        host=_factor(now.host_s / then.host_s),
    )


def _factor(ratio: float) -> float:
    bounded = min(max(ratio, 1 / _MAX_FACTOR), _MAX_FACTOR)
    return 1.0 if abs(bounded - 1.0) < _DEAD_BAND else bounded


def median_probe(probes: list[Probe]) -> Probe:
    """The typical one of those taken while a calibration was made."""
    return Probe(*(float(np.median([getattr(probe, name) for probe in probes])) for name in ("compute_s", "memory_s", "host_s")))
