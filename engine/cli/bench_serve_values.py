"""The values of ``bench serve`` that are more than a number: parsed, bounded, refused with a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from engine.bench.workload import Lengths
from engine.core.errors import ConfigError
from engine.core.metrics import Slo

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


def parse_rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (1e-6 <= rate <= 1e6 or rate == math.inf):
        raise ConfigError(f"--request-rate is {text[:40]!r}; needed: requests/s from 1e-6 to 1e6, or inf")
    return rate


def parse_slo(limits: Sequence[str]) -> Slo | None:
    """``ttft:500`` and the like, in milliseconds."""
    fields = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s_max", "e2e": "e2e_s", "e2el": "e2e_s"}
    found: dict[str, float] = {}
    for limit in (part for text in limits for part in text.split(",") if part):
        name, _, value = limit.partition(":")
        try:
            limit_s = float(value) / 1e3
        except ValueError:
            limit_s = math.nan
        if name not in fields or not 0 < limit_s < 1e7:
            raise ConfigError(f"--goodput is {limit[:40]!r}; needed: ttft, tpot, itl or e2e, a colon and milliseconds above 0")
        found[fields[name]] = limit_s
    return Slo(**found) if found else None


def parse_strict_share(text: str | None, slo: Slo | None) -> float | None:
    if text is None:
        return None
    if slo is None:
        raise ConfigError("--strict-slo needs limits: --goodput ttft:500 tpot:30")
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 <= percent <= 100:
        raise ConfigError(f"--strict-slo is {text[:40]!r}; needed: percent from 0 to 100")
    return percent / 100


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
