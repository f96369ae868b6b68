"""The grammar of tool calls as DeepSeek V4.1 writes them: parameters one by one, texts as they are, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.core.errors import RequestError

from .grammars import JSON_STYLE, CallGrammar, Marker, alternatives, quoted, split_schema

TAG = "｜DSML｜"
# With any other key a text is written as JSON, so that the key is enforced.
_PLAIN_TEXT_KEYS = frozenset(["type", "description", "title", "default", "examples"])
_TEXT_VALUE = r"TEXT_VALUE: /(?s:.*)<\//"  # up to the tag that ends it


class DsmlGrammar:
    """``tag_token`` is the token of ``TAG``, which stands in all markup."""

    def __init__(self, tag_token: int) -> None:
        self._tag = f"<[{tag_token}]>"
        self._opening = Marker(f"<{TAG} calls>\n", tag_token, "<", " calls>\n")
        self._end_of_parameter = f'{self._tag} " parameter>"'

    def calls(self, functions: Sequence[dict[str, Any]], *, parallel: bool, opened: bool) -> CallGrammar:
        """Calls of ``functions`` (name and JSON Schema of the parameters). ``opened``: the prompt has begun the block of calls."""
        rules = [_TEXT_VALUE]
        bodies = []
        for index, function in enumerate(functions):
            body, more = self._function(index, function)
            bodies.append(body)
            rules += more
        call, more_rules = alternatives("call", bodies)
        again = rf' ("\n" {call})*' if parallel else ""
        rest = rf'{call}{again} "\n" "</" {self._tag} " calls>"'
        return CallGrammar(None if opened else self._opening, rest, (*rules, *more_rules))

    def _function(self, index: int, function: dict[str, Any]) -> tuple[str, list[str]]:
        name = function["name"]
        schema, definitions = split_schema(function.get("parameters"))
        properties = schema.get("properties") or {}
        if not isinstance(properties, dict):
            raise RequestError(f"the properties of tool {name} are no object", param="tools")
        listed = schema.get("required")
        required = set(map(str, listed)) if isinstance(listed, list) else set()
        rules: list[str] = []
        parts = [self._begin(f' invoke name="{name}">\n')]
        for position, (key, value) in enumerate(properties.items()):
            if any(char in key for char in '"<>\n'):
                raise RequestError(f"tool {name} has a parameter named {key!r:.80}; this model's calls cannot hold it", param="tools")
            rule = f"param{index}_{position}"
            body, more = self._parameter(rule, key, value, definitions)
            rules += [f"{rule}: {body}", *more]
            parts.append(rf'{rule} "\n"' if key in required else rf'({rule} "\n")?')
        if not properties:
            parts.append(r'"\n"?')
        parts.append(f'"</" {self._tag} " invoke>"')
        return " ".join(parts), rules

    def _parameter(self, rule: str, name: str, schema: Any, definitions: dict[str, Any]) -> tuple[str, list[str]]:
        texts = _texts(_resolved(schema, definitions))
        if texts is not None:
            opening = self._begin(f' parameter name="{name}" string="true">')
            if not texts:
                return f"{opening} TEXT_VALUE {self._end_of_parameter}", []
            choices = " | ".join(quoted(text + "</") for text in texts)
            return f"{opening} ({choices}) {self._end_of_parameter}", []
        opening = self._begin(f' parameter name="{name}" string="false">')
        value = json.dumps({**schema, **definitions, "x-guidance": JSON_STYLE} if isinstance(schema, dict) else schema)
        return f'{opening} {rule}_value "</" {self._end_of_parameter}', [f"{rule}_value: %json {value}"]

    def _begin(self, text: str) -> str:
        return f'"<" {self._tag} {quoted(text)}'


def _resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """The definition that a schema is nothing but a reference to."""
    reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
    kind, _, name = str(reference).removeprefix("#/").partition("/")
    group = definitions.get(kind)
    return group[name] if isinstance(group, dict) and name in group else schema


def _texts(schema: Any) -> list[str] | None:
    """The texts that a schema allows, an empty list for all, None where it allows anything else or more has to be enforced."""
    if not isinstance(schema, dict) or schema.get("type", "string") != "string" or not set(schema) <= {*_PLAIN_TEXT_KEYS, "enum"}:
        return None
    if "enum" not in schema:
        return [] if "type" in schema else None
    texts = schema["enum"]
    return texts if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) else None
