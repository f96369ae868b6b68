"""The gateway: where requests enter and outputs leave. Checks, tokenises, bounds, hands over to the scheduler, aborts for who leaves.

It is the handle that ``open_engine`` gives to the command line and the server:

    async with engine.generate(Generation(prompt="Once", params=SamplingParams(max_tokens=8))) as stream:
        async for output in stream:
            print(output.text, end="")
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Literal

import msgspec
import trio

from engine.actors.cache import CacheManager, CacheStats
from engine.actors.config import EngineConfig
from engine.actors.grammar_check import GrammarCheck
from engine.actors.messages import Abort, Ready, Record, Submit
from engine.actors.scheduler import SchedulerActor
from engine.actors.stream import FinishReason, RequestStream, Sample, Usage
from engine.actors.worker_group import WorkerGroup
from engine.core.errors import CapacityError, RequestError
from engine.core.plan import TokenLogprobs
from engine.core.request import Request
from engine.core.sampling import MAX_SEED, SamplingParams
from engine.core.scheduler_state import Stats
from engine.core.shadow import Shadow
from engine.detokenize import StopMatcher
from engine.tokenizer import LONG_TEXT_CHARS, Tokenizer, refuse_far_too_long

# Short prompts are tokenised in place, long ones in a thread, so that other requests' steps go on: so many at a time.
_TOKENISING_THREADS = 2
_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 1 << 31

State = Literal["starting", "ready", "draining", "restarting", "failed", "stopped"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for: a prompt (text or token ids), how to sample, when to stop."""

    prompt: str | tuple[int, ...]
    params: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None


class CompletedSample(msgspec.Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. ``seed`` repeats it."""

    samples: tuple[CompletedSample, ...]
    usage: Usage
    seed: int


class Health(msgspec.Struct, frozen=True):
    """``ready`` is the only state that takes requests; ``message`` says why another one does not."""

    state: State
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ready"


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters of this generation of workers. ``check`` of the core has been passed where ``num_requests`` is 0."""

    health: Health
    num_requests: int
    core: Stats
    cache: CacheStats


class Gateway:
    """One per engine. All methods belong to trio's thread."""

    def __init__(self, config: EngineConfig, scheduler: SchedulerActor, cache: CacheManager, tokenizer: Tokenizer | None) -> None:
        self._config = config.gateway
        self._limits = config.scheduler
        self._may_record = any(worker.record is not None for worker in config.workers)
        self._max_requests = config.max_requests
        self._scheduler = scheduler
        self._cache = cache
        self.tokenizer = tokenizer
        self.grammars = GrammarCheck(tokenizer, config.scheduler.eos_token_ids, lambda: self.vocab_size, scheduler.prepare)
        self.health = Health("starting", "the workers are loading")
        self.workers: tuple[Ready, ...] = ()  # what each said when it was ready
        self._group: WorkerGroup | None = None  # while there is one
        self.stop_signal: int | None = None  # the first one received
        self.forced = False  # running requests were cut: by a second signal, or at the end of shutdown_timeout_s
        self._tokenising = trio.CapacityLimiter(_TOKENISING_THREADS)
        self._tokenising_any = trio.CapacityLimiter(1)
        self._next_id = 0
        self._open_streams: set[RequestStream] = set()
        self._drained = trio.Event()
        self._released = trio.Event()

    # -- requests -------------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def generate(self, generation: Generation) -> AsyncIterator[RequestStream]:
        """Admit a request and give its stream; leaving the context, for whatever reason, aborts what is still running.

        Raises RequestError (with the field's name) and CapacityError here; what goes wrong later is raised by the stream.
        """
        self._validate(generation)
        self._check_open(generation)
        await self.grammars.check(generation.params)
        prompt = await self._tokenise(generation)
        self._check_prompt(prompt)
        self._check_open(generation)  # once more: a long prompt or a grammar took its time
        stream = self._submit(generation, prompt)
        self._open_streams.add(stream)
        try:
            yield stream
        finally:
            for sample_id in stream.close():
                self._scheduler.tell(Abort(sample_id))
            self._open_streams.discard(stream)
            self._released.set()
            self._released = trio.Event()

    async def complete(self, generation: Generation) -> Completion:
        """Run a request to its end. The texts are the streamed ones, joined."""
        async with self.generate(generation) as stream:
            texts: list[list[str]] = [[] for _ in stream.samples]
            tokens: list[list[int]] = [[] for _ in stream.samples]
            logprobs: list[list[TokenLogprobs]] = [[] for _ in stream.samples]
            ends: list[tuple[FinishReason, str | int | None]] = [("abort", None) for _ in stream.samples]
            async for output in stream:
                texts[output.index].append(output.text)
                tokens[output.index].extend(output.token_ids)
                logprobs[output.index].extend(output.logprobs)
                if output.finish_reason is not None:
                    ends[output.index] = (output.finish_reason, output.stop_reason)
            samples = tuple(
                CompletedSample("".join(text), tuple(ids), tuple(values), *end)
                for text, ids, values, end in zip(texts, tokens, logprobs, ends, strict=True)
            )
            return Completion(samples, stream.usage, stream.seed)

    async def tokenise(self, text: str, *, add_special_tokens: bool = True, any_length: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt. Raises RequestError for a text that is too long or not valid Unicode, and where there is no tokenizer.

        A text that is much longer than the context is refused by its beginning, unless ``any_length``.
        """
        if len(text) > self._config.max_prompt_chars:
            raise RequestError(
                f"prompt has {len(text)} characters; allowed: at most {self._config.max_prompt_chars}",
                param="prompt",
                code="context_length_exceeded",
            )
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("prompt is text, and the model has no tokenizer: give token ids", param="prompt")
        encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
        if len(text) <= LONG_TEXT_CHARS:
            return tuple(encode(text))

        def encode_checked() -> tuple[int, ...]:
            if not any_length:
                refuse_far_too_long(text, self.context_length, encode, "prompt")
            return tuple(encode(text))

        # Texts of any length take turns among themselves: prompts do not wait for them.
        limiter = self._tokenising_any if any_length else self._tokenising
        return await trio.to_thread.run_sync(encode_checked, abandon_on_cancel=True, limiter=limiter)

    @property
    def shadow(self) -> Shadow | None:
        """Where a cost model prices the steps."""
        return self._scheduler.shadow

    def begin_recording(self) -> None:
        """Have the workers record from the next step on, where they are configured to; the second call does nothing."""
        if self._may_record:
            self._may_record = False
            self._scheduler.tell(Record())

    # -- state ----------------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self.workers[0].vocab_size

    @property
    def context_length(self) -> int:
        """Tokens a request may have, prompt and output."""
        return self._limits.context_tokens

    @property
    def num_requests(self) -> int:
        """Samples not finished yet."""
        return self._scheduler.num_requests

    def stats(self) -> EngineStats:
        """Counts as of now; where the engine is idle the conservation laws are checked too, and InvariantError raised if one is broken."""
        if self.num_requests == 0 and self._scheduler.core.num_uncommitted == 0:
            self._scheduler.core.check()
        return EngineStats(self.health, self.num_requests, self._scheduler.core.stats(), self._cache.stats())

    @property
    def num_rebalances(self) -> int:
        """How often experts were moved between ranks."""
        return self._scheduler.num_rebalances

    def mailbox_depths(self) -> dict[str, int]:
        """Messages not read yet, by actor."""
        return {"scheduler": self._scheduler.mailbox_depth}

    def heartbeat_ages_s(self) -> dict[str, float]:
        """Seconds since each actor gave a sign of life, by name; no worker is in it while there are none.

        A scheduler that waits for work or for a worker's result is well: the worker's own age says more.
        """
        ages_s = {"scheduler": self._scheduler.heartbeat_age_s}
        if self._group is not None:
            ages_s |= {worker.name: worker.heartbeat_age_s for worker in self._group.workers}
        return ages_s

    @property
    def exit_code(self) -> int:
        """For the process, after a stop signal: 130 for SIGINT, 143 for a SIGTERM that had to cut requests, else 0."""
        if self.stop_signal is None:
            return 0
        interrupted = self.stop_signal == signal.SIGINT
        return 128 + self.stop_signal if interrupted or self.forced else 0

    async def wait_drained(self) -> None:
        """Return once a stop signal was received and the running requests are over: the time for a server to close."""
        await self._drained.wait()

    # -- for the supervisor ---------------------------------------------------------------------------------------------------

    def opened(self, workers: WorkerGroup) -> None:
        self.workers = workers.infos
        self._group = workers
        if self.stop_signal is None:
            self.health = Health("ready")

    def workers_gone(self) -> None:
        self._group = None

    def closed(self, state: State, message: str) -> None:
        """Admit nobody from now on; the message is what refused clients read."""
        self.health = Health(state, message)

    def drained(self) -> None:
        self._drained.set()

    async def wait_streams_released(self) -> None:
        """Until every reader has left its stream."""
        while self._open_streams:
            await self._released.wait()

    # -- admission ------------------------------------------------------------------------------------------------------------

    def _check_open(self, generation: Generation) -> None:
        if not self.health.ok:
            raise CapacityError(f"no requests are taken: {self.health.message}")
        number, limit = self._scheduler.num_requests, self._max_requests
        if number + generation.n > limit:
            raise CapacityError(f"{number} requests are running or waiting; the limit is {limit}", retry_after_s=1.0)

    def _validate(self, generation: Generation) -> None:
        config = self._config
        generation.params.validate(self.vocab_size)
        _check_int("n", generation.n, 1, min(config.max_samples, self._max_requests))
        _check_int("priority", generation.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        if generation.cache_salt is not None and not 0 < len(generation.cache_salt) <= _MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt has {len(generation.cache_salt)} characters; allowed: 1 to {_MAX_SALT_CHARS}", param="cache_salt"
            )
        if len(generation.stop) > config.max_stop_strings:
            raise RequestError(f"stop has {len(generation.stop)} strings; allowed: at most {config.max_stop_strings}", param="stop")
        for stop in generation.stop:
            if not 0 < len(stop) <= config.max_stop_chars:
                raise RequestError(f"stop has a string of {len(stop)} characters; allowed: 1 to {config.max_stop_chars}", param="stop")
        if generation.params.grammar is not None and not config.allows_grammars:
            raise RequestError("structured output is refused: the engine was started with --forced-acceptance", param="response_format")
        if generation.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer, and the model has none", param="stop")

    async def _tokenise(self, generation: Generation) -> tuple[int, ...]:
        if not isinstance(generation.prompt, str):
            return tuple(generation.prompt)
        return await self.tokenise(generation.prompt, add_special_tokens=generation.add_special_tokens)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("prompt is empty; allowed: at least one token", param="prompt")
        if len(prompt) >= self.context_length:
            raise RequestError(
                f"prompt has {len(prompt)} tokens; allowed: at most {self.context_length - 1}, one less than the context",
                param="prompt",
                code="context_length_exceeded",
            )
        highest = self.vocab_size - 1
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= highest:
                raise RequestError(f"prompt holds the token {token!r}; allowed: integers from 0 to {highest}", param="prompt")

    def _submit(self, generation: Generation, prompt: tuple[int, ...]) -> RequestStream:
        ids = tuple(range(self._next_id, self._next_id + generation.n))
        self._next_id += generation.n
        params = generation.params
        seed = params.seed if params.seed is not None else self._draw_seed(ids[0])
        samples: list[Sample] = []
        for index, sample_id in enumerate(ids):
            decoder = None
            if self.tokenizer is not None:
                decoder = self.tokenizer.decoder(prompt, skip_special_tokens=generation.skip_special_tokens)
            matcher = StopMatcher(generation.stop, include_stop=generation.include_stop)
            samples.append(Sample(sample_id, index, decoder, matcher, params.min_tokens))
        stream = RequestStream(samples, len(prompt), seed, self._config.max_buffered_outputs)
        request = Request(
            id=ids[0],
            prompt=prompt,
            params=msgspec.structs.replace(params, seed=seed),
            priority=generation.priority,
            sample_ids=ids,
            cache_salt=generation.cache_salt,
        )
        # Samples of one request differ only by their seeds.
        seeds = tuple((seed + index) % (MAX_SEED + 1) for index in range(len(ids)))
        self._scheduler.tell(Submit(request, seeds, stream, trio.current_time()))
        return stream

    def _draw_seed(self, request_id: int) -> int:
        if self._config.seed is None:
            return secrets.randbelow(MAX_SEED + 1)
        digest = hashlib.blake2b(f"{self._config.seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (MAX_SEED + 1)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value}; allowed: an integer from {low} to {high}", param=name)
