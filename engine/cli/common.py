"""What several commands share: the engine's flags, resolving a model, opening an engine, printing."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.config import ENGINE_OPTIONS, SAMPLING_OPTIONS, SERVE_OPTIONS
from engine.core.errors import RequestError
from engine.core.sampling import SamplingParams
from engine.options import Option, Resolved, add_arguments, resolve

if TYPE_CHECKING:
    from engine.actors.config import EngineConfig


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; everything else goes to stderr")
    parser.add_argument(
        "--log-level", metavar="LEVEL", help="debug, info, warning or error (default warning, of serve info); env TWINFER_LOG_LEVEL"
    )


def add_engine_arguments(parser: argparse.ArgumentParser, extra: Sequence[Option] = (), title: str = "sampling options") -> None:
    add_common_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options; the command line and environment win")
    parser.add_argument("--print-config", action="store_true", help="print every option, its value and its origin, then exit")
    add_arguments(parser, ENGINE_OPTIONS, "engine options")
    if extra:
        add_arguments(parser, extra, title)


def resolve_options(arguments: argparse.Namespace, extra: Sequence[Option] = ()) -> Resolved:
    return resolve((*ENGINE_OPTIONS, *extra), vars(arguments), os.environ, arguments.config, known=(*SAMPLING_OPTIONS, *SERVE_OPTIONS))


def open_record_folder(options: Resolved) -> None:
    """Make ``--record-trace``'s folder, where one is asked for; ConfigError where it cannot be. Before anything takes time."""
    if options["record_trace"]:
        from engine.recording import open_record_folder as open_folder

        open_folder(options["record_trace"])


def print_config(options: Resolved, as_json: bool) -> int:
    if as_json:
        print_json({key: {"value": value, "origin": options.origins[key]} for key, value in options.shown().items()})
    else:
        print(options.describe())
    return 0


def follow_node_0(config: EngineConfig) -> int:
    """What a command does with ``--node-rank`` above 0: run this node's ranks until node 0 ends. The exit code."""
    import trio

    from engine.actors.follower import follow

    trio.run(follow, config)
    return 0


def show_nodes(config: EngineConfig, log_level: str | None) -> None:
    """Say what the nodes do, where there are several, unless the operator has chosen what is said."""
    if config.nodes is not None and log_level is None and "TWINFER_LOG_LEVEL" not in os.environ:
        logging.getLogger("twinfer.nodes").setLevel(logging.INFO)


def sampling_params(options: Resolved, **overrides: Any) -> SamplingParams:
    """SamplingParams from resolved options, with per-prompt overrides. Raises RequestError for an override nobody knows."""
    known = {option.key: option for option in SAMPLING_OPTIONS}
    values = {key: options[key] for key in known}
    for key, value in overrides.items():
        if key not in known:
            raise RequestError(f"{key} is not a sampling option; known: {', '.join(sorted(known))}", param=key)
        values[key] = None if value is None and known[key].default is None else known[key].parse(value, "prompts file")
    return SamplingParams(**values)


def print_json(value: object) -> None:
    """One JSON object on stdout. Refuses what JSON cannot say (NaN) rather than print it."""
    json.dump(msgspec.to_builtins(value), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def human_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
