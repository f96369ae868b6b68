"""How fast this machine is, by resource: a few short loops on each core.

A shared machine's speed moves by tens of percent, within seconds where another tenant works on the other half of a core. A calibration
stores what the loops took while it was made; a prediction runs them again and scales by the ratio. ``speed_meter`` runs them beside work.

Loops are timed by the thread's own clock: what else runs on the core does not count, what slows the core down does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from calibration.cost_model import ProbeFactors

PROBE_S = 0.6
_MIN_ROUNDS = 3
# Sizes: some tenths of a millisecond each; the vector lies in the cache of a core, the copied memory is cold each time.
_VECTOR_FLOATS, _VECTOR_ROUNDS = 4096, 20
_COPY_BYTES, _COPIED_BYTES = 48 << 20, 2 << 20
_HOST_ROUNDS = 6_000
_WARM_UP_SHARE = 0.2  # of each loop, untimed, first: whoever worked on the core before left it cold
# Of all samples, the longest are left out: an interrupt in one says nothing of the core.
_KEPT_SHARE = 0.95
# What differs less than the probe repeats itself is no drift.
_DEAD_BAND = 0.03
_MAX_FACTOR = 20.0
_BUSY_CORES = 0.3  # that others may take before it is said
_log = logging.getLogger("twinfer.calibration")


class Probe(msgspec.Struct, frozen=True):
    """Seconds of each loop: arithmetic on a vector, a copy of memory, interpreted Python."""

    compute_s: float
    memory_s: float
    host_s: float


class Loops:
    """The loops, ready to be run."""

    def __init__(self) -> None:
        # No matrix product: a BLAS library's threads go on spinning after it, which slows the loops that follow, or does not.
        self._vector = np.linspace(-1.0, 1.0, _VECTOR_FLOATS, dtype=np.float32)
        self._result = np.empty(_VECTOR_FLOATS, dtype=np.float32)
        self._source = np.ones(_COPY_BYTES // 8)
        self._target = np.ones(_COPY_BYTES // 8)
        self._place = 0

    def run(self) -> Probe:
        """On the core where this thread is."""
        return Probe(
            compute_s=_timed(self._compute, _VECTOR_ROUNDS),
            memory_s=_timed(self._copy, _COPIED_BYTES // 8),
            host_s=_timed(self._count, _HOST_ROUNDS),
        )

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            np.exp(self._vector, out=self._result)

    def _copy(self, floats: int) -> None:
        """The next piece, which was not touched for as long as it takes to come round again."""
        end = self._place + floats
        np.copyto(self._target[self._place : end], self._source[self._place : end])
        self._place = end if end + _COPIED_BYTES // 8 <= len(self._source) else 0

    def _count(self, rounds: int) -> None:
        total = 0
        for index in range(rounds):
            total += index & 7


def _timed(loop: Callable[[int], None], rounds: int) -> float:
    loop(int(_WARM_UP_SHARE * rounds))
    begin_s = time.thread_time()
    loop(rounds)
    return time.thread_time() - begin_s


class _Others:
    """How many cores work for others than this process, by the system's own account; 0 where there is none."""

    def __init__(self) -> None:
        self._begin_s, self._busy_s = time.monotonic(), self._busy()

    @staticmethod
    def _busy() -> float:
        """Seconds of all cores together that were spent on others, since the start of either."""
        try:
            user, nice, system, _idle, _wait, interrupts, softly = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + interrupts + softly) / os.sysconf("SC_CLK_TCK") - time.process_time()

    def cores(self) -> float:
        return (self._busy() - self._busy_s) / (time.monotonic() - self._begin_s)


def run_probe() -> Probe:
    """Mean over the cores this thread may use, in turn, for about half a second; the machine should have nothing else to do. Warns where it
    has: the loops show how fast a core is, not how much of it others take."""
    loops, found = Loops(), list[Probe]()
    cores, others = os.sched_getaffinity(0), _Others()
    end_s = time.monotonic() + PROBE_S
    try:
        while len(found) < _MIN_ROUNDS * len(cores) or time.monotonic() < end_s:
            for core in cores:
                os.sched_setaffinity(0, {core})
                found.append(loops.run())
    finally:
        os.sched_setaffinity(0, cores)
    if (taken := others.cores()) > _BUSY_CORES:
        _log.warning(
            "other programs take %.1f of this machine's %d cores: steps will be slower than predicted for it alone, or than measured then",
            taken, os.cpu_count() or len(cores),
        )  # fmt: skip
    return mean_probe(found)


def mean_probe(probes: Iterable[Probe]) -> Probe:
    """Of the speed at different moments, each of which counts. ``probes`` may not be empty."""
    chosen = list(probes)
    return Probe(*(_mean([getattr(probe, name) for probe in chosen]) for name in ("compute_s", "memory_s", "host_s")))


def _mean(values: list[float]) -> float:
    return fmean(sorted(values)[: max(1, round(_KEPT_SHARE * len(values)))])


def ratios(then: Probe, now: Probe) -> ProbeFactors:
    """How many times slower the loops are now than then."""
    return ProbeFactors(
        compute=_bounded(now.compute_s / then.compute_s),
        memory=_bounded(now.memory_s / then.memory_s),
        host=_bounded(now.host_s / then.host_s),
    )


def factors(then: Probe | None, now: Probe) -> ProbeFactors:
    """What to scale a calibration by: ``ratios``, but 1 for what is no drift, and where nothing was probed then."""
    if then is None:
        return ProbeFactors()
    found = ratios(then, now)
    return ProbeFactors(*(1.0 if abs(value - 1.0) < _DEAD_BAND else value for value in (found.compute, found.memory, found.host)))


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MAX_FACTOR), _MAX_FACTOR)
