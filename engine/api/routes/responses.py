"""POST /v1/responses. Nothing is stored: there is no route to get a response again, and none to go on from."""

from __future__ import annotations

import time
from typing import Any

from engine.api.call import Call
from engine.api.chat_input import prepare
from engine.api.context import ApiContext
from engine.api.errors import ApiError
from engine.api.logprobs import TokenNames
from engine.api.response_events import ResponseBuilder
from engine.api.response_input import chat_input_of, check_parts, raw_body
from engine.api.samples import ChatSample
from engine.api.sampling import (
    check_max_tokens,
    check_model,
    check_top_logprobs,
    generation_of,
    grammar_names,
    max_tokens_of,
    naming,
)
from engine.api.schema.common import decode, not_implemented
from engine.api.schema.responses import RESPONSES_DECODER, ResponsesRequest
from engine.api.streams import OpenStreams, open_streams
from engine.core.sampling import SamplingParams

_NAMES = {"prompt": "input", "messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}


async def responses(context: ApiContext, call: Call) -> None:
    request = decode(call.body, RESPONSES_DECODER)
    check_model(context, request.model)
    _check(request)
    with naming(_NAMES | grammar_names(request)):
        chat = chat_input_of(request, context.config, context.engine.context_length)
        prepared = await prepare(context, lambda chat_format: chat_format.prepare_responses(raw_body(call.body), chat))
        prompt = prepared.prompt
        if isinstance(prompt, str):
            prompt = await context.engine.tokenise(prompt, add_special_tokens=prepared.add_special_tokens)
        length = context.engine.context_length
        generation = generation_of(
            request,
            context,
            call,
            prompt,
            n=1,
            max_tokens=max_tokens_of("max_output_tokens", request.max_output_tokens, len(prompt), length, prompt_name="input"),
            logprobs=request.top_logprobs or (0 if request.include else None),
            grammar=prepared.grammar,
            skip_special_tokens=prepared.skip_special_tokens,
        )
        async with open_streams(context.engine, call, [generation]) as streams:
            sample = ChatSample(0, prepared.make_parser(), TokenNames(context.engine.tokenizer), generation.params.logprobs)
            builder = ResponseBuilder(_response(request, call, generation.params))
            if request.stream:
                await _stream(call, streams, sample, builder)
            else:
                await _collect(streams, sample, builder)
                await call.send_json(builder.response)


def _check(request: ResponsesRequest) -> None:
    request.check_common()
    check_parts(request)
    check_max_tokens("max_output_tokens", request.max_output_tokens)
    check_top_logprobs("top_logprobs", request.top_logprobs)
    options = request.stream_options
    if options is not None and options.continuous_usage_stats:
        raise not_implemented("stream_options.continuous_usage_stats", " for responses: the last event has the usage")


async def _collect(streams: OpenStreams, sample: ChatSample, builder: ResponseBuilder) -> None:
    while batch := await streams.read():
        for _, output in batch:
            delta = sample.push(output, streams)
            if delta:
                for _ in builder.add(delta, sample.take_logprobs() or ()):
                    pass
    for _ in builder.end("incomplete" if sample.finish_reason == "length" else "completed", _usage(streams)):
        pass


async def _stream(call: Call, streams: OpenStreams, sample: ChatSample, builder: ResponseBuilder) -> None:
    def error_frame(error: ApiError) -> bytes:
        return builder.fail(str(error))

    writer = call.events(error_frame)
    frames = list(builder.begin())
    while batch := await streams.read():
        for _, output in batch:
            delta = sample.push(output, streams)
            if delta:
                frames += builder.add(delta, sample.take_logprobs() or ())
        if frames:
            await writer.write(b"".join(frames))
            frames = []
    frames += builder.end("incomplete" if sample.finish_reason == "length" else "completed", _usage(streams))
    await writer.write(b"".join(frames))
    await writer.end()


def _usage(streams: OpenStreams) -> dict[str, Any]:
    usage = streams.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": streams.num_reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _response(request: ResponsesRequest, call: Call, params: SamplingParams) -> dict[str, Any]:
    """The object before its first item: what was asked for, as it is in effect."""
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _format(request)},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"description": None, "parameters": None, "strict": None} | tool for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    form = request.text.format if request.text is not None else None
    if form is None:
        return {"type": "text"}
    return {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None}
