"""``twinfer validate``: the same workload through the real engine and through the twin, the twin first.

For every load the prediction of the run is in the ledger, on the disk, before the run begins. The loads are run once more, in the same
order, for how well the engine repeats itself. At the end the engine's whole log is replayed: given what reached its scheduler between which
steps, and what came of each step, the twin makes the same plans, byte for byte (exit code 1 if not).

--request-rate takes rates, inf and shares of the saturation that is predicted, such as 60%. Saturation is the rate at which requests are
served that came all at once; give several times as many --requests as --max-running-requests has slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.command_line import add_common_arguments, add_config_arguments, print_config, print_json
from engine.config import ENGINE_OPTIONS, SAMPLING_OPTIONS, SERVE_OPTIONS
from engine.core.errors import ConfigError
from engine.options import Option, Resolved, add_arguments, resolve
from engine.writing import make_folder, whole_file
from twin.workload.spec import WORKLOAD_OPTIONS

if TYPE_CHECKING:
    from engine.core.driver_log import DriverLog
    from engine.core.plan import RequestId
    from engine.core.request import Request
    from engine.core.scheduler_config import SchedulerConfig
    from engine.core.specs import ModelSpec
    from twin.workload.types import SimRequest, Workload

# (path of the page, what --json prints, steps and requests of each run): drawn by the dashboards.
DrawReport = Callable[[Path, Mapping[str, Any], Sequence[Mapping[str, Any]]], None]
DEFAULT_REQUESTS = 64
DEFAULT_RATES = "inf,30%,60%,80%"
MAX_LOADS = 32
EXIT_NO_PARITY = 1

_LISTS = {
    "request-rate": f"R[,R...]: open loop, requests/s, inf for all at once, or N% of the predicted saturation ({DEFAULT_RATES})",
    "concurrency": "C[,C...]: closed loop, clients who each wait for their answer",
    "requests": f"requests of a run; auto is {DEFAULT_REQUESTS}, of a file all",
}
_WORKLOAD_PART = tuple(
    dataclasses.replace(option, kind=int if option.name == "requests" else str, help=_LISTS[option.name])
    if option.name in _LISTS
    else option
    for option in WORKLOAD_OPTIONS
)
_VALIDATE_PART = (
    Option("calibration", str, "", "what calibrate wrote"),
    Option(
        "acceptance", str, "", "with --draft-tokens: mean accepted drafts a step, or the accepted share at each position, as for simulate"
    ),
    Option("repeat", int, 2, "runs of each load; the second one tells how well the engine repeats itself", low=1, high=10),
    Option("out", str, "twinfer-validate", "folder of the ledger and the report"),
    Option("points", str, "", "FILE.csv of published measurements to predict (not in this release)"),
)


class RunLike(Protocol):
    """A workload's part of an engine's log."""

    first_step: int
    last_step: int
    first_event: int
    last_event: int
    requests: Mapping[RequestId, SimRequest]
    num_refused: int


class RecordLike(Protocol):
    log: DriverLog
    requests: Mapping[RequestId, Request]
    core_config: SchedulerConfig


class PlannedEngine(Protocol):
    """An engine that is ready to be opened, given by the composition root: the twin starts no actors."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def scheduler(self) -> SchedulerConfig: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def dtype(self) -> str: ...

    def run(self, workloads: Sequence[Callable[[], Workload]], done: Callable[[Any, Any], None]) -> Any:
        """Open it, run the workloads one after the other, each made just before it runs; ``done(record, run)`` after each."""
        ...


PlanEngine = Callable[[str, Resolved], PlannedEngine]


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], *, plan_engine: PlanEngine, draw_report: DrawReport) -> None:
    parser = commands.add_parser(
        "validate",
        help="the same workload through engine and twin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model, as for generate")
    add_common_arguments(parser, "times in seconds")
    add_config_arguments(parser)
    for options, title in ((_VALIDATE_PART, "validation"), (_WORKLOAD_PART, "workload"), (ENGINE_OPTIONS, "engine options")):
        add_arguments(parser, options, title)
    parser.set_defaults(run=lambda arguments: _run(arguments, plan_engine, draw_report))


def _run(arguments: argparse.Namespace, plan_engine: PlanEngine, draw_report: DrawReport) -> int:
    known = (*SAMPLING_OPTIONS, *SERVE_OPTIONS)
    options = resolve((*_VALIDATE_PART, *_WORKLOAD_PART, *ENGINE_OPTIONS), vars(arguments), os.environ, arguments.config, known=known)
    if arguments.print_config:
        return print_config(options, arguments.json)
    _check(arguments.model, options)
    _require_libraries()
    from twin.validation import Validation, lines

    out = Path(options["out"])
    begin_s = time.monotonic()
    validation = Validation(arguments.model, options, plan_engine(arguments.model, options), loads(options), out, _say)
    make_folder("--out", out, "ledger and report")
    summary = {**validation.run(), "wall_s": time.monotonic() - begin_s, "out": str(out)}
    with whole_file("--out", out / "report.html") as beside:
        draw_report(beside, summary, validation.details)
    if arguments.json:
        print_json(summary)
    else:
        print("\n".join(lines(summary)))
    return 0 if not summary["parity"]["difference"] else EXIT_NO_PARITY


class Load:
    """One point: a rate (or a share of the predicted saturation), a concurrency, or the file's own times where all are None."""

    def __init__(self, rate_per_s: float | None = None, share: float | None = None, concurrency: int | None = None) -> None:
        self.rate_per_s, self.share, self.concurrency = rate_per_s, share, concurrency

    @property
    def is_saturating(self) -> bool:
        return self.rate_per_s == math.inf

    def rate(self, saturation_per_s: float | None) -> float | None:
        if self.share is None:
            return self.rate_per_s
        if saturation_per_s is None:
            raise ConfigError("the twin predicts no saturation to take a share of: too few requests; raise --requests, or give rates")
        return self.share * saturation_per_s

    def name(self, saturation_per_s: float | None) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        rate = self.rate(saturation_per_s)
        if rate is None:
            return "as in the file"
        return "all at once" if self.is_saturating else f"{rate:.4g} req/s"


def loads(options: Resolved) -> list[Load]:
    """Raises ConfigError for what is no rate, no share and no concurrency."""
    rates, counts = options["request_rate"], options["concurrency"]
    if rates is not None and counts is not None:
        raise ConfigError("--request-rate and --concurrency are both given; an open loop has a rate, a closed one a concurrency")
    by_key = {option.key: option for option in WORKLOAD_OPTIONS}
    if counts is not None:
        origin = options.origins["concurrency"]
        parsed = [by_key["concurrency"].parse(part, origin) for part in _parts("concurrency", counts)]
        return [Load(concurrency=count) for count in parsed if isinstance(count, int)]
    if rates is None and options["workload"]:
        return [Load()]
    found = []
    for part in _parts("request-rate", rates or DEFAULT_RATES):
        if part.endswith("%"):
            found.append(Load(share=_share(part)))
        else:
            rate = by_key["request_rate"].parse(part, options.origins["request_rate"])
            assert isinstance(rate, float)
            found.append(Load(rate))
    return found


def _share(part: str) -> float:
    try:
        value = float(part[:-1])
    except ValueError:
        value = math.nan
    if not 1.0 <= value <= 200.0:
        raise ConfigError(f"--request-rate has {part[:40]!r}; needed: 1% to 200% of the predicted saturation, a rate, or inf")
    return value / 100.0


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_LOADS or not all(0 < len(part) <= 40 for part in parts):
        raise ConfigError(f"--{name} is {text[:60]!r}; needed: 1 to {MAX_LOADS} values, separated by commas")
    return parts


def _check(model: str | None, options: Resolved) -> None:
    """Before anything takes time."""
    if options["points"]:
        raise ConfigError(
            f"--points {options['points']}: predicting published measurements is not in this release; validate MODEL --calibration FILE "
            "compares with runs on this machine"
        )
    if model is None:
        raise ConfigError("MODEL is missing: twinfer validate MODEL --calibration FILE")
    if not options["calibration"]:
        raise ConfigError("--calibration is missing: the file that twinfer calibrate wrote on this machine")
    if options["draft_tokens"] and not options["acceptance"]:
        raise ConfigError(f"--draft-tokens {options['draft_tokens']} needs --acceptance: what the twin is to expect of the drafts")
    if options["workload"]:
        for key in ("isl", "osl"):
            if options.origins[key] != "default":
                raise ConfigError(
                    f"--workload {options['workload']} and --{key} are both given; a file brings its own lengths, leave one out"
                )


def _require_libraries() -> None:
    """Before minutes are spent. Raises ConfigError naming what is missing."""
    for name in ("numpy", "scipy", "pyarrow", "simpy", "plotly", "torch", "trio"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"twinfer validate needs {name}, which is not installed: pip install 'twinfer[engine,calibration,twin,dashboards]'"
            )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
