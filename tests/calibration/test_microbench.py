"""The measuring processes: what they run is a rank's real work, and nothing of what they measured is lost. No assertion about speed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from calibration import calibrate
from calibration.assemble import EngineRun
from calibration.calibrate import Measurements, Target, candidate_layouts, spec_hash, whole_loads
from calibration.campaign import GatherPoint, Point, PointFile, measure_ranks, measure_together, measurers, rank_cores
from calibration.contention import measured_memory, row_bytes
from calibration.features import table_of_plans
from calibration.floors import terms
from calibration.microbench import Bench, measure_gather
from calibration.probe import Probe
from calibration.shapes import Gather, Job, Measure, Shape, cache_for
from calibration.speed_meter import SpeedMeter
from engine.cli.step_bench import StepLoad
from engine.cli.step_runs import run_steps
from engine.core.errors import WorkerError
from engine.core.features import features
from engine.core.layout import parse_layout
from engine.core.sharding import RankPlace
from engine.core.specs import COMPONENTS, ModelSpec, V41Spec
from engine.model.files import read_model_files
from tests.calibration import synthetic

SHAPES = [Shape(((40, 1), (30, 1))), Shape(((0, 20),)), Shape(((50, 1), (0, 12)))]


def job_of(spec: ModelSpec, layout: str, model: str = "tiny-v41", drafts: int = 0) -> Job:
    dtype = "float32" if model == "tiny-v41" else "bfloat16"
    cache = cache_for(spec, [*SHAPES, Shape(((40, 4),), 3)], drafts)
    return Job(model, dtype, layout, 0, rank_cores(1)[0], 1, cache, "random", stand_in=True)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("tiny-v41", "tp1dp1ep1"), ("tiny-v41", "tp2dp1ep1"), ("tiny-v41", "tp1dp2ep2"), ("qwen3-moe-100m", "tp1dp2ep2")],
)
def test_a_rank_runs_alone_with_stand_ins_for_its_peers(model: str, layout: str) -> None:
    """Every component it times is one the cost model has terms for."""
    spec = read_model_files(model).spec
    bench = Bench(job_of(spec, layout, model))
    place = RankPlace(layout=parse_layout(layout).decode.unit)
    seen: set[str] = set()
    for shape in SHAPES:
        found = bench.measure(Measure(shape, repeats=2, warm_ups=1, num_ranks=place.layout.dp))
        assert len(found.forward_s) == len(found.timed_s) == len(found.components) == 2
        for seconds, components in zip(found.timed_s, found.components, strict=True):
            assert sum(components.values()) <= seconds
            seen |= set(components)
    table = table_of_plans([shape.plan(place.layout.dp) for shape in SHAPES], spec)
    assert seen <= set(COMPONENTS)
    if model == "tiny-v41":  # the dense family's parts are priced together
        assert seen <= set(terms(spec, place, table, 4))


def test_drafts_are_measured_where_asked_for() -> None:
    spec = synthetic.tiny()
    bench = Bench(job_of(spec, "tp1dp1ep1", drafts=3))
    found = bench.measure(Measure(Shape(((40, 4),), 3), repeats=1, warm_ups=1, num_ranks=1))
    assert found.components[0]["draft"] > 0


def test_a_campaign_keeps_its_points_and_goes_on_from_them(tmp_path: Path) -> None:
    spec, path = synthetic.tiny(), tmp_path / "points"
    phases: list[str] = []
    points = PointFile(path)
    with SpeedMeter() as meter:
        measure_ranks(
            [job_of(spec, "tp1dp1ep1")], "tiny-v41", SHAPES[:1], 3.0, points, meter, lambda phase, _done, _total: phases.append(phase)
        )
    (point,) = points.points.values()
    assert point.shape == SHAPES[0]
    assert sum(point.components.values()) == pytest.approx(np.median(point.forward_s), rel=0.5)
    assert point.probe is not None
    assert set(phases) == {"tiny-v41 tp1dp1ep1 on 2 of 2 cores"} or len(set(phases)) == 1
    with path.open("ab") as file:
        file.write(b'{"model": "cut')
    again = PointFile(path)
    assert again.points == points.points
    again.add(point)
    assert len(again.total(point).forward_s) == 2 * len(point.forward_s)


@pytest.mark.parametrize(("shape_s", "num_measured"), [(0.1, 40), (1.0, 16), (1.5, 16), (5.0, 6)])
def test_a_busy_machine_measures_late_what_a_fit_needs(monkeypatch: pytest.MonkeyPatch, shape_s: float, num_measured: int) -> None:
    """Ten seconds for forty shapes: all where they are quick, sixteen where they are slow, and never past three times the time."""
    now_s = 0.0

    def measure(_processes: object, model: str, job: Job, neighbours: int, shape: Shape, *_: int) -> Point:
        nonlocal now_s
        now_s += shape_s
        return Point(model, job.layout, len(job.cores), neighbours, shape, (shape_s,), {"other": shape_s})

    monkeypatch.setattr("calibration.campaign.time", SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s))
    monkeypatch.setattr("calibration.campaign.measurers", nullcontext)
    meter = SpeedMeter()
    monkeypatch.setattr(meter, "check", lambda: None)
    monkeypatch.setattr(meter, "between", lambda _begin_s, _end_s: Probe(1.0, 1.0, 1.0))
    monkeypatch.setattr("calibration.campaign._measure", measure)
    points = PointFile(None)
    wanted = [Shape(((length, 1),)) for length in range(16, 56)]
    measure_ranks([job_of(synthetic.tiny(), "tp1dp1ep1")], "tiny-v41", wanted, 10.0, points, meter, lambda *_: None)
    assert [point.shape for point in points.points.values()] == wanted[:num_measured]


def test_points_of_a_shape_are_merged_by_their_samples() -> None:
    points = PointFile(None)
    first = Point("m", "tp1dp1ep1", 1, 0, SHAPES[0], (1.0, 1.0, 1.0), {"norm": 0.3})
    points.add(first)
    points.add(msgspec.structs.replace(first, forward_s=(2.0,), components={"norm": 0.7, "embed": 0.4}))
    total = points.total(first)
    assert total.forward_s == (1.0, 1.0, 1.0, 2.0)
    assert total.components == pytest.approx({"norm": 0.8, "embed": 0.2})  # in these shares, as long as the median together


def test_samples_at_two_speeds_are_merged_at_one() -> None:
    points = PointFile(None)
    first = Point("m", "tp1dp1ep1", 1, 0, SHAPES[0], (1.0, 1.0), {"norm": 1.0}, Probe(1e-3, 1e-3, 1e-3))
    points.add(first)
    points.add(msgspec.structs.replace(first, forward_s=(1.5, 1.5), components={"norm": 1.5}, probe=Probe(9.0, 9.0, 1.5e-3)))
    assert points.total(first).forward_s == pytest.approx((1.0, 1.0, 1.0, 1.0))


def test_a_measuring_process_that_fails_is_an_error() -> None:
    job = msgspec.structs.replace(job_of(synthetic.tiny(), "tp1dp1ep1"), model="/nowhere")
    with pytest.raises(WorkerError, match="/nowhere"), measurers([job]):
        pass


@pytest.mark.parametrize("cut", [b"", b'{"model": "tiny'])
def test_a_measuring_process_whose_starter_is_gone_ends_without_a_word(cut: bytes) -> None:
    found = subprocess.run([sys.executable, "-m", "calibration.microbench"], input=cut, capture_output=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (1, b"", b"")


def test_a_measuring_process_whose_starter_reads_no_more_ends_without_a_word() -> None:
    job = msgspec.json.encode(job_of(synthetic.tiny(), "tp1dp1ep1")) + b"\n"
    read, write = os.pipe()
    os.close(read)
    try:
        found = subprocess.run(
            [sys.executable, "-m", "calibration.microbench"], input=job, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert (found.returncode, found.stderr) == (1, b"")


def test_gathers_are_timed_alone_and_together() -> None:
    collectives, gathers = measure_together("tiny-v41", 2, (8, 4096), repeats=3)
    assert [(point.num_ranks, point.bytes_sent) for point in collectives] == [(2, 8), (2, 4096)]
    assert [point.num_ranks for point in gathers] == [1, 2]
    assert min(point.seconds for point in collectives) > 0
    assert min(point.seconds for point in gathers) > 0


def test_gathered_rows_make_the_memory_of_a_fit() -> None:
    spec = synthetic.tiny()
    identity = Target("tiny-v41", spec, spec_hash(spec), "float32", "random")
    gathers = [GatherPoint(1, 512, 0.001), GatherPoint(2, 512, 0.0016)]
    fit, _ = calibrate.fit(identity, Measurements(*synthetic.measurements(spec), [], gathers))
    assert isinstance(spec, V41Spec)
    assert fit.host_memory == measured_memory({1: 512e3 * row_bytes(spec, 4), 2: 320e3 * row_bytes(spec, 4)})
    assert calibrate.fit(identity, Measurements(*synthetic.measurements(spec)))[0].host_memory is None


def test_a_model_without_tables_gathers_nothing() -> None:
    assert measure_gather(read_model_files("qwen3-moe-100m").spec, Gather(4, 2)).forward_s == ()


def test_whole_steps_come_with_their_plans() -> None:
    runs = run_steps("tiny-v41", "tp1dp1ep1", [StepLoad(2, 12, 3), StepLoad(3, 10, 1)], budget_s=60)
    spec = synthetic.tiny()
    for run, tokens in zip(runs, (2, 10), strict=True):
        assert len(run.plans) == len(run.step_s) == len(run.forward_s) > 0
        assert all(step >= 0 and forward >= 0 for step, forward in zip(run.step_s, run.forward_s, strict=True))
        rows = tuple(features(plan, spec) for plan in run.plans)
        kept = EngineRun("m", "tp1dp1ep1", 2, 0, run.load.batch, 1, 1, "window", rows, tuple(run.step_s), tuple(run.forward_s))
        assert max(kept.table().tokens[:, 0]) >= tokens


def test_data_parallel_layouts_are_never_run_whole() -> None:
    spec = synthetic.tiny()
    ranks, whole = candidate_layouts(spec, 2)
    assert [str(layout) for layout in ranks] == ["tp1dp1ep1", "tp2dp1ep1", "tp1dp2ep2"]
    assert [str(layout) for layout in whole] == ["tp1dp1ep1", "tp2dp1ep1"]
    assert [str(layout) for layout in candidate_layouts(spec, 1)[0]] == ["tp1dp1ep1"]
    assert all(context <= 100 and batch <= 8 for batch, context, _ in whole_loads(8, 100) if batch != 12)
