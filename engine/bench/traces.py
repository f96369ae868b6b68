"""Recorded workloads: when requests came, how long they were and what they shared. Read line by line, with bounds, from the file as it is.

Mooncake-style JSON Lines   {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}; an id is a block of 512 tokens, so
                            requests whose lists begin alike share a prefix of that many blocks.
Azure CSV                   TIMESTAMP (date and time of day), ContextTokens, GeneratedTokens.
Prompts, JSON Lines         a JSON text, or {"prompt": text} or {"messages": [...]}, with an optional "output_length" (or "max_tokens").
"""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from engine.core.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
MAX_LINE_CHARS = 16 << 20
MAX_TOKENS = 1 << 24
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. ``arrival_s`` counts from the first row's; None where the file has no times."""

    arrival_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    hash_ids: tuple[int, ...] = ()
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_trace(path: str) -> Iterator[TraceRow]:
    """Rows in the order of the file. Raises ConfigError naming the line: a wrong value, a time before its predecessor's, no row at all."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = _rows(path, file)
            first = next(rows, None)
            if first is None:
                raise ConfigError(f"{path}: no request in it")
            last_s = start_s = first.arrival_s or 0.0
            yield _shifted(first, start_s)
            for number, row in enumerate(rows, 2):
                if row.arrival_s is not None and row.arrival_s < last_s:
                    raise ConfigError(f"{path}, request {number}: its time is before its predecessor's; sort the file by time")
                last_s = row.arrival_s or 0.0
                yield _shifted(row, start_s)
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno).lower() if error.errno else error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason})") from None


def _shifted(row: TraceRow, start_s: float) -> TraceRow:
    return row if row.arrival_s is None else msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s)


def _rows(path: str, file: IO[str]) -> Iterator[TraceRow]:
    lines = _lines(path, file)
    for number, line in lines:
        if not line.lstrip("\ufeff").startswith("TIMESTAMP"):
            yield _json_row(f"{path}, line {number}", line.lstrip("\ufeff"))
            break
        header = next(csv.reader([line.lstrip("\ufeff")]))
        if header[:3] != _AZURE_COLUMNS:
            raise ConfigError(f"{path}: the header is {line[:80]!r}; needed: {','.join(_AZURE_COLUMNS)}")
        yield from (_azure_row(f"{path}, line {later}", next(csv.reader([text]))) for later, text in lines)
        return
    yield from (_json_row(f"{path}, line {later}", text) for later, text in lines)


def _lines(path: str, file: IO[str]) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    number = 0
    while line := file.readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_CHARS} characters")
        if line.strip():
            yield number, line.rstrip("\r\n")


def _azure_row(where: str, fields: list[str]) -> TraceRow:
    if len(fields) < 3:
        raise ConfigError(f"{where}: {len(fields)} fields; needed: {','.join(_AZURE_COLUMNS)}")
    try:
        # Fractions have up to seven digits, one more than Python takes.
        moment = datetime.datetime.fromisoformat(fields[0].strip()[:26])
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP is {fields[0][:40]!r}; needed: like 2023-11-16 18:15:46.680590") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return TraceRow(moment.timestamp(), _count(where, "ContextTokens", fields[1]), _count(where, "GeneratedTokens", fields[2]))


def _json_row(where: str, line: str) -> TraceRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if isinstance(value, dict) and "input_length" in value:
        return _mooncake_row(where, value)
    if isinstance(value, dict) and (isinstance(value.get("prompt"), str) or _are_messages(value.get("messages"))):
        output = value.get("output_length", value.get("max_tokens"))
        tokens = None if output is None else _count(where, "output_length", output)
        return TraceRow(None, None, tokens, prompt=value.get("prompt"), messages=value.get("messages"))
    raise ConfigError(f'{where}: needed: an object with "input_length" and "output_length", with "prompt" or with "messages", or a text')


def _mooncake_row(where: str, value: dict[str, Any]) -> TraceRow:
    time_ms = value.get("timestamp")
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)) or not 0 <= time_ms < 1e15:
        raise ConfigError(f"{where}: timestamp is {time_ms!r}; needed: milliseconds from 0 up")
    ids = value.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
        raise ConfigError(f"{where}: hash_ids is not a list of integers")
    tokens = _count(where, "input_length", value["input_length"])
    if len(ids) * TRACE_BLOCK_TOKENS >= tokens + TRACE_BLOCK_TOKENS:
        raise ConfigError(f"{where}: {len(ids)} hash_ids of {TRACE_BLOCK_TOKENS} tokens for an input_length of {tokens}")
    return TraceRow(time_ms / 1e3, tokens, _count(where, "output_length", value.get("output_length")), tuple(ids))


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) and "role" in entry for entry in value)


def _count(where: str, name: str, value: object) -> int:
    """A number of tokens; traces hold a few of 0, which is a request all the same."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name} is {value!r}; needed: an integer from 0 to {MAX_TOKENS}")
    return max(value, 1)
