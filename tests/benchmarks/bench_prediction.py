"""How well a calibration predicts whole steps: calibrate, then measure what was never calibrated, interleaved against drift.

    python -m tests.benchmarks.bench_prediction FOLDER [--models tiny-v41,v41-100m,smollm2-135m] [--minutes 5] [--points 28]

For each model: a calibration (ranks, collectives, whole steps of tp1dp1ep1 and tp2dp1ep1), then in random order ``--points`` loads of batch
sizes and lengths that no calibration uses, on each layout, every one measured twice (two engine sessions, another one between them; the
second is the repeatability) and predicted by the same closed loop that ``twinfer predict`` prices, scaled by the speed that a probe shows
just before each load. Data-parallel layouts are never run before they are predicted.

Everything measured is kept in FOLDER, and a run goes on from what it finds there: ``--minutes`` ends it early, ``--minutes 0`` measures
nothing and fits again.

Printed, of each load's median step and of its mean one: median and 90th percentile of |predicted / measured - 1|, of the same at the speed
that the machine turned out to have during the load, and of the repetition; the share of measurements inside the 90 % interval, by model and
layout; the held-out errors of components; and how many steps a second are priced over arrays of features.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from calibration import calibrate
from calibration.assemble import EngineRun
from calibration.calibrate import Measurements, MeteredRuns, RunSpeed, Target
from calibration.campaign import CollectivePoint, Point
from calibration.cost_model import CalibratedCost, ModelFit
from calibration.features import uniform_steps
from calibration.predict import Question, predict_point
from calibration.probe import Probe, factors
from calibration.speed_meter import SpeedMeter
from engine.cli.step_bench import StepLoad
from engine.cli.step_runs import run_steps
from engine.core.features import features
from engine.core.layout import Layout, parse_layout
from engine.model.files import read_model_files

CONTEXTS = (20, 40, 80, 150, 180, 320, 450)
BATCHES = (1, 2, 3, 5, 7, 9, 10, 14, 18, 22, 27)
LOADS_A_SESSION = 7
SWEPT_STEPS = 50_000
Statistic = Literal["median", "mean"]
STATISTICS: tuple[Statistic, ...] = ("median", "mean")
Load = tuple[int, int, int]  # batch, context, new tokens


class Kept(msgspec.Struct):
    """A calibration's measurements, to be fitted again."""

    model: str
    points: list[Point]
    collectives: list[CollectivePoint]
    runs: list[EngineRun]
    run_speeds: list[RunSpeed]
    together_probe: Probe | None
    speed_changes: list[float] = msgspec.field(default_factory=list)

    @property
    def measured(self) -> Measurements:
        return Measurements(self.points, self.collectives, self.runs, self.run_speeds, [], self.together_probe, self.speed_changes)


class Probed(msgspec.Struct):
    """A load's steps, and the machine's speed before and during them."""

    speed: RunSpeed
    run: EngineRun


class Session(msgspec.Struct):
    """Loads of one engine."""

    layout: str
    number: int
    repetition: int
    loads: list[Probed]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="tiny-v41,v41-100m,smollm2-135m")
    parser.add_argument("--minutes", type=float, default=600.0, help="no new piece of work is begun after so many")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of calibration a model")
    parser.add_argument("--points", type=int, default=28, help="loads tested a model and layout")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--max-prompts", type=int, default=5_000, help="prompt tokens of one load, in all")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * arguments.minutes
    models = arguments.models.split(",")
    is_done = all(_measure(model, arguments, end_s) for model in models)
    print("everything is measured" if is_done else "more is to be measured: run again", file=sys.stderr)
    _show([model for model in models if _calibration(arguments.folder, model).exists()], arguments.folder)
    return 0


def target_of(model: str) -> Target:
    spec = read_model_files(model).spec
    load_format: Any = "random" if model == "v41-100m" else "auto"
    return Target(model, spec, calibrate.spec_hash(spec), calibrate.auto_dtype(spec), load_format)


def _calibration(folder: Path, model: str) -> Path:
    return folder / f"{model}.calibration.json"


def _sessions(folder: Path, model: str) -> Path:
    return folder / f"{model}.sessions.jsonl"


def _read_sessions(folder: Path, model: str) -> list[Session]:
    path = _sessions(folder, model)
    return [msgspec.json.decode(line, type=Session) for line in path.read_bytes().splitlines()] if path.exists() else []


def _run_steps(model: str, layout: str, loads: Sequence[Load], **options: Any) -> Any:
    return run_steps(model, layout, [StepLoad(*load) for load in loads], **options)


def _long(load: Load, max_prompts: int) -> StepLoad:
    """Measured for longer where it costs little."""
    return StepLoad(*load, requests_per_slot=min(max(max_prompts // (load[0] * load[1]), 10), 30))


def _measure(model: str, arguments: argparse.Namespace, end_s: float) -> bool:
    """Whether the model is through."""
    target, kept = target_of(model), _calibration(arguments.folder, model)
    if not kept.exists():
        if (begin_s := time.monotonic()) > end_s:
            return False
        measured = calibrate.measure(
            target,
            budget_s=arguments.budget,
            max_batch=arguments.max_batch,
            max_context=arguments.max_context,
            run_steps=_run_steps,
            partial=None,
            progress=lambda _phase, _done, _total: None,
        )
        found = Kept(
            model,
            measured.points,
            measured.collectives,
            measured.runs,
            measured.run_speeds,
            measured.together_probe,
            measured.speed_changes,
        )
        kept.write_bytes(msgspec.json.encode(found))
        seconds = time.monotonic() - begin_s
        print(f"{model}: calibrated in {seconds:.0f} s, {len(found.points)} shapes, {len(found.runs)} runs", file=sys.stderr)
    known = {(session.layout, session.number, session.repetition) for session in _read_sessions(arguments.folder, model)}
    for layout, number, repetition, loads in _plan(target, arguments):
        if (layout, number, repetition) in known:
            continue
        if time.monotonic() > end_s:
            return False
        session = Session(layout, number, repetition, _probed(target, layout, loads, arguments.max_prompts))
        with _sessions(arguments.folder, model).open("ab") as file:
            file.write(msgspec.json.encode(session) + b"\n")
    return True


def _plan(target: Target, arguments: argparse.Namespace) -> list[tuple[str, int, int, list[Load]]]:
    """(layout, number, repetition, loads) of every session in order: two in turn, twice."""
    layouts = [str(layout) for layout in calibrate.candidate_layouts(target.spec, 2)[0]]
    calibrated = set(calibrate.whole_loads(arguments.max_batch, arguments.max_context))
    sessions: list[tuple[str, int, list[Load]]] = []
    for layout in layouts:
        loads: list[Load] = []
        draw = random.Random(layout)
        while len(loads) < arguments.points:
            batch, context = draw.choice([one for one in BATCHES if one < arguments.max_batch]), draw.choice(CONTEXTS)
            load = (batch, context, 1 if draw.random() < 0.25 else draw.choice((5, 8, 12)))
            if load not in calibrated and 10 * batch * context <= arguments.max_prompts and load not in loads:
                loads.append(load)
        sessions += [(layout, index, loads[index : index + LOADS_A_SESSION]) for index in range(0, len(loads), LOADS_A_SESSION)]
    order = random.Random(7).sample(sessions, len(sessions))
    if len(order) % 2:
        order.append(order[0])  # measured once more; the first two count
    found = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        for repetition in (0, 1):
            found += [(layout, number, repetition, loads) for layout, number, loads in (first, second)]
    return found


def _probed(target: Target, layout: str, loads: Sequence[Load], max_prompts: int) -> list[Probed]:
    chosen = [_long(load, max_prompts) for load in loads]
    with SpeedMeter() as meter:
        metered = MeteredRuns(meter)
        runs = run_steps(target.name, layout, chosen, budget_s=1e9, load_format=target.load_format, dtype=target.dtype, done=metered)
    return [Probed(speed, _kept_run(target, layout, run)) for speed, run in zip(metered.speeds, runs, strict=True)]


def _kept_run(target: Target, layout: str, run: Any) -> EngineRun:
    rows = tuple(features(plan, target.spec) for plan in run.plans)
    load = run.load
    return EngineRun(
        target.name, layout, 0, 0, load.batch, load.context, load.new_tokens, load.method, rows, tuple(run.step_s), tuple(run.forward_s)
    )


class Compared(msgspec.Struct):
    """A load measured twice, each time predicted at the speed probed before, and again at the speed there was."""

    name: str
    runs: tuple[EngineRun, EngineRun]
    points: list[dict[str, Any]]
    known: list[dict[str, Any]]

    def measured(self, statistic: Statistic) -> tuple[float, float]:
        one, two = (run.median_s if statistic == "median" else float(np.mean(run.step_s)) for run in self.runs)
        return one, two

    def errors(self, statistic: Statistic, *, is_speed_known: bool = False) -> list[float]:
        key = "step_s" if statistic == "median" else "step_mean_s"
        points = self.known if is_speed_known else self.points
        return [point[key] / real - 1.0 for point, real in zip(points, self.measured(statistic), strict=True)]

    def repeated(self, statistic: Statistic, *, is_speed_known: bool = False) -> float:
        """``is_speed_known``: had the machine been as fast in both."""
        one, two = self.measured(statistic)
        if is_speed_known:
            first, second = self.errors(statistic, is_speed_known=True)
            return (1.0 + first) / (1.0 + second) - 1.0
        return two / one - 1.0

    @property
    def are_inside(self) -> list[bool]:
        return [point["lo_s"] <= real <= point["hi_s"] for point, real in zip(self.points, self.measured("median"), strict=True)]


def _show(models: Sequence[str], folder: Path) -> None:
    rows: list[Compared] = []
    for model in models:
        kept = msgspec.json.decode(_calibration(folder, model).read_bytes(), type=Kept)
        target = target_of(model)
        then = calibrate.speed_of([kept.measured])
        fit, _ = calibrate.fit(target, kept.measured, then)
        rows += compared(target, fit, then, _read_sessions(folder, model))
        print(f"{model}: {_priced_per_s(target, fit):,.0f} steps priced a second")
        for rank in fit.ranks:
            shown = sorted(rank.components.items(), key=lambda one: -one[1].share)[:8]
            text = ", ".join(f"{name} {one.share:.0%}: {one.held_out_median:.1%}/{one.held_out_p90:.1%}" for name, one in shown)
            print(f"{model} {rank.layout}: held out, median/p90: {text}")
        for step in fit.steps:
            print(f"{model} {step.layout}: {step}")
    if not rows:
        return
    for statistic in STATISTICS:
        _show_errors(rows, statistic)


def _show_errors(rows: Sequence[Compared], statistic: Statistic) -> None:
    head = f"{'median':>7} {'p90':>7}"
    columns = f"{head} {'bias':>7} repeated: {head}"
    print(f"\n{f'{statistic} step':<26} {'n':>4} {columns} | at its speed: {columns} | inside 90 %")
    for name in dict.fromkeys([*(row.name for row in rows), "all"]):
        mine = [row for row in rows if name in ("all", row.name)]
        line = f"{name:<26} {len(mine):>4}"
        for is_speed_known in (False, True):
            errors = np.concatenate([row.errors(statistic, is_speed_known=is_speed_known) for row in mine])
            again = np.array([row.repeated(statistic, is_speed_known=is_speed_known) for row in mine])
            line += f"{'':<17}" * is_speed_known
            line += f" {_quantiles(errors)} {np.median(errors):>+7.1%}           {_quantiles(again)}"
        print(f"{line}   {np.mean([row.are_inside for row in mine]):.0%}" if statistic == "median" else line)


def _priced_per_s(target: Target, fit: ModelFit) -> float:
    """Features made and priced, in one process."""
    draw = np.random.default_rng(0)
    shape = (SWEPT_STEPS, 1)
    requests, context = draw.integers(1, 32, shape).astype(float), draw.integers(8, 512, shape).astype(float)
    cost = CalibratedCost(fit, target.spec, Layout())
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        cost.price_table(uniform_steps(target.spec, requests, context, np.ones(shape)))
        times.append(time.perf_counter() - begin_s)
    return SWEPT_STEPS / min(times)


def _quantiles(errors: Any) -> str:
    return f"{np.median(np.abs(errors)):>7.1%} {np.quantile(np.abs(errors), 0.9):>7.1%}"


def compared(target: Target, fit: ModelFit, then: Probe | None, sessions: Sequence[Session]) -> list[Compared]:
    """Every load measured twice, with what the fit says of it each time."""
    found: list[Compared] = []
    second = {(session.layout, session.number): session for session in sessions if session.repetition == 1}
    for session in sessions:
        other = second.get((session.layout, session.number))
        if session.repetition or other is None:
            continue
        for one, two in zip(session.loads, other.loads, strict=True):
            run = one.run
            question = Question(target.spec, context=run.context, new_tokens=run.new_tokens)
            layout = parse_layout(run.layout)
            points, known = (
                [predict_point(fit, question, layout, run.batch, factors(then, getattr(each.speed, when))) for each in (one, two)]
                for when in ("before", "during")
            )
            found.append(Compared(f"{target.name} {run.layout}", (run, two.run), points, known))
    return found


if __name__ == "__main__":
    sys.exit(main())
