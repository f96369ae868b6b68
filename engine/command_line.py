"""What all commands have alike: ``--json``, ``--log-level``, ``--config`` and ``--print-config``, and how JSON is printed."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from engine.options import Resolved


def add_common_arguments(parser: argparse.ArgumentParser, json_holds: str = "", log_default: str = "warning") -> None:
    """``json_holds`` says what the object is in, such as "times in seconds"."""
    holds = f", {json_holds}" if json_holds else ""
    parser.add_argument("--json", action="store_true", help=f"one JSON object on stdout{holds}; everything else goes to stderr")
    parser.add_argument(
        "--log-level", metavar="LEVEL", help=f"debug, info, warning or error (default {log_default}); env TWINFER_LOG_LEVEL"
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these options; the command line and environment win")
    parser.add_argument("--print-config", action="store_true", help="print every option, its value and its origin, then exit")


def print_config(options: Resolved, as_json: bool) -> int:
    """What ``--print-config`` prints; the exit code."""
    if as_json:
        print_json({key: {"value": value, "origin": options.origins[key]} for key, value in options.shown().items()})
    else:
        print(options.describe())
    return 0


def print_json(value: object) -> None:
    """One JSON object on stdout. Refuses what JSON cannot say (NaN) rather than print it."""
    json.dump(msgspec.to_builtins(value, enc_hook=_plain_float), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _plain_float(value: object) -> float:
    """Numbers of numpy are floats by inheritance, which msgspec does not take for one."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
