"""Structured output: constraints as llguidance grammars, checked against limits before anything is compiled. Torch-free.

The gateway checks with it, the worker's sampler enforces with it; ``grammar_compiler`` is what both compile with.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, assert_never

from llguidance import LLMatcher

from engine.constraints import AnyJson, Choice, Constraint, JsonSchema, Lark, Regex
from engine.core.errors import RequestError

# What is compiled is bounded twice: its text here, the work and memory it takes by the compiler's limits (grammar_compiler.LIMITS).
MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_DEPTH = 128  # JSON containers in one another; a nested object of a schema takes two
MAX_PATTERN_CHARS = 16 << 10
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 8 << 10
MAX_GRAMMAR_CHARS = 256 << 10

# Blanks between the tokens of a JSON text: enough for indentation, but no model stays in them for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
_PARAM = "response_format"


def grammar_of(constraint: Constraint, *, reasoning_end_token: int | None = None) -> str:
    """The llguidance grammar of an output that satisfies ``constraint``.

    With ``reasoning_end_token`` the output begins with free text up to and including that token. Raises RequestError, naming the limit,
    for a constraint that is too large; whether it is a valid schema, expression or grammar is the compiler's to say.
    """
    answer = _answer(constraint)
    grammars = [answer] if reasoning_end_token is None else [_reasoning(reasoning_end_token), answer]
    grammar = json.dumps({"grammars": grammars}, ensure_ascii=False)
    check_length(grammar)
    return grammar


def check_length(grammar: str) -> None:
    """Raise RequestError for a grammar that is too long to be compiled."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        _refuse(f"the grammar has {len(grammar)} characters; allowed: at most {MAX_GRAMMAR_CHARS}")


def _answer(constraint: Constraint) -> dict[str, Any]:
    """The grammar object of the answer itself, in llguidance's JSON form, under the name that ``_reasoning`` refers to."""
    match constraint:
        case AnyJson():
            return _json_grammar({"type": "object"})
        case JsonSchema(schema=schema):
            return _json_grammar(schema)
        case Regex(pattern=pattern):
            if len(pattern) > MAX_PATTERN_CHARS:
                _refuse(f"the regular expression has {len(pattern)} characters; allowed: at most {MAX_PATTERN_CHARS}")
            return _named(LLMatcher.grammar_from_regex(_unicode(pattern, "regular expression")))
        case Choice(texts=texts):
            return {"name": "answer", "lark_grammar": _choice(texts)}
        case Lark(grammar=grammar):
            check_length(grammar)
            return {"name": "answer", "lark_grammar": _unicode(grammar, "grammar")}
        case _:
            assert_never(constraint)


def _json_grammar(schema: dict[str, Any] | bool) -> dict[str, Any]:
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        _refuse(f"the schema is not JSON: {error}")
    size = len(_unicode(text, "schema").encode())
    if size > MAX_SCHEMA_BYTES:
        _refuse(f"the schema takes {size} bytes; allowed: at most {MAX_SCHEMA_BYTES}")
    # A schema that is true or false has no place for options; both accept no or any JSON text.
    if not isinstance(schema, dict):
        text = json.dumps({"allOf": [schema]})
    return _named(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE}))


def _check_depth(schema: object) -> None:
    """Without recursion: what is too deep for us would be too deep for this too."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        if not inner:
            return
        level = inner
    _refuse(f"the schema nests deeper than {MAX_SCHEMA_DEPTH} levels")


def _choice(texts: tuple[str, ...]) -> str:
    if not 0 < len(texts) <= MAX_CHOICES:
        _refuse(f"there are {len(texts)} choices; allowed: 1 to {MAX_CHOICES}")
    for text in texts:
        if len(text) > MAX_CHOICE_CHARS:
            _refuse(f"a choice has {len(text)} characters; allowed: at most {MAX_CHOICE_CHARS}")
    return "start: " + " | ".join(json.dumps(_unicode(text, "choice"), ensure_ascii=False) for text in texts)


def _named(grammar: str) -> dict[str, Any]:
    """The one grammar object of a text that the library made."""
    (answer,) = json.loads(grammar)["grammars"]
    return {key: value for key, value in answer.items() if value is not None} | {"name": "answer"}


def _reasoning(end_token: int) -> dict[str, Any]:
    """Free text is text: no special token but the end of the reasoning itself, and in particular no end of text, can come in it."""
    return {"name": "whole", "lark_grammar": f"start: REASONING <[{end_token}]> @answer\nREASONING: /(.|\\n)*/\n"}


def _unicode(text: str, what: str) -> str:
    """``text`` again. Raises RequestError for lone surrogates, which no token can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _refuse(f"the {what} is not valid Unicode: {error.reason} at character {error.start}")
    return text


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, param=_PARAM)
