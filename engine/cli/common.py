"""What the engine's commands share: its flags, resolving a model, opening an engine, printing."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.command_line import add_common_arguments, add_config_arguments
from engine.config import ENGINE_OPTIONS, SAMPLING_OPTIONS, SERVE_OPTIONS
from engine.core.errors import RequestError
from engine.core.sampling import SamplingParams
from engine.options import Option, Resolved, add_arguments, resolve

if TYPE_CHECKING:
    from engine.actors.config import EngineConfig


def add_engine_arguments(parser: argparse.ArgumentParser, extra: Sequence[Option] = (), title: str = "sampling options") -> None:
    add_common_arguments(parser, log_default="warning, of serve info")
    add_config_arguments(parser)
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


def human_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
