"""From the fields of a request to what the gateway takes: sampling parameters, limits of length, constraints, prompts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import trio

from engine.actors.gateway import Generation
from engine.api.call import Call
from engine.api.config import ApiConfig
from engine.api.context import ApiContext
from engine.api.errors import ApiError, not_found
from engine.api.schema.common import ResponseFormat, SamplingFields, StructuredOutputs, check_depth, shown
from engine.constraints import AnyJson, Choice, Constraint, JsonSchema, Lark, Regex
from engine.core.errors import RequestError
from engine.core.sampling import MAX_LOGIT_BIAS_ENTRIES, MAX_TOKENS_LIMIT, MAX_TOP_LOGPROBS

MAX_CHOICES = 1024
# Templates, converters and grammars are Python at work: two at a time leave the event loop its turns.
_PREPARE_THREADS = 2
_PREPARE_TIMEOUT_S = 30.0
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_T = TypeVar("_T")
_preparing = trio.CapacityLimiter(_PREPARE_THREADS)


def check_model(context: ApiContext, model: str) -> None:
    if model not in context.info.served_names:
        raise not_found(
            f"the model {shown(model)} is not served here; served: {', '.join(context.info.served_names)}",
            param="model",
            code="model_not_found",
        )


def check_number(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {shown(value)}; allowed: from {low} to {high}", param=name)


def check_top_logprobs(name: str, value: int | None) -> None:
    check_number(name, value, 0, MAX_TOP_LOGPROBS)


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run what prepares a prompt or a grammar beside the event loop, under a deadline that counts the wait for a free thread too."""
    with trio.move_on_after(_PREPARE_TIMEOUT_S):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=_preparing)
    raise ApiError(
        503, f"preparing the prompt took longer than {_PREPARE_TIMEOUT_S:g} s", type="service_unavailable_error", code="prepare_timeout"
    )


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the field as the client knows it: "prompt" is "messages" to who sends a chat."""
    try:
        yield
    except RequestError as error:
        if error.param is None or error.param not in names:
            raise
        raise RequestError(str(error), param=names[error.param], code=error.code) from None


def grammar_names(request: SamplingFields) -> dict[str, str]:
    """For ``naming``: grammars are refused as "response_format", whichever field asked for them."""
    return {"response_format": "structured_outputs"} if request.structured_outputs is not None else {}


def max_tokens_of(name: str, requested: int | None, num_prompt_tokens: int, context_length: int, *, prompt_name: str) -> int:
    """How many tokens may be generated: what was asked for, else what the prompt leaves of the context."""
    room = context_length - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"{prompt_name} has {num_prompt_tokens} tokens; the context holds {context_length}, the answer included",
            param=prompt_name,
            code="context_length_exceeded",
        )
    if requested is None:
        return min(room, MAX_TOKENS_LIMIT)
    if requested > room:
        raise RequestError(
            f"{prompt_name} has {num_prompt_tokens} tokens and {name} is {shown(requested)}, {shown(num_prompt_tokens + requested)} "
            f"together; the context holds {context_length}: {name} can be at most {room}, or left out",
            param=name,
            code="context_length_exceeded",
        )
    return requested


def check_max_tokens(name: str, requested: int | None, hint: str = "") -> None:
    if requested is not None and requested < 1:
        raise RequestError(f"{name} is {shown(requested)}; allowed: at least 1{hint}", param=name)


def generation_of(
    fields: SamplingFields,
    context: ApiContext,
    call: Call,
    prompt: tuple[int, ...],
    *,
    n: int | None,
    max_tokens: int,
    logprobs: int | None,
    grammar: str | None,
    skip_special_tokens: bool = True,
) -> Generation:
    """What is handed to the gateway, which checks the ranges. Values that the request leaves out are the server's defaults."""
    defaults = context.defaults
    params = msgspec.structs.replace(
        defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        grammar=grammar,
        logit_bias=_logit_bias(fields.logit_bias),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        **{name: value for name in _PLAIN_FIELDS if (value := getattr(fields, name)) is not None},
    )
    if params.top_k == -1:  # as other servers write "off"
        params = msgspec.structs.replace(params, top_k=0)
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    skip = skip_special_tokens if fields.skip_special_tokens is None else fields.skip_special_tokens
    return Generation(
        prompt=prompt,
        params=params,
        n=1 if n is None else n,
        stop=tuple(stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=skip,
        priority=fields.priority or 0,
        cache_salt=call.tenant.namespace(fields.cache_salt),
    )


_PLAIN_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens",
    "ignore_eos",
)  # fmt: skip


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise RequestError(f"logit_bias has {len(bias)} entries; allowed: at most {MAX_LOGIT_BIAS_ENTRIES}", param="logit_bias")
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise RequestError(f"logit_bias has the key {shown(token)}; allowed: token ids, in decimal digits", param="logit_bias")
    return tuple((int(token), value) for token, value in bias.items())


# -- structured output ------------------------------------------------------------------------------------------------------------


def constraint_of(form: ResponseFormat | None, structured: StructuredOutputs | None, config: ApiConfig) -> Constraint | None:
    """What response_format or structured_outputs ask for; None for plain text."""
    first = _of_response_format(form, config) if form is not None else None
    second = _of_structured_outputs(structured, config) if structured is not None else None
    if first is not None and second is not None:
        raise RequestError("response_format and structured_outputs are both given; allowed: one of them", param="structured_outputs")
    return second if first is None else first


def schema_constraint(schema: Any, name: str, config: ApiConfig) -> JsonSchema:
    """``schema`` is any JSON value of a body; only an object, true or false is a JSON Schema."""
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{name} is {shown(schema)}; allowed: a JSON Schema, that is an object, true or false", param=name)
    check_depth(schema, name)
    _check_size(len(msgspec.json.encode(schema)), name, config)
    return JsonSchema(schema)


def regex_constraint(pattern: str | None, name: str, config: ApiConfig) -> Regex:
    if pattern is None:
        raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    _check_size(len(pattern.encode()), name, config)
    return Regex(pattern)


def _of_response_format(form: ResponseFormat, config: ApiConfig) -> Constraint | None:
    if form.json_schema is not None and form.type != "json_schema":
        raise RequestError(f'response_format.json_schema is given with the type "{form.type}"', param="response_format.json_schema")
    if form.regex is not None and form.type != "regex":
        raise RequestError(f'response_format.regex is given with the type "{form.type}"', param="response_format.regex")
    match form.type:
        case "text":
            return None
        case "json_object":
            return AnyJson()
        case "regex":
            return regex_constraint(form.regex, "response_format.regex", config)
        case "json_schema":
            if form.json_schema is None:
                name = "response_format.json_schema"
                raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
            # A format without a schema is any JSON value.
            schema = True if form.json_schema.schema is None else form.json_schema.schema
            return schema_constraint(schema, "response_format.json_schema.schema", config)


def _of_structured_outputs(structured: StructuredOutputs, config: ApiConfig) -> Constraint:
    values = {name: getattr(structured, name) for name in structured.__struct_fields__}
    if structured.json_object is False:
        del values["json_object"]
    asked = [name for name, value in values.items() if value is not None]
    if len(asked) != 1:
        raise RequestError(
            f"structured_outputs names {', '.join(asked) or 'nothing'}; allowed: exactly one of {', '.join(structured.__struct_fields__)}",
            param="structured_outputs",
        )
    at = f"structured_outputs.{asked[0]}"
    if structured.json_object:
        return AnyJson()
    if structured.regex is not None:
        return regex_constraint(structured.regex, at, config)
    if structured.choice is not None:
        return _choice(structured.choice, at, config)
    if structured.grammar is not None:
        _check_size(len(structured.grammar.encode()), at, config)
        return Lark(structured.grammar)
    schema = structured.json
    if isinstance(schema, str):
        _check_size(len(schema.encode()), at, config)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{at} is text that is not valid JSON: {error}", param=at) from None
    return schema_constraint(schema, at, config)


def _choice(texts: list[str], at: str, config: ApiConfig) -> Choice:
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise RequestError(f"{at} has {len(texts)} texts; allowed: 1 to {MAX_CHOICES}", param=at)
    if not all(texts):
        raise RequestError(f"{at} has an empty text; allowed: at least one character", param=at)
    _check_size(sum(len(text.encode()) for text in texts), at, config)
    return Choice(tuple(texts))


def _check_size(size_bytes: int, name: str, config: ApiConfig) -> None:
    if size_bytes > config.max_schema_bytes:
        raise RequestError(f"{name} has {size_bytes} bytes; allowed: at most {config.max_schema_bytes}", param=name)
