"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from engine.actors.gateway import Generation
from engine.actors.stream import Output
from engine.api.call import DONE_FRAME, Call
from engine.api.context import ApiContext
from engine.api.logprobs import CompletionLogprobs, CompletionOffsets, join
from engine.api.sampling import (
    check_max_tokens,
    check_model,
    check_number,
    check_top_logprobs,
    constraint_of,
    generation_of,
    grammar_names,
    in_thread,
    max_tokens_of,
    naming,
)
from engine.api.schema.common import StreamOptions, decode, not_implemented
from engine.api.schema.completions import COMPLETION_DECODER, CompletionRequest
from engine.api.streams import OpenStreams, UsageBody, open_streams
from engine.core.errors import RequestError
from engine.grammar import grammar_of

_encode = msgspec.json.Encoder().encode
_NO_PROMPT_LOGPROBS = " (0 would ask for log-probabilities of the prompt, which are not implemented)"

Prompt = str | tuple[int, ...]


class ChoiceBody(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class CompletionBody(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody
    object: str = "text_completion"
    system_fingerprint: None = None


async def completions(context: ApiContext, call: Call) -> None:
    request = decode(call.body, COMPLETION_DECODER)
    check_model(context, request.model)
    prompts = _check(request, context)
    constraint = constraint_of(request.response_format, request.structured_outputs, context.config)
    with naming(grammar_names(request)):
        grammar = None if constraint is None else await in_thread(lambda: grammar_of(constraint))
        generations = [await _generation(request, context, call, prompt, grammar) for prompt in prompts]
        echoed = [_echoed(context, prompt) if request.echo else "" for prompt in prompts]
        async with open_streams(context.engine, call, generations) as streams:
            choices = [
                _Choice(context, generation, text)
                for generation, text in zip(generations, echoed, strict=True)
                for _ in range(generation.n)
            ]
            if request.stream:
                await _stream(call, request, streams, choices)
            else:
                await call.send_json(await _collect(call, request, streams, choices))


def _check(request: CompletionRequest, context: ApiContext) -> list[Prompt]:
    request.check_common()
    check_max_tokens("max_tokens", request.max_tokens, _NO_PROMPT_LOGPROBS)
    check_number("n", request.n, 1, context.config.max_samples)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise not_implemented("best_of", f" but with the value of n, {n}")
    check_top_logprobs("logprobs", request.logprobs)
    if request.echo and request.logprobs is not None:
        raise not_implemented("echo", " together with logprobs: log-probabilities of the prompt")
    prompts = _prompts(request.prompt)
    if not 1 <= len(prompts) <= context.config.max_prompts:
        raise RequestError(f"prompt has {len(prompts)} prompts; allowed: 1 to {context.config.max_prompts}", param="prompt")
    limit = context.info.max_running_requests + context.info.max_waiting_requests
    if len(prompts) * n > limit:
        raise RequestError(f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} choices; allowed: at most {limit}", param="prompt")
    return prompts


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes texts, token ids and lists; allowed: entries of one kind", param="prompt")
    if kinds == {int}:
        return [tuple(entry for entry in prompt if isinstance(entry, int))]
    return [entry if isinstance(entry, str) else tuple(entry) for entry in prompt if not isinstance(entry, int)]


async def _generation(request: CompletionRequest, context: ApiContext, call: Call, prompt: Prompt, grammar: str | None) -> Generation:
    if isinstance(prompt, str):
        prompt = await context.engine.tokenise(prompt, add_special_tokens=request.add_special_tokens is not False)
    length = context.engine.context_length
    return generation_of(
        request,
        context,
        call,
        prompt,
        n=request.n,
        max_tokens=max_tokens_of("max_tokens", request.max_tokens, len(prompt), length, prompt_name="prompt"),
        logprobs=request.logprobs,
        grammar=grammar,
    )


def _echoed(context: ApiContext, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("echo of token ids needs a tokenizer, and the model has none", param="echo")
    return tokenizer.decode(prompt, skip_special_tokens=False)


class _Choice:
    """One choice's text before its first token (an echo), its log-probabilities, its end."""

    def __init__(self, context: ApiContext, generation: Generation, echo: str) -> None:
        self.echo = echo
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._num_top = generation.params.logprobs
        self._offsets: CompletionOffsets | None = None
        if self._num_top is not None:
            self._offsets = CompletionOffsets(
                context.engine.tokenizer,
                generation.prompt if isinstance(generation.prompt, tuple) else (),
                skip_special_tokens=generation.skip_special_tokens,
                first_offset=len(echo),
            )

    def push(self, output: Output, streams: OpenStreams) -> tuple[str, CompletionLogprobs | None]:
        """The text and log-probabilities of an output. Sets ``finish_reason`` with the last one."""
        streams.count(output)
        logprobs = None
        if self._offsets is not None and self._num_top is not None:
            logprobs = self._offsets.entries(output.token_ids, output.logprobs, self._num_top)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return output.text, logprobs


async def _collect(call: Call, request: CompletionRequest, streams: OpenStreams, choices: Sequence[_Choice]) -> CompletionBody:
    texts: list[list[str]] = [[choice.echo] for choice in choices]
    logprobs: list[list[CompletionLogprobs]] = [[] for _ in choices]
    while batch := await streams.read():
        for index, output in batch:
            text, values = choices[index].push(output, streams)
            texts[index].append(text)
            if values is not None:
                logprobs[index].append(values)
    bodies = [
        ChoiceBody(
            index,
            "".join(texts[index]),
            None if request.logprobs is None else join(logprobs[index]),
            choice.finish_reason,
            choice.stop_reason,
        )
        for index, choice in enumerate(choices)
    ]
    return CompletionBody(f"cmpl-{call.id}", int(time.time()), request.model, bodies, streams.usage())


async def _stream(call: Call, request: CompletionRequest, streams: OpenStreams, choices: Sequence[_Choice]) -> None:
    options = request.stream_options or StreamOptions()
    chunks = _Chunks(call.id, request.model, streams, options, len(choices))
    writer = call.events()
    echoes = [choice.echo for choice in choices]
    while batch := await streams.read():
        frames: list[bytes] = []
        for index, output in batch:
            choice = choices[index]
            text, logprobs = choice.push(output, streams)
            if echoes[index]:
                frames.append(chunks.text(index, echoes[index], None))
                echoes[index] = ""
            if text:
                frames.append(chunks.text(index, text, logprobs))
                logprobs = None
            if choice.finish_reason is not None:
                frames.append(chunks.finish(index, choice, logprobs))
        if frames:
            await writer.write(b"".join(frames))
    await writer.write((chunks.usage() if options.include_usage else b"") + DONE_FRAME)
    await writer.end()


class _Chunks:
    """Chunks as bytes; what is the same in all of them is encoded once."""

    def __init__(self, call_id: str, model: str, streams: OpenStreams, options: StreamOptions, num_choices: int) -> None:
        self._streams = streams
        self._continuous = bool(options.continuous_usage_stats)
        head = {"id": f"cmpl-{call_id}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"  # null before the chunk that has it
        self._begin = [self._head + b'{"index":%d,"text":' % index for index in range(num_choices)]

    def text(self, index: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        values = b"null" if logprobs is None else _encode(logprobs)
        return self._begin[index] + _encode(text) + b',"logprobs":' + values + b',"finish_reason":null}]' + self._end()

    def finish(self, index: int, choice: _Choice, logprobs: CompletionLogprobs | None) -> bytes:
        """``logprobs``: of tokens without text."""
        values = {
            "logprobs": logprobs if logprobs is not None and logprobs.tokens else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return self._begin[index] + b'"",' + _encode(values)[1:] + b"]" + self._end()

    def usage(self) -> bytes:
        return self._head + b"]" + self._usage_field()

    def _end(self) -> bytes:
        return self._usage_field() if self._continuous else self._tail

    def _usage_field(self) -> bytes:
        return b',"usage":' + _encode(self._streams.usage()) + b"}\n\n"
