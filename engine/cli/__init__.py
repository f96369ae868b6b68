"""The engine's sub-commands: each module adds a parser and runs it. Heavy imports happen inside ``run``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.cli.bench_serve_output import ReportWriter
    from engine.cli.serve import LoadCost

_COMMANDS = {
    "generate": "offline generation",
    "logits": "logits of whole sequences",
    "model": "fetch, list and show models",
    "check": "environment, memory fit and layout",
    "bench": "measure a server or an engine",
    "serve": "the OpenAI API",
    "chat": "a chat in the terminal",
}


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    write_report: ReportWriter | None = None,
    load_cost: LoadCost | None = None,
) -> None:
    """Add the engine's commands to the console script. ``write_report`` draws what ``bench serve`` measured, ``load_cost`` reads what
    ``serve`` prices its steps by. Where the engine's libraries are not installed the commands say so, and the others work."""
    try:
        from engine.cli import bench, chat, check, generate, logits, models, serve
    except ImportError as error:
        _register_absent(commands, error.name or str(error))
        return
    generate.add_parser(commands)
    logits.add_parser(commands)
    models.add_parser(commands)
    check.add_parser(commands)
    bench.add_parser(commands, write_report)
    serve.add_parser(commands, load_cost)
    chat.add_parser(commands)


def _register_absent(commands: argparse._SubParsersAction[argparse.ArgumentParser], missing: str) -> None:
    def refuse(_arguments: argparse.Namespace) -> int:
        raise ConfigError(f"this command needs the engine: pip install 'twinfer[engine]' ({missing} is missing)")

    for name, text in _COMMANDS.items():
        # No character begins an option here: whatever was typed is taken, and answered with what is missing.
        parser = commands.add_parser(name, help=f"{text} (needs twinfer[engine])", add_help=False, prefix_chars="\0")
        parser.add_argument("arguments", nargs="*")
        parser.set_defaults(run=refuse)
