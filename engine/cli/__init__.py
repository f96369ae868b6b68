"""The engine's sub-commands: each module adds a parser and runs it. Heavy imports happen inside ``run``."""

from __future__ import annotations

import argparse

from engine.cli import bench, chat, check, generate, logits, models, serve
from engine.cli.bench_serve_output import ReportWriter


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    write_report: ReportWriter | None = None,
    load_cost: serve.LoadCost | None = None,
) -> None:
    """Add the engine's commands to the console script. ``write_report`` draws what ``bench serve`` measured, ``load_cost`` reads what
    ``serve`` prices its steps by."""
    generate.add_parser(commands)
    logits.add_parser(commands)
    models.add_parser(commands)
    check.add_parser(commands)
    bench.add_parser(commands, write_report)
    serve.add_parser(commands, load_cost)
    chat.add_parser(commands)
