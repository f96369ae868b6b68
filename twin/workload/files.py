"""Workloads in files: what a file is, is seen from its first line, and all of it is read and checked before the first request is made.

Mooncake JSON Lines, Azure CSV   engine.core.trace_rows
Event log                        twin.workload.event_log
Clients, JSON Lines              twin.workload.clients
Lengths, CSV                     a header with input_tokens and output_tokens; pairs to draw from, without times
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Union

import msgspec

from engine.core.errors import ConfigError
from engine.core.trace_rows import Line, count_tokens, json_value, numbered_lines, trace_rows
from twin.workload.clients import Client, is_client, parse_client
from twin.workload.event_log import read_event_log
from twin.workload.recording import Recording

MAX_FILE_REQUESTS = 10_000_000
MAX_FILE_BYTES = 4 << 30
MAX_CLIENTS = 1 << 16
_LENGTHS_HEADER = ["input_tokens", "output_tokens"]
_KINDS = (
    "Mooncake JSON Lines (timestamp, input_length, output_length, hash_ids), an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens), an "
    "event log, a CSV of lengths (input_tokens,output_tokens) or clients (JSON Lines with a rate each)"
)


class LengthTable(msgspec.Struct, frozen=True):
    """Pairs of lengths without times."""

    inputs: array[int]
    outputs: array[int]


class Clients(msgspec.Struct, frozen=True):
    clients: tuple[Client, ...]


FileContent = Union[Recording, LengthTable, Clients]


def read_workload_file(path: str, limit: int | None = None) -> FileContent:
    """``limit`` requests from the beginning, or all. Raises ConfigError that names the line: for a file that cannot be read, is none of the
    known kinds or of too many requests, and for any value out of its bounds."""
    limit = MAX_FILE_REQUESTS if limit is None else limit
    with _readable(path) as lines:
        first = next(lines, None)
        if first is None:
            raise ConfigError(f"{path}: no request in it")
        return _content(path, first, _chain(first, lines), limit)


@contextmanager
def _readable(path: str) -> Iterator[Iterator[Line]]:
    if "\0" in path:
        raise ConfigError(f"{path!r} is no name of a file")
    if os.path.isdir(path):
        raise ConfigError(
            f"{path} is a folder; needed: a file. A --record-trace folder holds steps without the requests' arrivals: use an event log"
        )
    try:
        with open(path, encoding="utf-8", newline="") as file:
            yield _bounded(path, numbered_lines(path, file.readline))
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno).lower() if error.errno else error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason})") from None


def _bounded(path: str, lines: Iterator[Line]) -> Iterator[Line]:
    """A device or a pipe may have no end."""
    total = 0
    for line in lines:
        total += len(line[1])
        if total > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} characters; take a part of it")
        yield line


def _chain(first: Line, lines: Iterator[Line]) -> Iterator[Line]:
    yield first
    yield from lines


def _content(path: str, first: Line, lines: Iterator[Line], limit: int) -> FileContent:
    number, line = first
    where = f"{path}, line {number}"
    if line.startswith("TIMESTAMP"):
        return _trace(path, lines, limit)
    if not line.lstrip().startswith(("{", '"', "[")):
        if [name.strip() for name in line.split(",")[:2]] == _LENGTHS_HEADER:
            return _lengths(path, lines)
        raise ConfigError(f"{where} is {line[:60]!r}; needed: {_KINDS}")
    value = json_value(where, line)
    if isinstance(value, dict) and "input_length" in value:
        return _trace(path, lines, limit)
    if isinstance(value, dict) and is_client(value):
        return _clients(path, lines)
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return read_event_log(path, lines, limit)
    if isinstance(value, str) or (isinstance(value, dict) and ("prompt" in value or "messages" in value)):
        raise ConfigError(f"{where}: texts, of which only a model's tokenizer knows the lengths; needed: {_KINDS}")
    if isinstance(value, dict) and "plan" in value:
        raise ConfigError(f"{where}: steps of --record-trace, which do not say when requests arrived; needed: an event log")
    raise ConfigError(f"{where}: needed: {_KINDS}")


def _trace(path: str, lines: Iterator[Line], limit: int) -> Recording:
    recording = Recording()
    for row in trace_rows(path, lines):
        if row.arrival_s is None or row.input_tokens is None or row.output_tokens is None:
            raise ConfigError(
                f"{path}, request {len(recording) + 1}: a text among recorded lengths; needed: input_length and output_length"
            )
        recording.add(row.arrival_s, row.input_tokens, row.output_tokens, block_ids=row.hash_ids)
        if _is_full(path, len(recording), limit):
            break
    return recording


def _is_full(path: str, count: int, limit: int) -> bool:
    """Up to a limit a file is read; more than the bound of all is refused. Called when ``count`` requests are read."""
    if count > MAX_FILE_REQUESTS:
        raise ConfigError(f"{path}: more than {MAX_FILE_REQUESTS} requests; take a part of them with --requests")
    return count == limit < MAX_FILE_REQUESTS


def _lengths(path: str, lines: Iterator[Line]) -> LengthTable:
    inputs, outputs = array("i"), array("i")
    next(lines)  # the header
    for number, line in lines:
        where, fields = f"{path}, line {number}", line.split(",")
        if len(fields) < 2:
            raise ConfigError(f"{where}: {len(fields)} fields; needed: {','.join(_LENGTHS_HEADER)}")
        inputs.append(count_tokens(where, "input_tokens", fields[0]))
        outputs.append(count_tokens(where, "output_tokens", fields[1]))
        _is_full(path, len(inputs), MAX_FILE_REQUESTS)
    if not inputs:
        raise ConfigError(f"{path}: no lengths in it")
    return LengthTable(inputs, outputs)


def _clients(path: str, lines: Iterator[Line]) -> Clients:
    found: list[Client] = []
    for number, line in lines:
        where = f"{path}, line {number}"
        if len(found) == MAX_CLIENTS:
            raise ConfigError(f"{where}: more than {MAX_CLIENTS} clients")
        found.append(parse_client(where, json_value(where, line)))
    return Clients(tuple(found))
