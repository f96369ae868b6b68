"""A real recording of this process: what the profiler writes is what the importer reads."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from calibration.analysis import summarise
from calibration.errors import TraceError
from calibration.importers import import_trace
from calibration.recorder import Recorder
from calibration.replay import checked_replay
from calibration.rules import load_rules
from calibration.trace import Origin
from engine.core.errors import ConfigError
from engine.core.plan import PlanItem, RankPlan
from engine.core.specs import COMPONENTS
from engine.kernels.timing import component, timing

WEIGHT = torch.randn(64, 64)


@component("norm")
def normalise(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (64,))


@component("projection")
def project(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(normalise(x), WEIGHT)


@component("draft", whole=True)
def draft(x: torch.Tensor) -> torch.Tensor:
    return normalise(x)


@component("other")
def run(x: torch.Tensor) -> torch.Tensor:
    return draft(project(x))


def plan(number: int) -> RankPlan:
    return RankPlan(items=(PlanItem(0, 7, number, 1, 0, True),))


def record(folder: Path, mode: str, *, steps: int, max_steps: int) -> Recorder:
    recorder = Recorder(folder, mode=mode, rank=3, num_ranks=4, max_steps=max_steps, environment={"layout": "tp1dp4ep4"})  # type: ignore[arg-type]
    recorder.start()
    for number in range(5, 5 + steps):
        with recorder.step(number, plan(number)), timing(recorder.timer):
            run(torch.ones(8, 64))
    recorder.stop()
    return recorder


def lines(recorder: Recorder) -> list[dict[str, object]]:
    return [json.loads(line) for line in recorder.steps_path.read_text().splitlines()]


def test_a_profile_is_imported_and_replayed(tmp_path: Path) -> None:
    recorder = record(tmp_path / "rec", "profile", steps=4, max_steps=2)
    assert not recorder.is_recording
    assert [line["step"] for line in lines(recorder)] == [5, 6]
    table = import_trace([recorder.trace_path], load_rules())
    assert table.ranks == (3,)
    assert set(table.step[table.in_step]) == {5, 6}
    assert {COMPONENTS[code] for code in table.component[table.origin == Origin.RANGE]} == {"other", "draft", "norm", "projection"}
    # Inside the draft nothing is charged elsewhere, so each step has one norm of its own.
    norms = [table.kernel_names[code] for code in table.kernel[table.component == COMPONENTS.index("norm")]]
    assert norms.count("aten::rms_norm") == 2
    linear = table.kernel == table.kernel_names.index("aten::linear")
    assert json.loads(table.shape_names[table.shapes[linear][0]])[:2] == [[8, 64], [64, 64]]
    summary = summarise(table)
    assert summary.unclassified_share < 1
    assert checked_replay(table).span_s() == pytest.approx(table.span_s, rel=0.02)
    environment = json.loads((tmp_path / "rec" / "environment.rank3.json").read_text())
    assert (environment["layout"], environment["num_ranks"], environment["versions"]["torch"]) == ("tp1dp4ep4", 4, torch.__version__)


def test_timers_hold_components_and_plans(tmp_path: Path) -> None:
    recorder = record(tmp_path / "rec", "timers", steps=3, max_steps=100)
    assert not recorder.trace_path.exists()
    found = lines(recorder)
    assert [line["step"] for line in found] == [5, 6, 7]
    for line in found:
        components = line["components"]
        assert isinstance(components, dict)
        assert set(components) == {"other", "draft", "norm", "projection"}
        assert 0 < sum(components.values()) <= float(str(line["seconds"]))
    assert msgspec.convert(found[0]["plan"], RankPlan) == plan(5)


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    record(tmp_path / "rec", "timers", steps=1, max_steps=1)
    with pytest.raises(TraceError, match="already holds a recording of rank 3"):
        record(tmp_path / "rec", "timers", steps=1, max_steps=1)
    with pytest.raises(ConfigError, match="allowed: 1 to"):
        Recorder(tmp_path, max_steps=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written"):
        Recorder(tmp_path / "file" / "rec").start()


def fail_in_a_step(recorder: Recorder) -> None:
    with recorder.step(0, plan(0)), timing(recorder.timer):
        run(torch.ones(8, 64))
        raise ValueError("on purpose")


def test_a_step_that_fails_does_not_leave_the_profiler_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rec", mode="profile", max_steps=5)
    recorder.start()
    with pytest.raises(ValueError, match="on purpose"):
        fail_in_a_step(recorder)
    recorder.stop()
    assert recorder.trace_path.exists()
    again = record(tmp_path / "again", "profile", steps=1, max_steps=5)
    assert np.isfinite(import_trace([again.trace_path], load_rules()).span_s)
