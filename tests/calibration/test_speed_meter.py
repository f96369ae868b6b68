"""The speed meter beside other work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from calibration.calibrate import MeteredRuns
from calibration.probe import run_probe
from calibration.speed_meter import SpeedMeter
from engine.cli.step_bench import StepLoad
from engine.cli.step_runs import StepRun
from engine.core.errors import WorkerError

ABANDON = """
import os
from calibration.speed_meter import SpeedMeter
meter = SpeedMeter().__enter__()
print(meter._process.pid, flush=True)
os._exit(0)
"""


def test_the_meter_sees_what_the_probe_sees() -> None:
    with SpeedMeter() as meter:
        began_s = time.perf_counter()
        probe = run_probe()
        seen = meter.between(began_s, time.perf_counter())
        assert meter.between(began_s - 100.0, began_s - 99.0) is None
    assert seen is not None
    for name in ("compute_s", "memory_s", "host_s"):  # the same loops, whatever else runs here
        assert getattr(seen, name) / getattr(probe, name) == pytest.approx(1.0, rel=3.0), name


def test_a_short_time_is_answered_from_what_lies_around_it() -> None:
    with SpeedMeter() as meter:
        time.sleep(0.3)
        moment_s = time.perf_counter() - 0.15
        assert meter.between(moment_s, moment_s) is not None


def test_a_meter_that_was_killed_is_no_silence() -> None:
    with SpeedMeter() as meter:
        meter.check()
        runs = MeteredRuns(meter)
        os.kill(meter._process.pid, signal.SIGKILL)
        meter._process.wait(20.0)
        with pytest.raises(WorkerError, match="speed meter: ended with code -9"):
            runs(StepRun(StepLoad(1, 8, 1), [], [], []))
    assert runs.speeds == []


def test_the_meter_ends_with_who_started_it() -> None:
    pid = int(subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, check=True, timeout=60).stdout)
    end_s = time.monotonic() + 20.0
    while _is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"  # a zombie that nobody has read yet is over
    except FileNotFoundError:
        return False


def test_changes_compare_what_was_seen_with_what_came_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is half as fast from the tenth second on: only windows that see both sides of it differ, by 2 at most."""
    moments_s = np.repeat(np.arange(0.0, 20.0, 0.05), 2)
    host_s = np.where(moments_s < 10.0, 1.0, 2.0)
    samples = np.stack((moments_s, np.tile([0, 1], len(moments_s) // 2), host_s, host_s, host_s), axis=1)
    meter = SpeedMeter()
    monkeypatch.setattr(meter, "_cores", [0, 1])
    monkeypatch.setattr(meter, "_samples", lambda: samples)
    found = np.array(meter.changes(0.6, 3.0))
    assert found.min() == pytest.approx(0.0, abs=1e-9)
    assert found.max() == pytest.approx(np.log(2.0), rel=0.02)
    assert (found > 1e-6).sum() == pytest.approx((0.6 + 3.0) / 0.1, abs=3)
    assert meter.changes(5.0, 15.0) == []
    monkeypatch.setattr(meter, "_samples", lambda: samples[:0])
    assert meter.changes(0.6, 3.0) == []
