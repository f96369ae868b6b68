"""The machine's speed while it works: a process of its own that runs the probe's loops on one core after the other, some times a second.

``python -m calibration.speed_meter CORE...`` writes (moment, core, seconds of each loop) to stdout, as doubles, until whoever started it is
gone. It takes about two percent of one core.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import numpy as np

from calibration.features import Array
from calibration.probe import Loops, Probe, mean_probe
from engine.core.errors import WorkerError

_ROOT = Path(__file__).resolve().parents[1]
_PAUSE_S = 0.025
_RECORD = struct.Struct("=5d")
_START_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 10.0
# Around a moment: what is asked of a shorter time is answered from so much.
_LEAST_WINDOW_S = 0.25
_GRID_S = 0.1


class SpeedMeter:
    """A context manager; ``between`` can be asked while it is open. Moments are of ``time.perf_counter``, which all processes share."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> SpeedMeter:
        self._file = tempfile.TemporaryFile()
        environment = dict(os.environ) | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "calibration.speed_meter", *map(str, self._cores)]
        # In a group of its own: Ctrl-C is for who started this, who ends it.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._file, env=environment, cwd=_ROOT, process_group=0)
        end_s = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and self._size() < _RECORD.size * len(self._cores) and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._file.close()

    def check(self) -> None:
        """Raises WorkerError where the meter has ended, though nobody ended it: from then on it sees nothing."""
        if (code := self._process.poll()) is not None:
            raise WorkerError("speed meter", f"ended with code {code} before the work that it was to watch")

    def between(self, begin_s: float, end_s: float) -> Probe | None:
        """Mean of the cores' means over that time; None where the meter has seen nothing of it."""
        missing_s = max(0.0, _LEAST_WINDOW_S - (end_s - begin_s))
        samples = self._samples()
        inside = samples[(samples[:, 0] >= begin_s - missing_s / 2) & (samples[:, 0] <= end_s + missing_s / 2)]
        by_core = [inside[inside[:, 1] == core] for core in self._cores]
        means = [mean_probe(Probe(*row) for row in mine[:, 2:].tolist()) for mine in by_core if len(mine)]
        if not means:
            return None
        return Probe(*(float(np.mean([getattr(probe, name) for probe in means])) for name in ("compute_s", "memory_s", "host_s")))

    def changes(self, before_s: float, after_s: float) -> list[float]:
        """What a probe of ``before_s`` could not know of the ``after_s`` that followed it: log ratios of the host loop's means, from every
        moment that was seen. Empty for a meter that was not open for so long."""
        samples = self._samples()
        series = [samples[samples[:, 1] == core] for core in self._cores]
        if min(map(len, series)) == 0:
            return []
        moments_s = np.arange(max(one[0, 0] for one in series), min(one[-1, 0] for one in series), _GRID_S)
        if len(moments_s) <= round((before_s + after_s) / _GRID_S):
            return []
        loop_s = np.mean([np.interp(moments_s, one[:, 0], one[:, 4]) for one in series], axis=0)
        before, after = round(before_s / _GRID_S), round(after_s / _GRID_S)
        total_s = np.concatenate([[0.0], np.cumsum(loop_s)])
        moments = np.arange(before, len(loop_s) - after)
        then = (total_s[moments] - total_s[moments - before]) / before
        later = (total_s[moments + after] - total_s[moments]) / after
        found: list[float] = np.log(later / then).tolist()
        return found

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _samples(self) -> Array:
        """[N, 5], of whole records."""
        size = self._size() // _RECORD.size * _RECORD.size
        return np.frombuffer(os.pread(self._file.fileno(), size, 0), dtype=np.float64).reshape(-1, 5)


def main() -> int:
    cores, starter, loops = [int(core) for core in sys.argv[1:]], os.getppid(), Loops()
    while os.getppid() == starter:
        for core in cores:
            os.sched_setaffinity(0, {core})
            time.sleep(_PAUSE_S)
            begin_s = time.perf_counter()
            found = loops.run()
            os.write(1, _RECORD.pack(begin_s, core, found.compute_s, found.memory_s, found.host_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
