"""The forms in which models with a Jinja template write tool calls: how each begins, is read and can be forced."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .call_readers import JsonReader, Reader, TagReader
from .grammars import ANY_TEXT, CallGrammar, Marker, alternatives, json_call, quoted


class Marks(Protocol):
    """Makes the marker of a text, by its token where there is one."""

    def __call__(self, text: str) -> Marker: ...


class CallForm(Protocol):
    """``opening`` begins a call anywhere; with ``bare``, so does a brace at the beginning of the answer. ``closing`` may follow one."""

    @property
    def name(self) -> str: ...

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def bare(self) -> bool: ...

    def reader(self, functions: Mapping[str, Any]) -> Reader: ...

    def grammar(self, functions: Sequence[dict[str, Any]], mark: Marks, *, parallel: bool) -> CallGrammar: ...


class TaggedJson:
    """Hermes, Qwen: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

    name = "tagged_json"
    opening = "<tool_call>"
    closing = "</tool_call>"
    bare = False

    def reader(self, functions: Mapping[str, Any]) -> Reader:
        del functions
        return JsonReader()

    def grammar(self, functions: Sequence[dict[str, Any]], mark: Marks, *, parallel: bool) -> CallGrammar:
        call, rules = alternatives("call", [json_call("name", "arguments", function) for function in functions])
        begin, end = mark(self.opening), mark(self.closing)
        rest = rf'"\n" {call} "\n" {end.lark}'
        again = rf' ("\n" {begin.lark} {rest})*' if parallel else ""
        return CallGrammar(begin, rest + again, rules)


class TaggedFunctions:
    """Qwen3-Coder: parameters in tags of their own."""

    name = "tagged_functions"
    opening = "<tool_call>"
    closing = ""
    bare = False

    def reader(self, functions: Mapping[str, Any]) -> Reader:
        return TagReader(functions)

    def grammar(self, functions: Sequence[dict[str, Any]], mark: Marks, *, parallel: bool) -> CallGrammar:
        bodies = []
        rules = [f"value[suffix={quoted(chr(10) + '</parameter>' + chr(10))}]: {ANY_TEXT}"]
        for function in functions:
            parts = [quoted(f"\n<function={function['name']}>\n")]
            schema = function.get("parameters") or {}
            required = schema.get("required") or ()
            for name in schema.get("properties") or {}:
                body = f"{quoted(f'<parameter={name}>' + chr(10))} value"
                parts.append(f"{body}" if name in required else f"({body})?")
            bodies.append(" ".join([*parts, quoted("</function>\n")]))
        call, more = alternatives("call", bodies)
        begin, end = mark(self.opening), mark("</tool_call>")
        again = rf' ("\n" {begin.lark} {call} {end.lark})*' if parallel else ""
        return CallGrammar(begin, f"{call} {end.lark}{again}", (*rules, *more))


class BareJson:
    """Llama 3.1: ``{"name": ..., "parameters": ...}`` is the whole answer, with or without ``<|python_tag|>`` before it."""

    name = "bare_json"
    opening = "<|python_tag|>"
    closing = ";"
    bare = True

    def reader(self, functions: Mapping[str, Any]) -> Reader:
        return JsonReader(known=frozenset(functions))

    def grammar(self, functions: Sequence[dict[str, Any]], mark: Marks, *, parallel: bool) -> CallGrammar:
        del mark
        call, rules = alternatives("call", [json_call("name", "parameters", function) for function in functions])
        return CallGrammar(None, rf'{call} ("; " {call})*' if parallel else call, rules)


class MarkedList:
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or, newer, a name and its arguments after each marker."""

    name = "marked_list"
    opening = "[TOOL_CALLS]"
    closing = ""
    bare = False
    _HEADER = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?")

    def reader(self, functions: Mapping[str, Any]) -> Reader:
        del functions
        return JsonReader(header=self._HEADER)

    def grammar(self, functions: Sequence[dict[str, Any]], mark: Marks, *, parallel: bool) -> CallGrammar:
        call, rules = alternatives("call", [json_call("name", "arguments", function) for function in functions])
        again = rf' (", " {call})*' if parallel else ""
        return CallGrammar(mark(self.opening), f'"[" {call}{again} "]"', rules)


def detect_form(template: str) -> CallForm | None:
    """The form that a template's own text prescribes or replays, None where it is unknown."""
    if "<tool_call>" in template:
        return TaggedFunctions() if "<function=" in template else TaggedJson()
    if "[TOOL_CALLS]" in template:
        return MarkedList()
    if "<|python_tag|>" in template or ('"parameters"' in template and '"name"' in template):
        return BareJson()
    return None
