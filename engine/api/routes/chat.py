"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.api.call import DONE_FRAME, Call
from engine.api.chat_input import chat_input_of, prepare
from engine.api.context import ApiContext
from engine.api.formats.base import Delta, ToolCallDelta
from engine.api.logprobs import ChatLogprobs, TokenNames
from engine.api.samples import Answer, ChatSample, ToolCallBody
from engine.api.sampling import (
    check_max_tokens,
    check_model,
    check_number,
    check_top_logprobs,
    generation_of,
    grammar_names,
    max_tokens_of,
    naming,
)
from engine.api.schema.chat import CHAT_DECODER, ChatRequest
from engine.api.schema.common import StreamOptions, decode
from engine.api.streams import OpenStreams, UsageBody, open_streams
from engine.core.errors import RequestError

_encode = msgspec.json.Encoder().encode


class MessageBody(msgspec.Struct, omit_defaults=True):
    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None


class ChoiceBody(msgspec.Struct):
    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatBody(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody
    object: str = "chat.completion"
    system_fingerprint: None = None
    service_tier: None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallChunk(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


async def chat_completions(context: ApiContext, call: Call) -> None:
    request = decode(call.body, CHAT_DECODER)
    check_model(context, request.model)
    _check(request, context)
    chat = chat_input_of(request, context.config, context.engine.context_length)
    with naming({"prompt": "messages"} | grammar_names(request)):
        prepared = await prepare(context, lambda chat_format: chat_format.prepare(chat))
        prompt = prepared.prompt
        if isinstance(prompt, str):
            special = prepared.add_special_tokens if request.add_special_tokens is None else request.add_special_tokens
            prompt = await context.engine.tokenise(prompt, add_special_tokens=special)
        name, asked = _max_tokens(request)
        generation = generation_of(
            request,
            context,
            call,
            prompt,
            n=request.n,
            max_tokens=max_tokens_of(name, asked, len(prompt), context.engine.context_length, prompt_name="messages"),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=prepared.grammar,
            skip_special_tokens=prepared.skip_special_tokens,
        )
        async with open_streams(context.engine, call, [generation]) as streams:
            names = TokenNames(context.engine.tokenizer)
            samples = [ChatSample(index, prepared.make_parser(), names, generation.params.logprobs) for index in range(generation.n)]
            has_reasoning = context.chat_format is not None and context.chat_format.has_reasoning
            if request.stream:
                await _stream(call, request, streams, samples, has_reasoning=has_reasoning)
            else:
                await call.send_json(await _collect(call, request, streams, samples, has_reasoning=has_reasoning))


def _max_tokens(request: ChatRequest) -> tuple[str, int | None]:
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _check(request: ChatRequest, context: ApiContext) -> None:
    request.check_common()
    both = request.max_tokens is not None and request.max_completion_tokens is not None
    if both and request.max_tokens != request.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens are both given and differ: give one of them", param="max_tokens")
    check_max_tokens(*_max_tokens(request))
    check_number("n", request.n, 1, context.config.max_samples)
    check_top_logprobs("top_logprobs", request.top_logprobs)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs is given; allowed: only together with logprobs: true", param="top_logprobs")


# -- whole ------------------------------------------------------------------------------------------------------------------------


async def _collect(
    call: Call, request: ChatRequest, streams: OpenStreams, samples: Sequence[ChatSample], *, has_reasoning: bool
) -> ChatBody:
    answers = [Answer() for _ in samples]
    while batch := await streams.read():
        for index, output in batch:
            answers[index].add(samples[index].push(output, streams))
    choices = [_choice(sample, answer) for sample, answer in zip(samples, answers, strict=True)]
    return ChatBody(f"chatcmpl-{call.id}", int(time.time()), request.model, choices, streams.usage(has_reasoning=has_reasoning))


def _choice(sample: ChatSample, answer: Answer) -> ChoiceBody:
    content: str | None = answer.content
    tool_calls = answer.tool_calls
    if tool_calls and not content:
        content = None
    message = MessageBody("assistant", content, None, answer.reasoning or None, tool_calls or None)
    logprobs = sample.take_logprobs()
    return ChoiceBody(sample.index, message, None if logprobs is None else ChatLogprobs(logprobs), sample.finish_reason, sample.stop_reason)


# -- streamed ---------------------------------------------------------------------------------------------------------------------


async def _stream(call: Call, request: ChatRequest, streams: OpenStreams, samples: Sequence[ChatSample], *, has_reasoning: bool) -> None:
    options = request.stream_options or StreamOptions()
    chunks = _Chunks(call.id, request.model, streams, options, has_reasoning=has_reasoning)
    writer = call.events()
    begun = [False] * len(samples)
    while batch := await streams.read():
        frames: list[bytes] = []
        for index, output in batch:
            sample = samples[index]
            delta = sample.push(output, streams)
            if not begun[index]:
                begun[index] = True
                frames.append(chunks.role(index))
            if delta:
                frames += chunks.deltas(sample, delta)
            if sample.finish_reason is not None:
                frames.append(chunks.finish(sample))
        await writer.write(b"".join(frames))
    await writer.write((chunks.usage() if options.include_usage else b"") + DONE_FRAME)
    await writer.end()


class _Chunks:
    """Chunks as bytes. What is the same in all of them is encoded once; a plain content delta only has its text encoded."""

    def __init__(self, call_id: str, model: str, streams: OpenStreams, options: StreamOptions, *, has_reasoning: bool) -> None:
        self._streams = streams
        self._has_reasoning = has_reasoning
        self._continuous = bool(options.continuous_usage_stats)
        created = int(time.time())
        head = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        # Usage is null in the chunks before the one that has it.
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]'
        num_choices = sum(len(stream.samples) for stream in streams.streams)
        self._begin = [self._head + b'{"index":%d,"delta":' % index for index in range(num_choices)]

    def role(self, index: int) -> bytes:
        return self._begin[index] + b'{"role":"assistant","content":""' + self._plain_end + self._end()

    def deltas(self, sample: ChatSample, delta: Delta) -> list[bytes]:
        """One chunk a kind: clients that look for content or reasoning find each by itself."""
        logprobs = sample.take_logprobs()
        bodies: list[bytes] = []
        if delta.reasoning:
            bodies.append(b'{"reasoning_content":' + _encode(delta.reasoning))
        if delta.content:
            bodies.append(b'{"content":' + _encode(delta.content))
        if delta.tool_calls:
            bodies.append(b'{"tool_calls":' + _encode([_tool_call_chunk(call) for call in delta.tool_calls]))
        end = self._plain_end
        if logprobs is not None:
            end = b'},"logprobs":' + _encode(ChatLogprobs(logprobs)) + b',"finish_reason":null}]'
        begin, tail = self._begin[sample.index], self._end()
        last = len(bodies) - 1
        return [begin + body + (end if number == last else self._plain_end) + tail for number, body in enumerate(bodies)]

    def finish(self, sample: ChatSample) -> bytes:
        logprobs = sample.take_logprobs()
        values: dict[str, Any] = {
            "logprobs": ChatLogprobs(logprobs) if logprobs else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        return self._begin[sample.index] + b"{}," + _encode(values)[1:] + b"]" + self._end()

    def usage(self) -> bytes:
        return self._head + b"]" + self._usage_field()

    def _end(self) -> bytes:
        return self._usage_field() if self._continuous else self._tail

    def _usage_field(self) -> bytes:
        return b',"usage":' + _encode(self._streams.usage(has_reasoning=self._has_reasoning)) + b"}\n\n"


def _tool_call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    first = call.id is not None
    return ToolCallChunk(call.index, call.id, "function" if first else None, FunctionDelta(call.name, call.arguments))
