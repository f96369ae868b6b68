"""Reading tool calls piece by piece. A reader takes the text after the beginning of a call until the call is over.

What turns out to be no call is shown as text. The verdict depends on the text alone, not on the pieces it comes in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

MAX_HEADER_CHARS = 512  # between a marker and the arguments
_JSON_CHARS = frozenset(" \t\r\n{}[],:-+.0123456789eEtrufalsn")


class ParsedCall(NamedTuple):
    name: str
    arguments: str  # JSON text of an object


class Reading(NamedTuple):
    """``calls`` is None where the text is no call: all of it is looked at again. ``rest`` is what came after a call."""

    calls: tuple[ParsedCall, ...] | None
    rest: str = ""


class Reader(Protocol):
    def feed(self, text: str) -> Reading | None:
        """None while the call goes on."""
        ...

    def finish(self) -> Reading:
        """The text is over."""
        ...


class JsonReader:
    """One JSON object or array, after a header without braces (Mistral writes the name there). ``known`` restricts the names."""

    def __init__(self, *, known: frozenset[str] | None = None, header: re.Pattern[str] | None = None) -> None:
        self._known = known
        self._header_pattern = header
        self._header = ""
        self._parts: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> Reading | None:
        begin = 0
        if not self._parts:
            header = self._header + text
            begin = self._begin(header)
            self._header = header[:begin]
            if begin > MAX_HEADER_CHARS or (self._header_pattern is None and self._header.strip()):
                return Reading(None)
            if begin == len(header):
                return None
            text, begin = header, begin
        end = self._scan(text, begin)
        self._parts.append(text[begin:] if end is None else text[begin:end])
        if end is None:
            return None
        return Reading(self._calls(), text[end:]) if end else Reading(None)

    def finish(self) -> Reading:
        return Reading(None)

    @staticmethod
    def _begin(text: str) -> int:
        """Where the value begins, the length of what there is before it where it does not; no further than a header may go."""
        text = text[: MAX_HEADER_CHARS + 1]
        blank = len(text) - len(text.lstrip())
        if text.startswith("[", blank):
            return blank
        brace = text.find("{", blank)
        return len(text) if brace < 0 else brace

    def _scan(self, text: str, begin: int) -> int | None:
        """Where the value ends, None if not here, 0 where it is no JSON."""
        for at in range(begin, len(text)):
            char = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif char not in _JSON_CHARS:
                return 0
        return None

    def _calls(self) -> tuple[ParsedCall, ...] | None:
        value = parse_json("".join(self._parts))
        if self._header_pattern is not None and self._header.strip():
            found = self._header_pattern.fullmatch(self._header.strip())
            value = {"name": found[1], "arguments": value} if found else None
        entries = value if isinstance(value, list) else [value]
        calls = [call for entry in entries if (call := self._call(entry)) is not None]
        return tuple(calls) if calls and len(calls) == len(entries) else None

    def _call(self, entry: Any) -> ParsedCall | None:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict) or (self._known is not None and entry["name"] not in self._known):
            return None
        return ParsedCall(entry["name"], dump_json(arguments))


class TagReader:
    """Qwen3-Coder's: ``<function=name>``, then ``<parameter=name>`` value ``</parameter>`` each, to ``</tool_call>``."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    _FUNCTION = re.compile(r"\s*<function=([^\s<>]{1,64})>")

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._parts: list[str] = []
        self._tail = ""

    def feed(self, text: str) -> Reading | None:
        window = self._tail + text
        ends = [at for mark in (self._BEGIN, self._END) if (at := window.find(mark)) >= 0]
        self._parts.append(text)
        if not ends:
            self._tail = window[1 - len(self._END) :]
            return None
        whole = "".join(self._parts)
        end = len(whole) - len(window) + min(ends)
        if whole.startswith(self._END, end):
            return Reading(self._calls(whole[:end]), whole[end + len(self._END) :])
        return Reading(self._unclosed(whole[:end]), whole[end:])  # a call does not begin inside another

    def finish(self) -> Reading:
        return Reading(self._unclosed("".join(self._parts)))

    def _unclosed(self, text: str) -> tuple[ParsedCall, ...] | None:
        return self._calls(text) if text.rstrip().endswith("</function>") else None

    def _calls(self, text: str) -> tuple[ParsedCall, ...] | None:
        begun = self._FUNCTION.match(text)
        if begun is None:
            return None
        arguments = self._arguments(text[begun.end() :].rstrip().removesuffix("</function>"), self._schemas.get(begun[1]))
        return None if arguments is None else (ParsedCall(begun[1], dump_json(arguments)),)

    @staticmethod
    def _arguments(text: str, schema: Any) -> dict[str, Any] | None:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments: dict[str, Any] = {}
        at = 0
        while (begin := text.find("<parameter=", at)) >= 0 and not text[at:begin].strip():
            value, end = text.find(">", begin), text.find("</parameter>", begin)
            if value < 0 or end < value:
                return None
            name = text[begin + len("<parameter=") : value]
            arguments[name] = _typed(text[value + 1 : end].removeprefix("\n").removesuffix("\n"), (properties or {}).get(name))
            at = end + len("</parameter>")
        return None if text[at:].strip() else arguments


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    value = parse_json(text)
    return text if value is None and text.strip() != "null" else value


def parse_json(text: str) -> Any:
    """The value; None also for what is no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def dump_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Half a surrogate pair is fine as an escape, but is no character that could be sent.
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is out of range")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
