"""How well a calibration predicts whole steps: calibrate, then measure what was never calibrated, interleaved against drift.

    python -m tests.benchmarks.bench_prediction [--models tiny-v41,v41-100m,smollm2-135m] [--budget 200] [--points 24] [--out points.json]

For each model: a calibration (ranks, collectives, whole steps of tp1dp1ep1 and tp2dp1ep1), then in random order ``--points`` loads of batch
sizes and lengths that no calibration uses, on each layout, every one measured twice (two engine sessions; the second is the repeatability)
and predicted by the same closed loop that ``twinfer predict`` prices. Data-parallel layouts are never run before they are predicted.

Printed: median and 90th percentile of |predicted / measured - 1| and the same of the repetition, the share of measurements inside the 90 %
interval, by model and layout, and the held-out errors of components. ``--from points.json`` fits again on what was kept.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calibration import calibrate
from calibration.assemble import EngineRun
from calibration.calibrate import Measurements, Target
from calibration.campaign import CollectivePoint, Point
from calibration.cost_model import ModelFit
from calibration.predict import Question, predict_point
from calibration.probe import Probe, factors, median_probe, run_probe
from engine.cli.step_bench import StepLoad
from engine.cli.step_runs import run_steps
from engine.core.features import features
from engine.core.layout import parse_layout
from engine.model.files import read_model_files

CONTEXTS = (20, 40, 80, 150, 180, 320, 450)
BATCHES = (1, 2, 3, 5, 7, 9, 10, 14, 18, 22, 27)
LOADS_A_SESSION = 6


class Kept(msgspec.Struct):
    """Everything of one model, to be fitted again."""

    model: str
    points: list[Point]
    collectives: list[CollectivePoint]
    runs: list[EngineRun]
    probes: list[Probe]
    tests: list[list[EngineRun]]  # two sessions each
    test_probes: list[Probe]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny-v41,v41-100m,smollm2-135m")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of calibration a model")
    parser.add_argument("--points", type=int, default=24, help="loads tested a model and layout")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--max-prompts", type=int, default=12_000, help="prompt tokens of one load, in all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    arguments = parser.parse_args(argv)
    kept: list[Kept] = []
    if arguments.source is not None:
        kept = msgspec.json.decode(arguments.source.read_bytes(), type=list[Kept])
    else:
        for model in arguments.models.split(","):
            kept.append(_measure(model, arguments))
            if arguments.out is not None:
                arguments.out.write_bytes(msgspec.json.encode(kept))
            _show(kept[-1:], sys.stderr)
    _show(kept, sys.stdout)
    return 0


def target_of(model: str) -> Target:
    spec = read_model_files(model).spec
    load_format: Any = "random" if model == "v41-100m" else "auto"
    return Target(model, spec, calibrate.spec_hash(spec), calibrate.auto_dtype(spec), load_format)


def _run_steps(model: str, layout: str, loads: Sequence[tuple[int, int, int]], **options: Any) -> Any:
    return run_steps(model, layout, [StepLoad(*load) for load in loads], **options)


def _measure(model: str, arguments: argparse.Namespace) -> Kept:
    target = target_of(model)
    begin_s = time.monotonic()
    measured = calibrate.measure(
        target,
        budget_s=arguments.budget,
        max_batch=arguments.max_batch,
        max_context=arguments.max_context,
        run_steps=_run_steps,
        partial=None,
        progress=lambda _phase, _done, _total: None,
    )
    print(
        f"{model}: calibrated in {time.monotonic() - begin_s:.0f} s, {len(measured.points)} shapes, {len(measured.runs)} runs",
        file=sys.stderr,
    )
    tests, probes = _test(target, arguments)
    return Kept(model, measured.points, measured.collectives, measured.runs, measured.probes, tests, probes)


def _test(target: Target, arguments: argparse.Namespace) -> tuple[list[list[EngineRun]], list[Probe]]:
    """Sessions of a few loads, layouts in turn, each session run twice with another layout's in between."""
    draw = random.Random(7)
    layouts = [str(layout) for layout in calibrate.candidate_layouts(target.spec, 2)[0]]
    calibrated = set(calibrate.whole_loads(arguments.max_batch, arguments.max_context))
    sessions: list[tuple[str, list[tuple[int, int, int]]]] = []
    for layout in layouts:
        loads: list[tuple[int, int, int]] = []
        while len(loads) < arguments.points:
            batch, context = draw.choice([one for one in BATCHES if one < arguments.max_batch]), draw.choice(CONTEXTS)
            load = (batch, context, 1 if draw.random() < 0.25 else draw.choice((6, 10, 14)))
            if load not in calibrated and 10 * batch * context <= arguments.max_prompts and context <= arguments.max_context:
                loads.append(load)
        sessions += [(layout, loads[index : index + LOADS_A_SESSION]) for index in range(0, len(loads), LOADS_A_SESSION)]
    order = draw.sample(sessions, len(sessions))
    found: dict[tuple[str, tuple[int, int, int]], list[EngineRun]] = {}
    probes = [run_probe()]
    for first, second in zip(order[::2], [*order[1::2], order[0]][: len(order[::2])], strict=True):
        for layout, loads in (first, second, first, second):
            for run in _run_steps(target.name, layout, loads, budget_s=1e9, load_format=target.load_format, dtype=target.dtype):
                key = (layout, (run.load.batch, run.load.context, run.load.new_tokens))
                found.setdefault(key, []).append(_kept_run(target, layout, run))
            probes.append(run_probe())
    return [runs[:2] for runs in found.values() if len(runs) >= 2], probes


def _kept_run(target: Target, layout: str, run: Any) -> EngineRun:
    rows = tuple(features(plan, target.spec) for plan in run.plans)
    load = run.load
    return EngineRun(
        target.name, layout, 0, 0, load.batch, load.context, load.new_tokens, load.method, rows, tuple(run.step_s), tuple(run.forward_s)
    )


def _show(kept: Sequence[Kept], file: Any) -> None:
    rows: list[tuple[str, str, float, float, bool]] = []
    for entry in kept:
        target = target_of(entry.model)
        fit, _ = calibrate.fit(target, Measurements(entry.points, entry.collectives, entry.runs, entry.probes))
        rows += _compared(entry, target, fit)
        for rank in fit.ranks:
            shown = sorted(rank.components.items(), key=lambda one: -one[1].share)[:8]
            text = ", ".join(f"{name} {one.share:.0%}: {one.held_out_median:.1%}/{one.held_out_p90:.1%}" for name, one in shown)
            print(f"{entry.model} {rank.layout}: held out, median/p90: {text}", file=file)
        for step in fit.steps:
            print(f"{entry.model} {step.layout}: {step}", file=file)
    print(f"{'':<26} {'n':>4} {'median':>7} {'p90':>7} {'bias':>7}   repeated: {'median':>7} {'p90':>7}   inside 90 %", file=file)
    for name in dict.fromkeys([*(f"{row[0]} {row[1]}" for row in rows), "all"]):
        mine = [row for row in rows if name in ("all", f"{row[0]} {row[1]}")]
        errors, repeats = np.array([row[2] for row in mine]), np.array([row[3] for row in mine])
        line = f"{name:<26} {len(mine):>4} {_quantiles(errors)} {np.median(errors):>+7.1%}"
        print(f"{line}             {_quantiles(repeats)}   {np.mean([row[4] for row in mine]):.0%}", file=file)


def _quantiles(errors: Any) -> str:
    return f"{np.median(np.abs(errors)):>7.1%} {np.quantile(np.abs(errors), 0.9):>7.1%}"


def _compared(entry: Kept, target: Target, fit: ModelFit) -> list[tuple[str, str, float, float, bool]]:
    """(model, layout, predicted / measured - 1, second / first - 1, inside) of every test."""
    now = factors(median_probe(entry.probes), median_probe(entry.test_probes))
    rows = []
    for first, second in entry.tests:
        question = Question(target.spec, context=first.context, new_tokens=first.new_tokens)
        point = predict_point(fit, question, parse_layout(first.layout), first.batch, now)
        error = point["step_s"] / first.median_s - 1.0
        inside = point["lo_s"] <= first.median_s <= point["hi_s"]
        rows.append((entry.model, first.layout, error, second.median_s / first.median_s - 1.0, inside))
    return rows


if __name__ == "__main__":
    sys.exit(main())
