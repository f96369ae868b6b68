"""What the shape of an answer must be: asked for by a client, enforced token by token by the sampler (engine.grammar)."""

from __future__ import annotations

from typing import Any, Union

import msgspec


class AnyJson(msgspec.Struct, frozen=True, tag=True):
    """One JSON object (``response_format: json_object``)."""


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """One JSON value that a JSON Schema (a dict, or true / false) accepts."""

    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True, tag=True):
    """The whole answer matches a regular expression."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag=True):
    """The whole answer is one of these texts."""

    texts: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True, tag=True):
    """A context-free grammar in llguidance's dialect of Lark."""

    grammar: str


Constraint = Union[AnyJson, JsonSchema, Regex, Choice, Lark]
