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

_REPEATS = 15
# Short enough to fit between two interruptions, long enough for the clock. Sizes: in the cache of a core; far beyond any cache.
_MATRIX = 256
_COPY_BYTES = 48 << 20
# What differs less than the probe repeats itself is no drift.
_DEAD_BAND = 0.03
_MAX_FACTOR = 20.0


class Probe(msgspec.Struct, frozen=True):
    """Seconds of each loop: a matrix product, a copy of memory, interpreted Python."""

    compute_s: float
    memory_s: float
    host_s: float


def run_probe() -> Probe:
    """About half a second. Medians, taken in turn, so that a moment's disturbance hits all three alike."""
    left = np.random.default_rng(0).standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
    source = np.zeros(_COPY_BYTES // 8)
    target = np.empty_like(source)

    def compute() -> None:
        np.dot(left, left)

    def copy() -> None:
        np.copyto(target, source)

    def host() -> None:
        total = 0
        for index in range(30_000):
            total += index & 7

    times: dict[str, list[float]] = {"compute": [], "memory": [], "host": []}
    loops: tuple[tuple[str, Callable[[], None]], ...] = (("compute", compute), ("memory", copy), ("host", host))
    for _ in range(_REPEATS):
        for name, loop in loops:
            begin_s = time.perf_counter()
            loop()
            times[name].append(time.perf_counter() - begin_s)
    return Probe(*(float(np.median(times[name][2:])) for name in ("compute", "memory", "host")))


def factors(then: Probe, now: Probe) -> ProbeFactors:
    """How much slower the machine is now than then."""
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
