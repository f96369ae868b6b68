"""``twinfer trace``: kernel tables from traces, and what they say.

``import`` reads a PyTorch-profiler Chrome trace (.json, .json.gz), an nsys SQLite export, a CSV (its columns:
calibration/importers/csv_table.py) or AIConfigurator's tables (``aic:SYSTEM/BACKEND``), prints a summary and keeps the table with --out.
``show`` prints the summary of a table. ``record`` runs a model's steps on one rank and keeps plans, component ranges and their table in a
folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.command_line import add_common_arguments, print_json
from engine.core.errors import ConfigError
from engine.writing import check_file, make_folder

if TYPE_CHECKING:
    from calibration.points import PointTable
    from calibration.trace import KernelTable

_INSTALL = "twinfer trace needs numpy, pyarrow and ijson: pip install 'twinfer[calibration]'"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the calibration's commands to the console script."""
    parser = commands.add_parser(
        "trace", help="kernel tables from traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    bring = actions.add_parser("import", help="a kernel table from a trace")
    bring.add_argument("files", nargs="+", metavar="FILE", help="a trace, one file a rank, or a recording's folder; or aic:SYSTEM/BACKEND")
    bring.add_argument("--out", type=Path, metavar="FILE", help="keep the table (parquet); without it the summary is printed alone")
    bring.add_argument(
        "--rules", type=Path, metavar="FILE", help="kernel names to components (TOML; default: calibration/kernel_rules.toml)"
    )
    bring.add_argument("--rank", type=int, metavar="N", help="the file's rank (0 to 65535), where it does not say or is wrong")
    show = actions.add_parser("show", help="the summary of a table")
    show.add_argument("table", type=Path, metavar="TABLE", help="a table that import wrote, of kernels or of points")
    record = actions.add_parser("record", help="record a model's steps on this machine")
    record.add_argument("model", metavar="MODEL", help="as for generate")
    record.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder without a recording")
    record.add_argument("--mode", choices=("profile", "timers"), default="profile", help="every kernel, or component timers alone (cheap)")
    record.add_argument("--batch-size", type=int, default=4, metavar="N", help="requests at a time (1 to 4096, default 4)")
    record.add_argument("--context", type=int, default=128, metavar="TOKENS", help="prompt length (1 to 1048576, default 128)")
    record.add_argument("--new-tokens", type=int, default=16, metavar="N", help="tokens generated per request (1 to 65536, default 16)")
    record.add_argument("--max-steps", type=int, metavar="N", help="end after so many steps (default: 32 of profile, 2000 of timers)")
    record.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the engine's for the model and device")
    record.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    for action, run in ((bring, run_import), (show, run_show), (record, run_record)):
        add_common_arguments(action, "seconds, counts, shares from 0 to 1")
        action.set_defaults(run=run)


def run_import(arguments: argparse.Namespace) -> int:
    _require_libraries()
    from calibration.importers.aic import PREFIX
    from calibration.trace import MAX_RANKS

    if arguments.out is not None:
        check_file("--out", arguments.out)
    if arguments.rank is not None and not 0 <= arguments.rank < MAX_RANKS:
        raise ConfigError(f"--rank is {arguments.rank}; allowed: 0 to {MAX_RANKS - 1}")
    if any(name.startswith(PREFIX) for name in arguments.files):
        return _import_points(arguments)

    from calibration.importers import import_trace
    from calibration.rules import load_rules
    from calibration.storage import write_kernels

    table = import_trace([Path(name) for name in arguments.files], load_rules(arguments.rules), arguments.rank)
    if arguments.out is not None:
        write_kernels(arguments.out, table)
    _print_kernels(table, arguments.json)
    _say_written(arguments.out)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    _require_libraries()
    from calibration.points import POINTS, read_points
    from calibration.storage import kind_of, read_kernels

    if kind_of(arguments.table) == POINTS:
        _print_points(read_points(arguments.table), arguments.json)
    else:
        _print_kernels(read_kernels(arguments.table), arguments.json)
    return 0


def run_record(arguments: argparse.Namespace) -> int:
    _require_libraries()
    from engine.device import resolve_device

    for name, value, high in (
        ("batch-size", arguments.batch_size, 4096), ("context", arguments.context, 1 << 20), ("new-tokens", arguments.new_tokens, 1 << 16),
    ):  # fmt: skip
        if not 1 <= value <= high:
            raise ConfigError(f"--{name} is {value}; allowed: 1 to {high}")
    make_folder("--out", arguments.out, "the recording")
    from calibration.recorder import record_model

    recorder = record_model(
        arguments.model,
        arguments.out,
        mode=arguments.mode,
        batch=arguments.batch_size,
        context=arguments.context,
        new_tokens=arguments.new_tokens,
        dtype=arguments.dtype,
        device=resolve_device(arguments.device).device,
        max_steps=arguments.max_steps,
    )
    if arguments.mode == "timers":
        _print_timers(recorder.steps_path, arguments.json)
        return 0

    from calibration.importers import import_trace
    from calibration.rules import load_rules
    from calibration.storage import write_kernels

    table = import_trace([recorder.trace_path], load_rules())
    out = arguments.out / "kernels.parquet"
    write_kernels(out, table)
    _print_kernels(table, arguments.json)
    _say_written(out)
    return 0


def _print_timers(path: Path, as_json: bool) -> None:
    """Sums over the recorded steps."""
    steps = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    components: dict[str, float] = {}
    for step in steps:
        for name, seconds in step["components"].items():
            components[name] = components.get(name, 0.0) + seconds
    total_s = sum(step["seconds"] for step in steps)
    if as_json:
        print_json(
            {"num_steps": len(steps), "span_s": total_s, "by_component": {name: {"seconds": value} for name, value in components.items()}}
        )
        return
    print(f"{len(steps)} steps, {total_s * 1e3:.3f} ms")
    for name, seconds in sorted(components.items(), key=lambda item: -item[1]):
        print(f"  {name:18} {seconds * 1e3:12.3f} ms")


def _require_libraries() -> None:
    try:
        import ijson  # noqa: F401
        import numpy  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{_INSTALL} ({error.name} is missing)") from error


def _import_points(arguments: argparse.Namespace) -> int:
    from calibration.importers.aic import read_aic
    from calibration.points import write_points

    if len(arguments.files) > 1 or arguments.rules is not None or arguments.rank is not None:
        raise ConfigError("aic:SYSTEM/BACKEND stands alone: no other file, no --rules, no --rank")
    table = read_aic(arguments.files[0])
    if arguments.out is not None:
        write_points(arguments.out, table)
    _print_points(table, arguments.json)
    _say_written(arguments.out)
    return 0


def _say_written(out: Path | None) -> None:
    print(f"wrote {out}" if out is not None else "nothing written: --out FILE keeps the table", file=sys.stderr)


def _print_kernels(table: KernelTable, as_json: bool) -> None:
    from calibration.analysis import summarise
    from calibration.replay import TOLERANCE, build_replay

    summary = summarise(table)
    replayed_s = build_replay(table).span_s()
    if as_json:
        replay = {
            "span_s": replayed_s,
            "relative_error": replayed_s / summary.span_s - 1 if summary.span_s else 0.0,
            "tolerance": TOLERANCE,
        }
        print_json({**msgspec.to_builtins(summary), "replay": replay})
        return
    print(f"{summary.num_kernels} kernels, {summary.num_steps} steps, {len(summary.ranks)} ranks, {len(summary.streams)} streams")
    print(f"span {summary.span_s * 1e3:.3f} ms: busy {summary.busy_s * 1e3:.3f}, idle {summary.gap_s * 1e3:.3f} "
          f"(launch gaps {summary.launch_gap_s * 1e3:.3f}, between steps {summary.step_gap_s * 1e3:.3f}); "
          f"overlap {summary.overlap_s * 1e3:.3f}, waiting for peers {summary.peer_wait_s * 1e3:.3f} ms (means over ranks)")  # fmt: skip
    for name, time in sorted(summary.by_component.items(), key=lambda item: -item[1].seconds):
        print(f"  {name:18} {time.seconds * 1e3:12.3f} ms {time.count:9d} kernels")
    print(f"unclassified: {summary.unclassified_share:.1%} of the kernels' time")
    for name, seconds in summary.unclassified_kernels.items():
        print(f"  {seconds * 1e3:12.3f} ms  {name:.100}")
    print(f"replay: {replayed_s * 1e3:.3f} ms; recorded {summary.span_s * 1e3:.3f} ms")


def _print_points(table: PointTable, as_json: bool) -> None:
    from calibration.points import summarise_points

    summary = summarise_points(table)
    if as_json:
        print_json(summary)
        return
    print(f"{summary['num_points']} measured points of {len(summary['ops'])} operations")
    for name, op in summary["ops"].items():
        times = f"{op['seconds_min'] * 1e6:.2f} to {op['seconds_max'] * 1e6:.2f} us" if op["num_points"] else "no usable row"
        counts = f"{op['num_points']:8d} points, {op['num_dropped']} dropped, {op['num_merged']} merged"
        print(f"  {name:34} {op['component']:16} {counts}: {times}")
        if op["note"]:
            print(f"      {op['note']}")
