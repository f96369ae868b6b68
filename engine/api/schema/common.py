"""What the bodies of the three routes have in common: decoding with errors that name the field, and the fields of sampling.

A field that is not declared is refused by name. A field that OpenAI knows and this server does not implement is declared, so that its
no-op values pass (clients write them out) and every other value is refused as not implemented: nothing is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.core.errors import RequestError

MAX_SALT_CHARS = 256
MAX_METADATA_ENTRIES = 16
MAX_JSON_DEPTH = 64
# What a body may have the server build out of it, on the event loop: a byte of JSON can become a hundred in memory. Values are counted
# by what separates them. The largest requests that make sense are lists of prompts as token ids, and long conversations.
MAX_VALUES = 2 << 20
MAX_CONTAINERS = 256 << 10
MAX_STRINGS = 512 << 10
_MAX_SHOWN_CHARS = 100

Label = Annotated[str, Meta(max_length=1024)]  # identifiers that a client gives for its own purposes
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
FunctionName = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]

_T = TypeVar("_T")
# Never gives a character back: the time is linear whatever the text, also where a string does not end.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
_AT_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$", re.DOTALL)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of them. ``json`` is a JSON Schema, as a value or as its text."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: SchemaFormat | None = None
    regex: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every route. None is "not given", as null is; ranges of numbers are checked by SamplingParams.validate."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: Salt | None = None
    structured_outputs: StructuredOutputs | None = None
    # Of no effect here: who asks, for the client's own books.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: dict[str, str] | None = None
    # Not implemented.
    service_tier: Any = None
    store: Any = None

    not_implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {"service_tier": ("auto", "default"), "store": (False,)}

    def check_common(self) -> None:
        """Raise RequestError for what is not implemented and for bounds that the types do not express."""
        refuse_unimplemented(self, self.not_implemented)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is given; allowed: only together with stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise not_implemented("stream_options.include_obfuscation")
        for key, value in (self.metadata or {}).items():
            if len(key) > 64 or len(value) > 512:
                raise RequestError("metadata has a longer entry; allowed: keys of 64 and values of 512 characters", param="metadata")
        if len(self.metadata or ()) > MAX_METADATA_ENTRIES:
            count = len(self.metadata or ())
            raise RequestError(f"metadata has {count} entries; allowed: at most {MAX_METADATA_ENTRIES}", param="metadata")


def decode(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """The body as its struct. Raises RequestError; of a key that is there twice, the last one counts."""
    check_number_of_values(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is not valid JSON: it is nested too deeply", code="invalid_json") from None


def check_number_of_values(body: bytes) -> None:
    """Raise RequestError for a body of more values than a request can have. Takes a moment only where there may be as many."""
    # A quote inside a string has a backslash before it; so may one that ends a string, but not one that begins it.
    too_many = body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS
    if not too_many and (_containers(body) > MAX_CONTAINERS or body.count(b",") > MAX_VALUES):
        bare = _STRING.sub(b"", body)
        too_many = _containers(bare) > MAX_CONTAINERS or bare.count(b",") > MAX_VALUES
    if too_many:
        raise RequestError(
            f"the body has too many values; allowed: {MAX_VALUES} altogether, {MAX_STRINGS} strings, {MAX_CONTAINERS} objects and lists",
            code="too_many_values",
        )


def _containers(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def convert(value: Any, type: type[_T], at: str) -> _T:
    """A decoded part of the body as its struct; ``at`` is where it is, for the errors."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), at) from None


def not_implemented(name: str, detail: str = "") -> RequestError:
    return RequestError(f"{name} is not implemented by this server{detail}", param=name, code="not_implemented")


def refuse_unimplemented(request: msgspec.Struct, fields: Mapping[str, tuple[Any, ...]], at: str = "") -> None:
    """``fields``: names and the values, beside null, that ask for nothing. ``at`` is where a part of the body is."""
    for name, allowed in fields.items():
        value = getattr(request, name)
        if value is None or any(type(value) is type(noop) and value == noop for noop in allowed):
            continue
        values = f"; allowed: null{''.join(f' or {shown(noop)}' for noop in allowed)}"
        raise not_implemented(f"{at}.{name}" if at else name, values)


def check_depth(value: Any, name: str) -> None:
    """JSON that clients nest freely (schemas): bounded, so that nothing after this has to recurse without limit."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return
        level = deeper
    raise RequestError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", param=name)


def shown(value: object) -> str:
    """A value from outside for an error message: as JSON, cut to what a message can hold."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _invalid(message: str, at: str = "") -> RequestError:
    found = _AT_PATH.search(message)
    path = found["path"] if found else ""
    reason = message[: found.start()] if found else message
    param = f"{at}{'' if not at or not path or path.startswith('[') else '.'}{path}"
    if unknown := _UNKNOWN.match(reason):
        name = f"{param}.{unknown['name']}" if param else unknown["name"]
        name = name[:_MAX_SHOWN_CHARS]
        return RequestError(f"{name} is no field of this request, or not implemented", param=name, code="unknown_parameter")
    if missing := _MISSING.match(reason):
        name = f"{param}.{missing['name']}" if param else missing["name"]
        return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    if not param:
        return RequestError(f"the body: {reason[:1].lower()}{reason[1:]}", code="invalid_type")
    return RequestError(f"{param}: {reason[:1].lower()}{reason[1:]}", param=param, code="invalid_value")
