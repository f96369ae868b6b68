"""From the gateway's streams to one writer: admission of all or none, reading without starving, counting what was shown."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
import trio

from engine.actors.gateway import Gateway, Generation
from engine.actors.stream import Output, RequestStream
from engine.api.call import Call
from engine.api.errors import ApiError
from engine.core.errors import TwinferError

# Of one of several streams: what it has, by prompt, or what ended it.
_Item = tuple[int, list[Output]] | TwinferError


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """``usage`` of chat and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class OpenStreams:
    """The streams of one HTTP request. ``read`` gives what has come: (choice, output), choices counted over prompts and samples."""

    def __init__(self, streams: Sequence[RequestStream], n: int) -> None:
        self.streams = tuple(streams)
        self._n = n
        self._receive: trio.MemoryReceiveChannel[_Item] | None = None
        self._failure: TwinferError | None = None
        # Of the outputs shown so far: a count never runs ahead of the text beside it.
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0

    async def read(self) -> list[tuple[int, Output]]:
        """All outputs that are waiting; empty once every choice has ended. Raises what ends a stream early."""
        if self._receive is None:
            return [(output.index, output) for output in await self.streams[0].read()]
        if self._failure is not None:
            raise self._failure
        batch: list[tuple[int, Output]] = []
        with contextlib.suppress(trio.EndOfChannel, trio.WouldBlock):
            item = await self._receive.receive()
            # A pump waits until its outputs are taken: in one round every stream has its turn.
            for turn in range(len(self.streams)):
                if turn:
                    item = self._receive.receive_nowait()
                if isinstance(item, TwinferError):
                    self._failure = item
                    break
                prompt, outputs = item
                batch.extend((prompt * self._n + output.index, output) for output in outputs)
        if self._failure is not None and not batch:
            raise self._failure
        return batch

    def usage(self, *, has_reasoning: bool = False) -> UsageBody:
        prompt = sum(stream.num_prompt_tokens for stream in self.streams)
        cached = sum(stream.cached_tokens for stream in self.streams)
        completion = self.num_completion_tokens
        details = CompletionDetails(self.num_reasoning_tokens) if has_reasoning else None
        return UsageBody(prompt, completion, prompt + completion, PromptDetails(cached), details)

    def count(self, output: Output, *, reasoning: bool = False) -> None:
        """Every output passes here when it is shown. Raises ApiError for one that the engine gave up."""
        self.num_completion_tokens += len(output.token_ids)
        if reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        if output.finish_reason == "abort":
            raise ApiError(500, "the engine gave this request up", type="server_error", code="aborted")

    @contextlib.asynccontextmanager
    async def merged(self) -> AsyncIterator[None]:
        """Several streams are read by a task each."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            send, self._receive = trio.open_memory_channel[_Item](0)
            async with send:
                for prompt in range(len(self.streams)):
                    nursery.start_soon(self._pump, prompt, send.clone())
            try:
                yield
            except Exception as error:  # past the nursery bare, not in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _pump(self, prompt: int, send: trio.MemorySendChannel[_Item]) -> None:
        """Hand over what one of several streams has, when it is taken; meanwhile the stream's own bounded buffer fills."""
        async with send:
            try:
                while outputs := await self.streams[prompt].read():
                    await send.send((prompt, outputs))
            except TwinferError as error:
                await send.send(error)


@contextlib.asynccontextmanager
async def open_streams(engine: Gateway, call: Call, generations: Sequence[Generation]) -> AsyncIterator[OpenStreams]:
    """Admit all of them or none; leaving the context ends all of them. The generations' ``n`` is the same."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(engine.generate(generation)) for generation in generations]
        opened = OpenStreams(streams, generations[0].n)
        if len(streams) > 1:
            await stack.enter_async_context(opened.merged())
        try:
            yield opened
        finally:
            usage = opened.usage()
            call.notes |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
