"""The values of ``bench serve`` that are more than a number: parsed, bounded, refused with a reason."""

from __future__ import annotations

import json
from typing import Any

from engine.bench.workload import Lengths
from engine.core.errors import ConfigError

MAX_LENGTH_TOKENS = 1 << 24
# What the benchmark itself decides.
RESERVED_BODY_KEYS = frozenset(["model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of"])


def parse_lengths(name: str, text: str, stddev: float) -> Lengths:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) <= 8 and 1 <= int(part) <= MAX_LENGTH_TOKENS for part in parts):
        raise ConfigError(f"--{name} is {text[:40]!r}; needed: N or LOW:HIGH, integers from 1 to {MAX_LENGTH_TOKENS}")
    low, high = int(parts[0]), int(parts[-1])
    if low > high or (stddev and low != high):
        why = "the low end is above the high one" if low > high else f"a range has no --{name}-stddev"
        raise ConfigError(f"--{name} is {text!r}: {why}")
    return Lengths(low, high, stddev)


def parse_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ConfigError("--extra-body is not a JSON object")
    reserved = sorted(RESERVED_BODY_KEYS & set(body))
    if reserved:
        raise ConfigError(f"--extra-body sets {', '.join(reserved)}, which the benchmark itself decides")
    return body
