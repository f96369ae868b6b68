"""Grammars (llguidance's Lark) of answers in which a tool is called: forced, once at most, or beside a structured answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.constraints import Constraint
from engine.core.errors import RequestError
from engine.grammar import check_length, grammar_of

# Blanks inside JSON: enough for indentation, but no model stays in them for ever.
JSON_STYLE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
ANY_TEXT = "/(?s:.*)/"
# What models write between their thoughts and what follows.
_AFTER_THOUGHTS = r"/\n{0,2}/"


class Marker(NamedTuple):
    """A text that a grammar matches. Where the vocabulary has a token for it, or for all but ``lead`` and ``tail``, the grammar must
    name the ``token``: texts in a grammar never match tokens that mark up."""

    text: str
    token: int | None = None
    lead: str = ""
    tail: str = ""

    @property
    def lark(self) -> str:
        if self.token is None:
            return quoted(self.text)
        return " ".join([*([quoted(self.lead)] if self.lead else []), self.from_token])

    @property
    def from_token(self) -> str:
        return " ".join([f"<[{self.token}]>", *([quoted(self.tail)] if self.tail else [])])


class CallGrammar(NamedTuple):
    """``opening`` begins the first call, None where nothing does; ``rest`` is an expression for all that follows, over ``rules``."""

    opening: Marker | None
    rest: str
    rules: tuple[str, ...]

    @property
    def whole(self) -> str:
        return self.rest if self.opening is None else f"{self.opening.lark} {self.rest}"


class Thoughts(NamedTuple):
    """Free text before the answer; ``begin`` None where the prompt has opened it, else it may be missing altogether."""

    begin: Marker | None
    end: Marker


def forced(calls: CallGrammar, thoughts: Thoughts | None = None) -> str:
    """The answer is calls, and nothing else after the thoughts."""
    return _assembled(calls.whole, calls.rules, thoughts)


def optional(calls: CallGrammar, answer: Constraint | None, thoughts: Thoughts | None = None) -> str:
    """The answer is calls or what ``answer`` describes; with None it is any text, with or without calls at its end."""
    if answer is not None:
        return _assembled(f"(@answer | {calls.whole})", calls.rules, thoughts, answer)
    if calls.opening is None:
        raise RequestError("parallel_tool_calls false is not possible with this model's form of tool calls", param="parallel_tool_calls")
    opening = calls.opening
    no_call = f"& ~/(?s:.*){_escaped(opening.text)}(?s:.*)/"
    rules = [*calls.rules, f"FREE: {ANY_TEXT} {no_call}"]
    if opening.token is None:
        rules.append(f"until_call[suffix={quoted(opening.text)}]: {ANY_TEXT}")
        with_call = f"until_call {calls.rest}"
    else:
        rules.append(f"UNTIL_CALL: /(?s:.*){_escaped(opening.lead)}/ {no_call}")
        with_call = f"UNTIL_CALL {opening.from_token} {calls.rest}"
    return _assembled(f"(FREE | {with_call})", rules, thoughts)


def after_thoughts(answer: Constraint, thoughts: Thoughts) -> str:
    return _assembled("@answer", (), thoughts, answer)


def json_call(name_key: str, arguments_key: str, function: dict[str, Any]) -> str:
    """One call as a JSON object."""
    parameters, definitions = split_schema(function.get("parameters"))
    schema = {
        "type": "object",
        "properties": {name_key: {"const": function["name"]}, arguments_key: parameters},
        "required": [name_key, arguments_key],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
    }
    return f"%json {json.dumps(schema | definitions)}"


def split_schema(parameters: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema without its definitions, and these, for the root of the schema it goes into. Arguments are always an object."""
    schema = dict(parameters or {})
    definitions: dict[str, Any] = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    schema.pop("$schema", None)
    return schema if schema else {"type": "object"}, definitions


def alternatives(prefix: str, bodies: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Rules of their own for ``bodies``, and the expression of one of them."""
    names = [f"{prefix}{index}" for index in range(len(bodies))]
    return "(" + " | ".join(names) + ")", tuple(f"{name}: {body}" for name, body in zip(names, bodies, strict=True))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _assembled(body: str, rules: Sequence[str], thoughts: Thoughts | None, answer: Constraint | None = None) -> str:
    lines = [f"start: {body}", *rules]
    if thoughts is not None:
        lines[0] = f"start: thoughts {_AFTER_THOUGHTS} {body}"
        if thoughts.end.token is not None:
            inner = f"{ANY_TEXT} {thoughts.end.lark}"
        else:
            inner = "until_end"
            lines.append(f"until_end[suffix={quoted(thoughts.end.text)}]: {ANY_TEXT}")
        lines.append(f"thoughts: {inner}" if thoughts.begin is None else f"thoughts: ({thoughts.begin.lark} {inner})?")
    grammars: list[Any] = [{"name": "whole", "lark_grammar": "\n".join(lines) + "\n"}]
    if answer is not None:
        grammars += json.loads(grammar_of(answer))["grammars"]  # one, by the name of "answer"
    grammar = json.dumps({"grammars": grammars}, ensure_ascii=False)
    check_length(grammar)
    return grammar


def _escaped(text: str) -> str:
    """As part of a regular expression. Not every escaped character is itself: ``\\<`` would be the beginning of a word."""
    return "".join("\\" + char if char in r".+*?()|[]{}^$\/" else char for char in text).replace("\n", r"\n")
