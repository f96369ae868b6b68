"""``twinfer demo``: the main job in one go. Calibrate this machine, write down what layouts and batch sizes will cost, run them, compare.

A layout's predictions are in the ledger, on the disk, before the first of its runs begins. What is run is ``bench steps``: whole steps from
commit to commit while every rank has its batch. Nothing measured there goes back into a prediction. Where the time allows, everything is
predicted and run once more: what two measurements of the same differ by is what no prediction can be better than.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.command_line import add_common_arguments, print_json
from engine.core.errors import ConfigError
from engine.core.metrics import percentile
from engine.writing import make_folder, whole_file
from twin.ledger import Ledger, Prediction, Quantity, error, is_inside, measured, predict

if TYPE_CHECKING:
    from calibration.calibrate import RunSteps, StepRunLike
    from calibration.store import Calibration
    from engine.core.specs import ModelSpec
    from twin.ledger import Speed

# (path of the page, what --json prints): drawn by the dashboards.
DrawDemo = Callable[[Path, Mapping[str, Any]], None]
DEFAULT_BUDGET_S = 270.0
MIN_BUDGET_S, MAX_BUDGET_S = 180.0, 7200.0
# The calibration's measuring time, of the budget; starting its processes adds some twenty seconds.
_CALIBRATION_SHARE = 0.35
# What an engine takes to start, and the report to be drawn.
_START_S, _END_S = 8.0, 3.0
MAX_POINTS = 256


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    *,
    read_spec: Callable[[str], ModelSpec],
    run_steps: RunSteps,
    draw_report: DrawDemo,
) -> None:
    """Add the command. Engine and dashboards are injected, as for ``calibrate``."""
    parser = commands.add_parser(
        "demo",
        help="calibrate this machine, predict, run, compare: a few minutes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny-v41", metavar="M", help="a model, as for generate (default tiny-v41)")
    parser.add_argument("--layout", metavar="L[,L...]", help="default: one rank, and two by tensor and by data where cores and model allow")
    parser.add_argument("--batch-sizes", default="1,8,32", metavar="B[,B...]", help="requests per DP rank (default 1,8,32)")
    parser.add_argument("--context", type=int, default=64, metavar="TOKENS", help="prompt length (default 64)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens generated per request (default 32)")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, metavar="SECONDS", help=f"for everything, about (default {DEFAULT_BUDGET_S:g})"
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="use this one instead of calibrating")
    parser.add_argument(
        "--out", type=Path, default=Path("twinfer-demo"), metavar="DIR", help="calibration, ledger and report (default twinfer-demo)"
    )
    add_common_arguments(parser, "times in seconds")
    parser.set_defaults(run=lambda arguments: _run(arguments, read_spec, run_steps, draw_report))


def _run(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec], run_steps: RunSteps, draw_report: DrawDemo) -> int:
    begin_s = time.monotonic()
    _require_libraries()
    batches = _checked(arguments)
    spec = read_spec(arguments.model)
    if arguments.context + arguments.new_tokens > spec.max_positions:
        raise ConfigError(
            f"--context {arguments.context} and --new-tokens {arguments.new_tokens} exceed the {spec.max_positions} tokens"
            " a request may have"
        )
    layouts = _layouts(arguments.layout, spec)
    if len(layouts) * len(batches) > MAX_POINTS:
        raise ConfigError(f"{len(layouts)} layouts of {len(batches)} batch sizes; allowed: at most {MAX_POINTS} points")
    make_folder("--out", arguments.out, "calibration, ledger and report")
    calibration = _calibration(arguments, spec, batches, run_steps)
    calibrated_s = time.monotonic() - begin_s
    ledger = Ledger(arguments.out / "ledger.jsonl")
    rounds = _run_rounds(arguments, spec, layouts, batches, begin_s + arguments.budget, calibration, ledger, run_steps)
    summary = summarise(arguments.model, calibration, rounds)
    summary |= {"calibrated_s": calibrated_s, "wall_s": time.monotonic() - begin_s, "out": str(arguments.out)}
    with whole_file("--out", arguments.out / "report.html") as beside:
        draw_report(beside, summary)
    if arguments.json:
        print_json(summary)
    else:
        print("\n".join(lines(summary)))
    return 0


def _checked(arguments: argparse.Namespace) -> list[int]:
    """The batch sizes. Raises ConfigError for a number out of range."""
    from calibration.commands import parse_batches

    for flag, value, high in (("--context", arguments.context, 1 << 20), ("--new-tokens", arguments.new_tokens, 1 << 16)):
        if not 1 <= value <= high:
            raise ConfigError(f"{flag} is {value}; needed: an integer from 1 to {high}")
    if not (math.isfinite(arguments.budget) and MIN_BUDGET_S <= arguments.budget <= MAX_BUDGET_S):
        raise ConfigError(f"--budget is {arguments.budget:g} s; needed: {MIN_BUDGET_S:g} to {MAX_BUDGET_S:g}")
    return sorted(set(parse_batches(arguments.batch_sizes)))


def _layouts(asked: str | None, spec: ModelSpec) -> list[str]:
    from calibration.calibrate import candidate_layouts
    from engine.core.layout import parse_layout

    if asked is None:
        return [str(layout) for layout in candidate_layouts(spec, len(os.sched_getaffinity(0)))[0]]
    found = []
    for text in asked.split(","):
        deployment = parse_layout(text.strip())
        reason = deployment.why_not_runnable()
        if reason is not None:
            raise ConfigError(reason)
        found.append(str(deployment.decode.unit))
    return list(dict.fromkeys(found))


def _calibration(arguments: argparse.Namespace, spec: ModelSpec, batches: Sequence[int], run_steps: RunSteps) -> Calibration:
    from calibration import calibrate, store
    from calibration.commands import PhaseProgress

    if arguments.calibration is not None:
        return store.load(arguments.calibration)
    target = calibrate.Target(arguments.model, spec, calibrate.spec_hash(spec), calibrate.auto_dtype(spec), "auto")
    measurements = calibrate.measure(
        target,
        budget_s=_CALIBRATION_SHARE * arguments.budget,
        max_batch=max(batches),
        max_context=max(64, 2 * (arguments.context + arguments.new_tokens)),
        run_steps=run_steps,
        partial=None,
        progress=PhaseProgress(),
    )
    fit, held_out = calibrate.fit(target, measurements)
    made = store.new_calibration((fit,), calibrate.speed_of([measurements]))
    return store.save(arguments.out / "calibration.zip", made, held_out, [arguments.model] * len(held_out))


class Point:
    """A prediction, and what came of it."""

    def __init__(self, prediction: Prediction, details: Mapping[str, Any]) -> None:
        self.prediction, self.details = prediction, details
        self.measured: Quantity | None = None
        self.num_steps = 0

    @property
    def expected(self) -> Quantity:
        return self.prediction.quantities["step_s"]

    @property
    def load(self) -> tuple[int, int, int]:
        return self.details["batch"], self.details["context"], self.details["new_tokens"]

    @property
    def expected_run_s(self) -> float:
        """Seconds that ``bench steps`` will take for it: each slot serves so many requests, one after the other."""
        from calibration.steady import REQUESTS_PER_SLOT

        return float(REQUESTS_PER_SLOT * self.details["new_tokens"] / self.details["tokens_per_s_per_user"])


def _run_rounds(
    arguments: argparse.Namespace,
    spec: ModelSpec,
    layouts: Sequence[str],
    batches: Sequence[int],
    end_s: float,
    calibration: Calibration,
    ledger: Ledger,
    run_steps: RunSteps,
) -> list[list[Point]]:
    """All layouts, one after the other; then once more, as far as the time goes. A point that is not run has a prediction all the same."""
    from twin.speed import probe_now

    dtype = calibration.model(arguments.model).dtype
    rounds: list[list[Point]] = [[], []]
    for number, layout in [(0, layout) for layout in layouts] + [(1, layout) for layout in layouts]:
        still = len(layouts) - len({point.prediction.question["layout"] for point in rounds[0]}) if number == 0 else 1
        share_s = (end_s - _END_S - time.monotonic()) / still - _START_S
        points = _predicted(arguments, spec, calibration, layout, batches)
        chosen = affordable(points, share_s) or (points[:1] if number == 0 else [])  # of each layout something, even if it gets late
        written = points if number == 0 else chosen
        rounds[number] += written
        ledger.append([point.prediction for point in written])
        if not chosen:
            _say(f"{layout}: {'not run' if number == 0 else 'not run once more'}, the budget is spent")
            continue
        for point in chosen:
            within = f"{point.expected.low * 1e3:.2f} to {point.expected.high * 1e3:.2f}"
            _say(f"{layout}, batch {point.load[0]}: {point.expected.value * 1e3:.2f} ms a step expected ({within}){', again' * number}")
        loads = [point.load for point in chosen]
        runs = run_steps(arguments.model, layout, loads, budget_s=max(share_s, 1.0), draft_tokens=0, load_format="auto", dtype=dtype)
        _write_down(chosen, runs, probe_now(calibration)[1], ledger)
    return rounds


def _predicted(
    arguments: argparse.Namespace, spec: ModelSpec, calibration: Calibration, layout: str, batches: Sequence[int]
) -> list[Point]:
    """Of all batch sizes, at the speed that the machine has now."""
    from calibration.calibrate import spec_hash
    from calibration.predict import Question, predict_point
    from engine.core.layout import parse_layout
    from twin.speed import probe_now

    fit = calibration.model(arguments.model, spec_hash(spec))
    factors, speed = probe_now(calibration)
    question = Question(spec, context=arguments.context, new_tokens=arguments.new_tokens)
    found = []
    for batch in batches:
        details = predict_point(fit, question, parse_layout(layout), batch, factors)
        asked = {"model": arguments.model, "layout": layout, "batch": batch, "context": question.context}
        prediction = predict(
            "demo",
            {**asked, "new_tokens": question.new_tokens, "method": question.method},
            {"step_s": Quantity(details["step_s"], details["lo_s"], details["hi_s"])},
            calibration_sha256=calibration.fits_sha256,
            speed=speed,
            extrapolated=details["extrapolated"],
            note=details["note"],
        )
        found.append(Point(prediction, details))
    return found


def affordable(points: Sequence[Point], share_s: float) -> list[Point]:
    """Those, in order, whose runs are expected to end within ``share_s`` seconds."""
    chosen, expected_s = list[Point](), 0.0
    for point in points:
        if expected_s + point.expected_run_s <= share_s:
            chosen.append(point)
            expected_s += point.expected_run_s
    return chosen


def _write_down(points: Sequence[Point], runs: Sequence[StepRunLike], speed: Speed, ledger: Ledger) -> None:
    for point, run in zip(points, runs, strict=False):  # fewer runs than points where the time was up
        ordered = sorted(run.step_s)
        point.measured = Quantity(statistics.median(ordered), percentile(ordered, 0.1), percentile(ordered, 0.9))
        point.num_steps = len(ordered)
        ledger.append([measured(point.prediction, {"step_s": point.measured}, speed)])


def summarise(model: str, calibration: Calibration, rounds: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """What ``--json`` prints and the report draws."""
    again = {(point.details["layout"], point.details["batch"]): point for point in rounds[1]}
    rows = [_row(point, again.get((point.details["layout"], point.details["batch"]))) for point in rounds[0]]
    errors = [one["error"] for row in rows for one in (row, row["again"] or row) if one["error"] is not None]
    repeated = sorted(abs(row["repetition"]) for row in rows if row["repetition"] is not None)
    judged = [one["inside"] for row in rows for one in (row, row["again"]) if one is not None and one["inside"] is not None]
    return {
        "model": model,
        "machine": {name: getattr(calibration.machine, name) for name in ("cpu", "num_cores", "system", "python", "torch", "twinfer")},
        "calibration": {"made": calibration.made, "sha256": calibration.fits_sha256},
        "points": rows,
        "runs": len(judged),
        "inside": sum(judged),
        "median_error": percentile(sorted(map(abs, errors)), 0.5) if errors else None,
        "median_repetition": percentile(repeated, 0.5) if repeated else None,
    }


def _row(point: Point, again: Point | None) -> dict[str, Any]:
    return {
        **{name: point.details[name] for name in ("layout", "batch", "context", "new_tokens")},
        **_compared(point),
        "again": None if again is None else _compared(again),
        "repetition": again.measured.value / point.measured.value - 1.0 if again and again.measured and point.measured else None,
        "reason": "" if point.measured else "not run: the budget was spent",
    }


def _compared(point: Point) -> dict[str, Any]:
    prediction, expected, found = point.prediction, point.expected, point.measured
    return {
        "prediction": prediction.id,
        "predicted_at": prediction.time,
        "speed": {name: getattr(prediction.speed, f"{name}_factor") for name in ("compute", "memory", "host")},
        "predicted": {
            "step_s": expected.value,
            "lo_s": expected.low,
            "hi_s": expected.high,
            "components": point.details["components"],
        },
        "extrapolated": prediction.extrapolated,
        "note": prediction.note,
        "measured": None if found is None else {"step_s": found.value, "step_p10_s": found.low, "step_p90_s": found.high},
        "steps": point.num_steps,
        "error": None if found is None else error(expected, found),
        "inside": None if found is None else is_inside(expected, found),
    }


def lines(summary: Mapping[str, Any]) -> list[str]:
    """The table as a person reads it."""
    found = [f"{'layout':<14}{'batch':>6}{'predicted ms':>14}{'90 % within':>20}{'measured ms':>13}{'error':>8}{'2nd/1st':>9}"]
    for row in summary["points"]:
        expected, place = row["predicted"], f"{row['layout']:<14}{row['batch']:>6}"
        within = f"{expected['lo_s'] * 1e3:.2f} to {expected['hi_s'] * 1e3:.2f}"
        text = f"{place}{expected['step_s'] * 1e3:>14.2f}{within:>20}"
        if row["measured"] is None:
            found.append(f"{text}  {row['reason']}")
            continue
        flags = "" if row["inside"] else "  outside"
        flags += "  extrapolated" if row["extrapolated"] else ""
        again = f"{row['repetition']:>+9.1%}" if row["repetition"] is not None else f"{'-':>9}"
        found.append(f"{text}{row['measured']['step_s'] * 1e3:>13.2f}{row['error']:>+8.1%}{again}{flags}")
    if summary["runs"]:
        repetition = summary["median_repetition"]
        found.append(
            f"median error {summary['median_error']:.1%} of {summary['runs']} runs, {summary['inside']} of them inside their interval"
            + (f"; two runs of the same differ by {repetition:.1%} (median)" if repetition is not None else "")
        )
    out = Path(summary["out"])
    found.append(f"predictions and measurements: {out / 'ledger.jsonl'}; report: {out / 'report.html'}; {summary['wall_s']:.0f} s in all")
    return found


def _require_libraries() -> None:
    """Before minutes are spent. Raises ConfigError naming what is missing."""
    for name in ("numpy", "scipy", "pyarrow", "plotly", "torch", "trio"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"twinfer demo needs {name}, which is not installed: pip install 'twinfer[engine,calibration,dashboards]'")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
