"""Recorded workloads: when requests came, how long they were and what they shared. Read line by line, with bounds.

Mooncake-style JSON Lines   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}; an id is a block of 512 tokens, so
                            requests whose lists begin alike share a prefix of that many blocks.
Azure CSV                   TIMESTAMP (date and time of day), ContextTokens, GeneratedTokens.
Prompts, JSON Lines         a JSON text, or {"prompt": text} or {"messages": [...]}, with an optional "output_length" (or "max_tokens").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from engine.core.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
MAX_LINE_CHARS = 16 << 20
MAX_TOKENS = 1 << 24
MAX_HASH_ID = (1 << 63) - 1
_MAX_TIME_MS = 1e15
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
# Fractions have up to seven digits; some files end in an offset from UTC.
_MOMENT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d{1,9})?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)

Line = tuple[int, str]


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. ``arrival_s`` counts from the first row's; None where the file has no times."""

    arrival_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    hash_ids: tuple[int, ...] = ()
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def numbered_lines(path: str, read_line: Callable[[int], str]) -> Iterator[Line]:
    """Those that are not blank, by their numbers in the file; ``read_line`` is the file's ``readline``. Raises ConfigError for one that
    does not end."""
    number = 0
    while line := read_line(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_CHARS} characters")
        if number == 1:
            line = line.lstrip("\ufeff")
        if line.strip():
            yield number, line.rstrip("\r\n")


def trace_rows(path: str, lines: Iterable[Line]) -> Iterator[TraceRow]:
    """Rows in the order of the lines. Raises ConfigError naming the line: a wrong value, a time before its predecessor's, no row at all."""
    last_s = start_s = None
    row = None
    for number, row in _numbered_rows(path, iter(lines)):
        if row.arrival_s is None:
            yield row
            continue
        if last_s is not None and row.arrival_s < last_s:
            raise ConfigError(f"{path}, line {number}: its time is before its predecessor's; sort the file by time")
        last_s = row.arrival_s
        start_s = last_s if start_s is None else start_s
        yield msgspec.structs.replace(row, arrival_s=last_s - start_s)
    if row is None:
        raise ConfigError(f"{path}: no request in it")


def _numbered_rows(path: str, lines: Iterator[Line]) -> Iterator[tuple[int, TraceRow]]:
    parse: Callable[[str, str], TraceRow] | None = None
    for number, line in lines:
        if parse is None:
            parse = azure_row if line.startswith("TIMESTAMP") else json_row
            if parse is azure_row:
                _check_header(path, line)
                continue
        yield number, parse(f"{path}, line {number}", line)


def _check_header(path: str, line: str) -> None:
    if [name.strip() for name in line.split(",")[:3]] != _AZURE_COLUMNS:
        raise ConfigError(f"{path}: the header is {line[:80]!r}; needed: {','.join(_AZURE_COLUMNS)}")


def azure_row(where: str, line: str) -> TraceRow:
    fields = line.split(",")
    if len(fields) < 3:
        raise ConfigError(f"{where}: {len(fields)} fields; needed: {','.join(_AZURE_COLUMNS)}")
    time_s = _seconds(fields[0].strip())
    if time_s is None:
        raise ConfigError(f"{where}: TIMESTAMP is {fields[0][:40]!r}; needed: like 2023-11-16 18:15:46.680590")
    return TraceRow(time_s, count_tokens(where, "ContextTokens", fields[1]), count_tokens(where, "GeneratedTokens", fields[2]))


def _seconds(text: str) -> float | None:
    """Seconds since 2000-01-01 UTC of a moment that says no other offset; None for what is none. A double holds a microsecond of them."""
    found = _MOMENT.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    fraction, sign, offset_hour, offset_minute = found.groups()[6:]
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    lengths = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    if not (year >= 1 and 1 <= month <= 12 and 1 <= day <= lengths[month - 1] and hour < 24 and minute < 60 and second < 60):
        return None
    years = year - 1
    days = years * 365 + years // 4 - years // 100 + years // 400 + sum(lengths[: month - 1]) + day - 1 - _DAYS_TO_2000
    offset_minutes = (int(offset_hour) * 60 + int(offset_minute)) * (-1 if sign == "-" else 1) if sign else 0
    return (days * 1440 + hour * 60 + minute - offset_minutes) * 60 + second + float(fraction or 0)


_DAYS_TO_2000 = 1999 * 365 + 1999 // 4 - 1999 // 100 + 1999 // 400


def json_row(where: str, line: str) -> TraceRow:
    value = json_value(where, line)
    if isinstance(value, str):
        value = {"prompt": value}
    if isinstance(value, dict) and "input_length" in value:
        return _mooncake_row(where, value)
    if isinstance(value, dict) and (isinstance(value.get("prompt"), str) or _are_messages(value.get("messages"))):
        output = value.get("output_length", value.get("max_tokens"))
        tokens = None if output is None else count_tokens(where, "output_length", output)
        return TraceRow(None, None, tokens, prompt=value.get("prompt"), messages=value.get("messages"))
    raise ConfigError(f'{where}: needed: an object with "input_length" and "output_length", with "prompt" or with "messages", or a text')


def json_value(where: str, line: str) -> Any:
    """Raises ConfigError for what is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None


def _mooncake_row(where: str, value: dict[str, Any]) -> TraceRow:
    time_ms = value.get("timestamp")
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not 0 <= time_ms < _MAX_TIME_MS:
        raise ConfigError(f"{where}: timestamp is {str(time_ms)[:40]!r}; needed: milliseconds from 0 up")
    ids = value.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(entry) is int and 0 <= entry <= MAX_HASH_ID for entry in ids):
        raise ConfigError(f"{where}: hash_ids is not a list of integers from 0 to 2^63 - 1")
    tokens = count_tokens(where, "input_length", value["input_length"])
    if len(ids) * TRACE_BLOCK_TOKENS >= tokens + TRACE_BLOCK_TOKENS:
        raise ConfigError(f"{where}: {len(ids)} hash_ids of {TRACE_BLOCK_TOKENS} tokens for an input_length of {tokens}")
    return TraceRow(time_ms / 1e3, tokens, count_tokens(where, "output_length", value.get("output_length")), tuple(ids))


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) and "role" in entry for entry in value)


def count_tokens(where: str, name: str, value: object) -> int:
    """A number of tokens; traces hold a few of 0, which is a request all the same. Raises ConfigError for anything else."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        shown = repr(value) if not isinstance(value, (str, list, dict, int)) else repr(value)[:60]
        raise ConfigError(f"{where}: {name} is {shown}; needed: an integer from 0 to {MAX_TOKENS}")
    return max(value, 1)
