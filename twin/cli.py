"""``twinfer simulate``: a workload on layouts, request by request, before any run.

Prices of steps come from a calibration of this or another machine (--calibration), or are given (--step-cost). Requests come at a rate
(--request-rate), from clients who wait (--concurrency), or from a file (--workload). Several layouts, rates or concurrencies, separated by
commas, are a sweep: its JSON holds points[], each with the keys of a single simulation. Times are seconds, those of limits milliseconds.

Exit code 1 where requests are refused and none of any point finishes, as of bench serve.
Exit code 3 with --strict-slo [PERCENT] where fewer of a point's requests (default 99) are within the limits of --ttft, --tpot and
--goodput.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.command_line import add_common_arguments, add_config_arguments, print_config, print_json
from engine.config import ENGINE_OPTIONS, SAMPLING_OPTIONS, SERVE_OPTIONS
from engine.core.errors import ConfigError
from engine.core.metrics import Slo
from engine.load_values import parse_strict_share
from engine.options import Resolved, add_arguments, resolve
from engine.writing import check_file, whole_file
from twin.simulate_options import COST_OPTIONS, ENGINE_PART, SIMULATE_OPTIONS, TWIN_OPTIONS, WORKLOAD_PART

if TYPE_CHECKING:
    from engine.core.specs import ModelSpec

EXIT_NOTHING_FINISHED = 1
EXIT_SLO_NOT_MET = 3
# (path of the page, facts, points, their details): drawn by the dashboards.
DrawReport = Callable[[Path, Mapping[str, Any], Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], None]


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    *,
    read_spec: Callable[[str], ModelSpec],
    draw_report: DrawReport,
) -> None:
    """Add the command. Engine and dashboards are injected: ``read_spec`` opens a model's config, ``draw_report`` writes a page."""
    parser = commands.add_parser(
        "simulate",
        help="a workload on layouts, request by request, before any run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", "-m", "--model-path", required=True, metavar="M", help="a model, as for generate; its config.json is enough"
    )
    parser.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits in ms: ttft:500 tpot:30 itl:100 e2e:4000")
    parser.add_argument("--strict-slo", "--strict-sla", nargs="?", const="99", metavar="PERCENT",
                        help="exit 3 where fewer of the requests of a point (default 99 %%) are within the limits")  # fmt: skip
    parser.add_argument("--output", "-o", type=Path, metavar="FILE.html", help="write a report: one HTML file (needs plotly)")
    parser.add_argument(
        "--events", type=Path, metavar="FILE.jsonl", help="write the event log of one simulation, as the engine's (JSON Lines)"
    )
    add_common_arguments(parser, "times in seconds")
    add_config_arguments(parser)
    for options, title in (
        (COST_OPTIONS, "step times (one of --calibration, --step-cost)"),
        (WORKLOAD_PART, "workload"),
        (ENGINE_PART, "engine, as for serve"),
        (TWIN_OPTIONS, "simulation"),
    ):
        add_arguments(parser, options, title)
    parser.set_defaults(run=functools.partial(_run, read_spec=read_spec, draw_report=draw_report))


def _run(arguments: argparse.Namespace, read_spec: Callable[[str], ModelSpec], draw_report: DrawReport) -> int:
    known = (*ENGINE_OPTIONS, *SAMPLING_OPTIONS, *SERVE_OPTIONS)
    options = resolve(SIMULATE_OPTIONS, vars(arguments), os.environ, arguments.config, known=known)
    if arguments.print_config:
        return print_config(options, arguments.json)
    _require_libraries(options, with_report=arguments.output is not None)
    from twin import executors, point, questions

    limits = questions.slo(options, arguments.goodput)
    strict_share = parse_strict_share(arguments.strict_slo, limits)
    _check_outputs(arguments)
    facts, asked = questions.questions(options, arguments.model, read_spec(arguments.model), limits)
    if arguments.output is not None or arguments.events is not None:
        asked = questions.with_outputs(asked, wants_details=arguments.output is not None, events=arguments.events)
    jobs = min(options["jobs"] or len(os.sched_getaffinity(0)), len(asked))
    with _Bar(enabled=not options["no_progress"]) as bar:
        inline = functools.partial(point.answer, watch=bar.requests) if len(asked) == 1 and bar.is_drawn else point.answer
        found = []
        for answer in executors.run_all([point.encode(one) for one in asked], inline, jobs, options["executor"]):
            found.append(point.decode(answer))
            bar.points(len(found), len(asked))
    points, details = [one for one, _ in found], [one for _, one in found]
    if arguments.output is not None:
        _draw(draw_report, arguments.output, facts, points, details)
    if arguments.json:
        print_json({**facts, **points[0]} if len(points) == 1 else {**facts, "points": points})
    else:
        print("\n".join(_lines(points, limits)))
    return _exit_code(points, strict_share)


def _exit_code(points: Sequence[Mapping[str, Any]], strict_share: float | None) -> int:
    idle = [point for point in points if not point["finished"]]
    for point in idle:
        _say(f"{point['name']}: none of the {point['requests']:,} requests finished: {_why_idle(point)}")
    if len(idle) == len(points) and any(point["rejected"] for point in points):  # clients who leave do what they were asked to
        return EXIT_NOTHING_FINISHED
    if strict_share is None:
        return 0
    missed = [point for point in points if (point["goodput_share"] or 0.0) < strict_share]
    for point in missed:
        _say(f"{point['name']}: {point['goodput_share'] or 0.0:.2%} of the requests are within the limits; needed: {strict_share:.2%}")
    return EXIT_SLO_NOT_MET if missed else 0


def _why_idle(point: Mapping[str, Any]) -> str:
    """What became of the requests of a point, as none finished."""
    ended = []
    if point["rejected"]:
        ended.append(f"{point['rejected']:,} were refused")
    if point["cancelled"]:
        ended.append(f"{point['cancelled']:,} were left by their clients before their last token (--cancel-share, --cancel-after)")
    return ", ".join(ended) or "the workload holds none"


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before anything takes time."""
    for flag, path in (("--output", arguments.output), ("--events", arguments.events)):
        if path is not None:
            check_file(flag, path)


def _draw(draw_report: DrawReport, path: Path, facts: Mapping[str, Any], points: Sequence[Any], details: Sequence[Any]) -> None:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with whole_file("--output", path) as beside:
        draw_report(beside, {"date": date, **facts}, points, details)
    _say(f"wrote {path}")


def _require_libraries(options: Resolved, *, with_report: bool) -> None:
    try:
        import numpy  # noqa: F401
        import scipy  # noqa: F401
        import simpy  # noqa: F401

        if options["calibration"]:
            import pyarrow  # noqa: F401
        if with_report:
            import plotly  # noqa: F401
    except ImportError as error:
        extra = "dashboards" if error.name == "plotly" else "twin"
        raise ConfigError(f"twinfer simulate needs {error.name} for this: pip install -e '.[{extra}]'") from None


def _lines(points: Sequence[Mapping[str, Any]], limits: Slo | None) -> list[str]:
    """The results as a person reads them: a line for each point, and what makes them doubtful."""
    width = max(len(str(point["name"])) for point in points)
    head = f"{'point':<{width}}  {'finished':>15}  {'TTFT p50/p99 ms':>17}  {'TPOT p50/p99 ms':>17}  {'tokens/s':>9}"
    lines = [head + ("  goodput req/s" if limits is not None else "") + "  KV peak  hits"]
    for point in points:
        latencies = "  ".join(f"{_ms(point[key]['p50']) + ' / ' + _ms(point[key]['p99']):>17}" for key in ("ttft_s", "tpot_s"))
        finished = f"{point['finished']:,}/{point['requests']:,}"
        good = f"  {_number(point['goodput']):>6} ({point['goodput_share'] or 0.0:>4.0%})" if limits is not None else ""
        hits = "-" if point["prefix_hit_rate"] is None else f"{point['prefix_hit_rate']:.0%}"
        line = f"{point['name']:<{width}}  {finished:>15}  {latencies}  {_number(point['output_tokens_per_s']):>9}{good}"
        lines.append(f"{line}  {point['kv_peak']:>7.1%}  {hits:>4}")
    doubts: dict[str, list[str]] = {}
    for point in points:
        for text in _doubts(point):
            doubts.setdefault(text, []).append(point["name"])
    return [*lines, *(f"{'all' if len(names) == len(points) else '; '.join(names)}: {text}" for text, names in doubts.items())]


def _doubts(point: Mapping[str, Any]) -> list[str]:
    found = []
    if point["rejected"]:
        found.append(
            f"{point['rejected']:,} of {point['requests']:,} requests were refused: above the {point['context_tokens']:,} tokens that "
            "fit (--max-context with --over-context clip cuts them), or the queue was full (--max-waiting-requests)"
        )
    if point["extrapolated_share"]:
        found.append(f"{point['extrapolated_share']:.0%} of the steps lie outside what the calibration measured")
    if point["high_s"] > point["low_s"]:
        low, high = (point[name] / point["busy_s"] - 1.0 for name in ("low_s", "high_s"))
        found.append(f"step times are within {low:+.0%} to {high:+.0%} (90 %)")
    return [*found, *point["notes"]]


def _ms(value_s: float | None) -> str:
    return _number(None if value_s is None else value_s * 1e3)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _say(text: str) -> None:
    print(f"twinfer simulate: {text}", file=sys.stderr, flush=True)


class _Bar:
    """How far it is, on a terminal only: requests of the one simulation, or points of a sweep."""

    _CELLS = 30

    def __init__(self, *, enabled: bool) -> None:
        self.is_drawn = enabled and sys.stderr.isatty()
        self._drawn_cells = -1

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_drawn and self._drawn_cells >= 0:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def requests(self, done: int, total: int) -> None:
        self._draw(done, total, "requests")

    def points(self, done: int, total: int) -> None:
        self._draw(done, total, "points")

    def _draw(self, done: int, total: int, what: str) -> None:
        cells = self._CELLS * done // max(total, 1)
        if self.is_drawn and cells != self._drawn_cells:
            self._drawn_cells = cells
            print(f"\r[{'#' * cells:<{self._CELLS}}] {done:,} of {total:,} {what}", end="", file=sys.stderr, flush=True)
