"""A mix of clients, each with a rate, a burstiness and lengths of its own, as ServeGen (Xiang et al., NSDI 2026) found real traffic to be:
few clients make most of it, and each has its own habits.

One client a line, JSON:

    {"client": "a", "rate": 2.5, "cv": 1.8, "input_tokens": L, "output_tokens": L, "prefix_tokens": 300}

rate           requests/s, or [[start_s, requests/s], ...]: a rate for each stretch of time, ascending, the first from 0
cv             coefficient of variation of the gaps between its requests; 1, which is Poisson, where it is left out
input_tokens   L is N, or [LOW, HIGH] (every length alike), or {"mean": M, "cv": C} (lognormal), or {"values": [...], "weights": [...]}
output_tokens  the same
prefix_tokens  system prompt in front of all its prompts, its own; none where it is left out
client         a name, for people
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.errors import ConfigError
from twin.workload.lengths import MAX_CV, MAX_LENGTH_TOKENS, Histogram, Independent, Lengths, Lognormal, Uniform, histogram

MAX_RATE_PER_S = 1e6
MAX_TIME_S = 1e9
MAX_ENTRIES = 1 << 16
_FIELDS = {"client", "rate", "cv", "input_tokens", "output_tokens", "prefix_tokens"}
_LENGTHS = 'N, [LOW, HIGH], {"mean": M, "cv": C} or {"values": [...], "weights": [...]}'


class Client(msgspec.Struct, frozen=True):
    starts_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]
    cv: float
    lengths: Independent
    prefix_tokens: int


def is_client(value: dict[str, Any]) -> bool:
    return "rate" in value


def parse_client(where: str, value: Any) -> Client:
    """Raises ConfigError naming the field."""
    if not isinstance(value, dict) or not is_client(value):
        raise ConfigError(f'{where}: needed: a client, an object with "rate", "input_tokens" and "output_tokens"')
    unknown = sorted(set(value) - _FIELDS)
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0][:40]!r}; a client has {', '.join(sorted(_FIELDS))}")
    starts_s, rates_per_s = _rates(where, value["rate"])
    prefix_tokens = value.get("prefix_tokens", 0)
    if type(prefix_tokens) is not int or not 0 <= prefix_tokens <= MAX_LENGTH_TOKENS:
        raise ConfigError(f"{where}: prefix_tokens is {_brief(prefix_tokens)}; needed: an integer from 0 to {MAX_LENGTH_TOKENS}")
    return Client(
        starts_s=starts_s,
        rates_per_s=rates_per_s,
        cv=_number(where, "cv", value.get("cv", 1.0), 0.0, MAX_CV),
        lengths=Independent(*(_lengths(where, name, value.get(name)) for name in ("input_tokens", "output_tokens"))),
        prefix_tokens=prefix_tokens,
    )


def _rates(where: str, value: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not isinstance(value, list):
        return (0.0,), (_number(where, "rate", value, 0.0, MAX_RATE_PER_S),)
    if not 1 <= len(value) <= MAX_ENTRIES or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        raise ConfigError(f"{where}: rate is no number and no list of 1 to {MAX_ENTRIES} pairs [start_s, requests/s]")
    starts_s = tuple(_number(where, "rate's start_s", entry[0], 0.0, MAX_TIME_S) for entry in value)
    if starts_s[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(starts_s)):
        raise ConfigError(f"{where}: rate's times do not ascend from 0")
    return starts_s, tuple(_number(where, "rate", entry[1], 0.0, MAX_RATE_PER_S) for entry in value)


def _lengths(where: str, name: str, value: Any) -> Lengths:
    match value:
        case int():
            tokens = _tokens(where, name, value)
            return Uniform(tokens, tokens)
        case [low, high]:
            ends = _tokens(where, name, low), _tokens(where, name, high)
            if ends[0] > ends[1]:
                raise ConfigError(f"{where}: {name} is {_brief(value)}: the low end is above the high one")
            return Uniform(*ends)
        case {"mean": mean, "cv": cv, **others} if not others:
            return Lognormal(_number(where, f"{name}'s mean", mean, 1, MAX_LENGTH_TOKENS), _number(where, f"{name}'s cv", cv, 0, MAX_CV))
        case {"values": [*values], "weights": [*weights], **others} if not others:
            return _histogram(where, name, values, weights)
        case _:
            raise ConfigError(f"{where}: {name} is {_brief(value)}; needed: {_LENGTHS}")


def _histogram(where: str, name: str, values: Sequence[Any], weights: Sequence[Any]) -> Histogram:
    if len(values) != len(weights) or not 1 <= len(values) <= MAX_ENTRIES:
        raise ConfigError(f"{where}: {name} has {len(values)} values and {len(weights)} weights; needed: as many, from 1 to {MAX_ENTRIES}")
    parts = [_number(where, f"{name}'s weight", weight, 0.0, 1e12) for weight in weights]
    if not any(parts):
        raise ConfigError(f"{where}: {name}'s weights are all 0")
    return histogram([_tokens(where, name, tokens) for tokens in values], parts)


def _tokens(where: str, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH_TOKENS:
        raise ConfigError(f"{where}: {name} is {_brief(value)}; needed: an integer from 1 to {MAX_LENGTH_TOKENS}")
    return value


def _number(where: str, name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{where}: {name} is {_brief(value)}; needed: a number from {low:g} to {high:g}")
    return float(value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
