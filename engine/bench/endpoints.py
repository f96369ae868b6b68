"""The three routes a generation is asked from: the body to send, and what each event of the answer means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from engine.core.errors import ConfigError
from engine.core.events import FinishReason

EndpointName = Literal["chat", "completions", "responses"]
Prompt = str | list[int] | list[dict[str, Any]]
# What a server says it counted: there is an entry of ours for each token.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Piece(msgspec.Struct, gc=False):
    """What one event says.

    ``has_output``: it carries content, reasoning or a piece of a tool call. ``completion_tokens`` is the server's count so far, where the
    event has one. ``error`` is the text of an error the server reports inside the stream.
    """

    has_output: bool = False
    content: str = ""
    reasoning: str = ""
    finish: FinishReason | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """What every body of a run has in common. ``extra`` is merged in last."""

    model: str
    continuous_usage: bool = True
    ignore_eos: bool = False
    temperature: float | None = None
    extra: dict[str, Any] = {}


class Endpoint(msgspec.Struct, frozen=True):
    """``read`` raises msgspec.DecodeError for data that is not the route's JSON."""

    name: EndpointName
    path: str
    prompt_key: str
    length_key: str
    read: Callable[[bytes], Piece]

    def body(self, asked: Asked, prompt: Prompt, max_tokens: int | None) -> bytes:
        """Raises ConfigError for messages where the route takes text."""
        if self.name == "completions" and isinstance(prompt, list) and any(isinstance(entry, dict) for entry in prompt):
            raise ConfigError(f"the dataset has messages, and {self.path} takes text; use --endpoint chat")
        body: dict[str, Any] = {"model": asked.model, self.prompt_key: prompt, "stream": True}
        if self.name == "chat" and isinstance(prompt, str):
            body[self.prompt_key] = [{"role": "user", "content": prompt}]
        if self.name == "responses":
            body["store"] = False
        else:
            body["stream_options"] = {"include_usage": True}
            if asked.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if max_tokens is not None:
            body[self.length_key] = max_tokens
        if asked.ignore_eos:
            body["ignore_eos"] = True
        if asked.temperature is not None:
            body["temperature"] = asked.temperature
        return msgspec.json.encode({**body, **asked.extra})


# -- chat completions and completions -----------------------------------------------------------------------------------------


# Values that any type may have: an error is an object with OpenAI, a text elsewhere.
_ABSENT = msgspec.Raw()


def _is_there(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


class _Cached(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = 0
    prompt_tokens_details: _Cached | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT


_chunks = msgspec.json.Decoder(_Chunk)
_FINISH: dict[str, FinishReason] = {"length": "length", "abort": "abort", "error": "error"}


def read_chunk(data: bytes) -> Piece:
    """A chunk of either completions route. The usage chunk has no choices, the role chunk no output."""
    chunk = _chunks.decode(data)
    piece = Piece()
    if _is_there(chunk.error):
        piece.error = _error_text(bytes(chunk.error))
    for choice in chunk.choices:
        delta = choice.delta
        if delta is not None:
            piece.content += delta.content or ""
            piece.reasoning += delta.reasoning_content or delta.reasoning or ""
            piece.has_output = piece.has_output or bool(piece.content or piece.reasoning or delta.tool_calls)
        elif choice.text:
            piece.content += choice.text
            piece.has_output = True
        if choice.finish_reason is not None:
            piece.finish = _FINISH.get(choice.finish_reason, "stop")
    if chunk.usage is not None:
        piece.prompt_tokens = chunk.usage.prompt_tokens
        piece.completion_tokens = chunk.usage.completion_tokens
        if chunk.usage.prompt_tokens_details is not None:
            piece.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    return piece


def _error_text(raw: bytes) -> str:
    """The message inside an error of any form."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        value = None
    if isinstance(value, dict):
        inner = value.get("error", value)
        value = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(value if value is not None else raw.decode("utf-8", "replace"))[:500]


def error_text(body: bytes) -> str:
    """What the body of an answer that is not 200 says."""
    return _error_text(body)


# -- responses ----------------------------------------------------------------------------------------------------------------


class _ResponseUsage(msgspec.Struct, gc=False):
    input_tokens: _Count = 0
    output_tokens: _Count = 0
    input_tokens_details: _Cached | None = None


class _Reason(msgspec.Struct, gc=False):
    reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _ResponseUsage | None = None
    incomplete_details: _Reason | None = None
    error: msgspec.Raw = _ABSENT


class _ResponseEvent(msgspec.Struct, gc=False):
    type: str = ""
    delta: msgspec.Raw = _ABSENT
    response: _Response | None = None
    error: msgspec.Raw = _ABSENT
    message: str | None = None


_response_events = msgspec.json.Decoder(_ResponseEvent)
_REASONING_EVENTS = frozenset({"response.reasoning_text.delta", "response.reasoning_summary_text.delta"})
_OUTPUT_EVENTS = _REASONING_EVENTS | frozenset(
    {
        "response.output_text.delta",
        "response.refusal.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    }
)


def read_response_event(data: bytes) -> Piece:
    event = _response_events.decode(data)
    piece = Piece()
    if event.type in _OUTPUT_EVENTS:
        delta = msgspec.json.decode(event.delta) if _is_there(event.delta) else ""
        text = delta if isinstance(delta, str) else ""
        if event.type in _REASONING_EVENTS:
            piece.reasoning = text
        else:
            piece.content = text
        piece.has_output = bool(text)
        return piece
    response = event.response
    if event.type in ("response.completed", "response.incomplete"):
        cut = response is not None and response.incomplete_details is not None
        piece.finish = "length" if event.type == "response.incomplete" or cut else "stop"
    elif event.type in ("response.failed", "error") or _is_there(event.error):
        error = event.error if _is_there(event.error) or response is None else response.error
        piece.error = event.message or (_error_text(bytes(error)) if _is_there(error) else "the response failed")
    if response is not None and response.usage is not None and piece.finish is not None:
        piece.prompt_tokens = response.usage.input_tokens
        piece.completion_tokens = response.usage.output_tokens
        if response.usage.input_tokens_details is not None:
            piece.cached_tokens = response.usage.input_tokens_details.cached_tokens
    return piece


ENDPOINTS: dict[str, Endpoint] = {
    "chat": Endpoint("chat", "/v1/chat/completions", "messages", "max_completion_tokens", read_chunk),
    "completions": Endpoint("completions", "/v1/completions", "prompt", "max_tokens", read_chunk),
    "responses": Endpoint("responses", "/v1/responses", "input", "max_output_tokens", read_response_event),
}
