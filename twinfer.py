"""The composition root: one console script over the packages' sub-commands."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calibration.cli
import calibration.commands
import engine.cli
import twin.cli
import twin.demo
import twin.validate
from calibration.errors import TraceError
from engine.actors.config import EngineConfig
from engine.cli import logs
from engine.core.errors import ConfigError, DomainError, RequestError, StoppedError, TwinferError
from engine.core.specs import ModelSpec
from engine.core.step_cost import StepCost
from engine.options import Resolved
from engine.version import VERSION
from twin.validate import PlannedEngine

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_STDOUT = "standard output"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinfer",
        description="A real LLM inference engine built from trio actors, and its digital twin.",
        epilog="Exit codes: 0 ok, 1 fault, 2 usage, 3 SLO not met, 130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"twinfer {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    engine.cli.register(commands, write_report=_write_serve_report, load_cost=_load_cost)
    calibration.cli.register(commands)
    calibration.commands.register(commands, read_spec=_read_spec, run_steps=_run_steps, draw_report=_draw_calibration_report)
    twin.demo.register(commands, read_spec=_read_spec, run_steps=_run_steps, draw_report=_draw_demo_report)
    twin.validate.register(commands, plan_engine=_plan_engine, draw_report=_draw_validation_report)
    twin.cli.register(commands, read_spec=_read_spec, draw_report=_draw_simulation_report)
    parser.set_defaults(default_log_level="warning")
    return parser


def _write_serve_report(path: Path, summary: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> None:
    """Engine and dashboards meet here. Raises ImportError without plotly."""
    from dashboards.report import write_serve_report

    write_serve_report(path, summary, requests)


def _draw_calibration_report(path: Path, summary: Mapping[str, Any], held_out: Sequence[Mapping[str, Any]]) -> None:
    """Calibration and dashboards meet here. Raises ImportError without plotly."""
    from dashboards.calibration_report import write_calibration_report

    write_calibration_report(path, summary, held_out)


def _draw_demo_report(path: Path, summary: Mapping[str, Any]) -> None:
    """Twin and dashboards meet here. Raises ImportError without plotly."""
    from dashboards.demo_report import write_demo_report

    write_demo_report(path, summary)


def _draw_validation_report(path: Path, summary: Mapping[str, Any], details: Sequence[Mapping[str, Any]]) -> None:
    """Twin and dashboards meet here. Raises ImportError without plotly."""
    from dashboards.validation_report import write_validation_report

    write_validation_report(path, summary, details)


def _plan_engine(model: str, options: Resolved) -> PlannedEngine:
    """Twin and engine meet here: an engine that may be opened."""
    from engine.cli.workload_run import plan_engine

    return plan_engine(model, options)


def _draw_simulation_report(
    path: Path, facts: Mapping[str, Any], points: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]
) -> None:
    """Twin and dashboards meet here. Raises ImportError without plotly."""
    from dashboards.simulation_report import write_simulation_report

    write_simulation_report(path, facts, points, details)


def _load_cost(path: str, model: str, spec: ModelSpec, config: EngineConfig, draft_tokens: int) -> StepCost:
    """Engine and calibration meet here: the prices of the steps of ``config``. Raises ConfigError, saying why, for another one's."""
    try:
        from calibration.service import Service, cost_of_service
    except ImportError as error:
        raise ConfigError(f"--calibration needs {error.name}: pip install 'twinfer[calibration]'") from None
    worker = config.workers[0]
    service = Service(model, spec, worker.layout, worker.dtype, worker.device, worker.num_threads, worker.engram, draft_tokens)
    return cost_of_service(Path(path), service)


def _read_spec(model: str) -> ModelSpec:
    """A model's numbers, without its weights. Raises ConfigError naming the file at fault."""
    from engine.model.files import read_model_files

    return read_model_files(model).spec


def _run_steps(model: str, layout: str, loads: Sequence[tuple[int, int, int]], **options: Any) -> Sequence[Any]:
    """Calibration and engine meet here: whole steps of ``loads`` (batch, context, new tokens)."""
    from engine.cli.step_bench import StepLoad
    from engine.cli.step_runs import run_steps

    return run_steps(model, layout, [StepLoad(*load) for load in loads], **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code. Errors meant for people are one line on stderr (or JSON with ``--json``)."""
    _open_standard_streams()
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()  # at its exit Python would say in three lines, and by a code of its own, what goes wrong with it
    except OSError as error:
        # The reader of our output has gone, or a disk is full; without this Python complains again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            text = f"{_STDOUT} cannot be written: {error.strerror}" if error.filename == _STDOUT else str(error)
            print(f"twinfer: {text}", file=sys.stderr)
        return EXIT_FAULT


def _run_command(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    level = getattr(arguments, "log_level", None) or os.environ.get("TWINFER_LOG_LEVEL", arguments.default_log_level)
    if level.upper() not in logging.getLevelNamesMapping():
        print(f"twinfer: log level {level!r} is unknown; use debug, info, warning or error", file=sys.stderr)
        return EXIT_USAGE
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("twinfer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ConfigError, DomainError, RequestError, TraceError) as error:
        return _report(arguments, error, EXIT_USAGE)
    except StoppedError as error:
        return _report(arguments, error, error.exit_code)
    except TwinferError as error:
        return _report(arguments, error, EXIT_FAULT)


class _StandardOutput(io.FileIO):
    """Descriptor 1; an error in writing to it has its name, which tells it from the errors of other files."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


def _open_standard_streams() -> None:
    """Make 0, 1 and 2 usable: a closed one would become some other file's number, and texts are UTF-8 whatever the locale says."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one; child processes have it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # else somebody has put something of their own there
        named = io.BufferedWriter(_StandardOutput(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(named, "utf-8", "backslashreplace", line_buffering=os.isatty(1))
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments))
    except BaseExceptionGroup as group:
        # Several tasks that ended for one reason are one error to a person; a group without one of ours is a fault to be seen whole.
        ours = group.subgroup((TwinferError, KeyboardInterrupt))
        if ours is None:
            raise
        raise _leaves(ours)[0] from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


def _report(arguments: argparse.Namespace, error: TwinferError, code: int) -> int:
    if logs.is_json():
        logging.getLogger("twinfer").error("%s", error, extra={"fields": {"type": type(error).__name__, "exit_code": code}})
    else:
        print(f"twinfer {arguments.command}: {error}", file=sys.stderr)
    if getattr(arguments, "json", False):
        print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
    return code


if __name__ == "__main__":
    sys.exit(main())
