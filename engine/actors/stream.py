"""One request's way back to its client: tokens in, typed outputs out, without the engine ever waiting.

The scheduler's task pushes (synchronously: text is made and stop strings are found right there, so that a stop is known
before the next plan); the client's task reads. Between them is a bounded buffer; a reader that lets it fill is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
import trio

from engine.core.errors import CapacityError, TwinferError
from engine.core.plan import RequestId, TokenLogprobs
from engine.detokenize import Decoder, StopMatcher

FinishReason = Literal["stop", "length", "abort"]


class Usage(msgspec.Struct, frozen=True):
    """Token counts. ``cached_tokens`` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Output(msgspec.Struct, frozen=True):
    """A piece of one sample. ``text`` is empty only in a last piece (or without a tokenizer); tokens come with the text they complete.

    ``stop_reason`` is the stop string or stop token that ended the sample, None for the model's own end of text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None


class Sample:
    """One of a request's n samples: its text so far, and the tokens whose text is not out yet."""

    __slots__ = ("decoder", "finished", "id", "index", "matcher", "min_tokens", "num_tokens", "pending_ids", "pending_logprobs")

    def __init__(self, sample_id: RequestId, index: int, decoder: Decoder | None, matcher: StopMatcher, min_tokens: int) -> None:
        self.id = sample_id
        self.index = index
        self.decoder = decoder
        self.matcher = matcher
        self.min_tokens = min_tokens
        self.num_tokens = 0
        self.pending_ids: list[int] = []
        self.pending_logprobs: list[TokenLogprobs] = []
        self.finished = False

    def push(self, token: int, logprobs: TokenLogprobs | None, *, silent: bool) -> str:
        """The text that may be shown after this token; ``silent`` tokens (the one that ended the sample) have none."""
        self.num_tokens += 1
        self.pending_ids.append(token)
        if logprobs is not None:
            self.pending_logprobs.append(logprobs)
        if self.decoder is None or silent:
            return ""
        # Always asked, also for no text: where min_tokens is just reached, later text may stop.
        return self.matcher.push(self.decoder.push(token), may_stop=self.num_tokens > self.min_tokens)

    def flush(self) -> str:
        if self.decoder is None or self.matcher.matched is not None:
            return ""
        # What the decoder still held may itself complete a stop string.
        return self.matcher.push(self.decoder.flush()) + self.matcher.flush()

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        taken = tuple(self.pending_ids), tuple(self.pending_logprobs)
        self.pending_ids.clear()
        self.pending_logprobs.clear()
        return taken


class RequestStream:
    """The reader's side is ``async for output in stream``; one task reads. Ends when all samples have, or raises what ended it."""

    def __init__(self, samples: Sequence[Sample], num_prompt_tokens: int, seed: int, max_buffered_outputs: int) -> None:
        self.samples = tuple(samples)
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed  # as given, or as drawn: the request can be repeated with it
        self.cached_tokens = 0
        self._by_id = {sample.id: sample for sample in self.samples}
        self._num_open = len(self.samples)
        self._buffer: deque[Output] = deque()
        self._max_buffered_outputs = max_buffered_outputs
        self._error: TwinferError | None = None
        self._reader: trio.lowlevel.Task | None = None

    # -- reading --------------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Output:
        """The next output. No checkpoint while outputs are waiting: there is a bounded number of them."""
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                raise StopAsyncIteration
            await self._wait()
        return self._buffer.popleft()

    async def read(self) -> list[Output]:
        """All outputs that are waiting, at least one; empty once every sample has ended. Raises what ended the stream.

        What came while the reader was busy (with a slow client) is handed over in one go.
        """
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return []
            await self._wait()
        outputs = list(self._buffer)
        self._buffer.clear()
        return outputs

    @property
    def usage(self) -> Usage:
        """All samples together, so far."""
        completion = sum(sample.num_tokens for sample in self.samples)
        return Usage(self.num_prompt_tokens, completion, self.cached_tokens)

    @property
    def ended(self) -> bool:
        return self._num_open == 0

    def open_ids(self) -> list[RequestId]:
        """Samples that the scheduler may still be working on."""
        return [sample.id for sample in self.samples if not sample.finished]

    # -- writing (the scheduler's task) ---------------------------------------------------------------------------------------

    def push(self, sample_id: RequestId, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: FinishReason | None,
             stop_token: int | None = None, *, last_is_silent: bool = False) -> bool:  # fmt: skip
        """Publish new tokens of a sample and, with ``finish``, its end. True where a stop string ended it just now.

        ``stop_token`` is what the client is told ended it; ``last_is_silent`` keeps the last token (an end of text) out of the text.
        """
        sample = self._by_id[sample_id]
        if sample.finished:
            return False
        shown: list[str] = []
        for position, token in enumerate(tokens):
            silent = last_is_silent and position == len(tokens) - 1
            shown.append(sample.push(token, logprobs[position] if logprobs else None, silent=silent))
            if sample.matcher.matched is not None:
                self._finish(sample, "".join(shown), "stop", sample.matcher.matched)
                return True
        if finish is not None:
            shown.append(sample.flush())
            if sample.matcher.matched is not None:
                finish, stop_reason = "stop", sample.matcher.matched
                self._finish(sample, "".join(shown), finish, stop_reason)
            else:
                self._finish(sample, "".join(shown), finish, stop_token)
            return False
        text = "".join(shown)
        if text or (sample.decoder is None and tokens):
            self._append(Output(sample.index, text, *sample.take()))
        return False

    def fail(self, error: TwinferError) -> None:
        """End every open sample with ``error``; what is buffered is read first."""
        if self._num_open == 0:
            return
        for sample in self.samples:
            sample.finished = True
        self._num_open = 0
        self._error = error
        self._wake()

    def close(self) -> list[RequestId]:
        """The reader leaves: what still comes goes nowhere. Returns the samples that somebody has to abort."""
        open_ids = self.open_ids()
        self.fail(CapacityError("the reader has left"))
        self._buffer.clear()
        return open_ids

    def _finish(self, sample: Sample, text: str, reason: FinishReason, stop_reason: str | int | None) -> None:
        sample.finished = True
        self._num_open -= 1
        usage = Usage(self.num_prompt_tokens, sample.num_tokens, self.cached_tokens)
        token_ids, logprobs = sample.take()
        self._append(Output(sample.index, text, token_ids, logprobs, reason, stop_reason, usage))

    def _append(self, output: Output) -> None:
        # Last pieces always fit: there is one a sample, and they are what ends the reader.
        if output.finish_reason is None and len(self._buffer) >= self._max_buffered_outputs:
            self.fail(CapacityError(f"the reader fell {self._max_buffered_outputs} outputs behind and was dropped"))
            return
        self._buffer.append(output)
        self._wake()

    async def _wait(self) -> None:
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None
