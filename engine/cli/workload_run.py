"""A workload through the real engine: every request at its time, through the gateway, as its clients would send it.

Answers are as long as the workload says: end-of-text tokens are passed over, and ``max_tokens`` is the true length. That a policy does not
see, in the engine or in the simulator, is how the length came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from engine.core.driver_log import DriverLog
from engine.core.errors import CapacityError, ConfigError, StoppedError
from engine.core.plan import RequestId
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from engine.actors.gateway import Gateway
    from engine.core.specs import ModelSpec
    from engine.launch import Launch
    from engine.options import Resolved

WARM_UP_TOKENS, WARM_UP_PROMPT_TOKENS = 8, 48


class TimedRequest(Protocol):
    """One request as its client knows it; ``twin.workload`` makes them."""

    @property
    def index(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def cancel_after_s(self) -> float | None: ...


class TimedWorkload(Protocol):
    """Requests that come by themselves, and what the end of one brings."""

    def arrivals(self) -> Iterator[TimedRequest]: ...

    def follow_up(self, request: Any, end_s: float) -> TimedRequest | None:
        """``request`` is one of its own."""
        ...


@dataclass(slots=True)
class WorkloadRun:
    """One workload in an engine. Times of the log are the engine's clock; the workload's 0 is ``begin_s``. Steps and events are those from
    the first index up to the last, exclusive."""

    begin_s: float
    first_step: int
    first_event: int
    last_step: int = 0
    last_event: int = 0
    requests: dict[RequestId, TimedRequest] = field(default_factory=dict)
    num_refused: int = 0


class EngineSession:
    """An open engine that runs workloads one after the other; the log of all it did, and the requests it was given."""

    def __init__(self, engine: Gateway, log: DriverLog, requests: dict[RequestId, Request]) -> None:
        self._engine, self.log, self.requests = engine, log, requests
        self._num_runs = 0

    async def run(self, workload: TimedWorkload) -> WorkloadRun:
        """To its last answer. The prefix cache is the run's own."""
        log = self.log
        self._num_runs += 1
        run = WorkloadRun(trio.current_time(), len(log.plans), len(log.log))
        async with trio.open_nursery() as nursery:
            for request in workload.arrivals():
                await trio.sleep_until(run.begin_s + request.arrival_s)
                nursery.start_soon(self._client, workload, request, run, nursery)
        await self._settle()
        run.last_step, run.last_event = len(log.plans), len(log.log)
        return run

    async def warm_up(self, num_ranks: int) -> None:
        """A few steps: caches, threads and allocators are then as in service."""

        async def one(number: int) -> None:
            prompt = tuple((number + index) % self._engine.vocab_size for index in range(WARM_UP_PROMPT_TOKENS))
            await self._answer(prompt, WARM_UP_TOKENS, 0, "warm-up")

        async with trio.open_nursery() as nursery:
            for number in range(2 * num_ranks):
                nursery.start_soon(one, number)
        await self._settle()

    async def _settle(self) -> None:
        """The last answer is out a moment before the scheduler has forgotten its request, and a plan may still be under way."""
        while self._engine.num_requests or len(self.log.committed_s) < len(self.log.plans):
            await trio.sleep(0.001)

    async def _client(self, workload: TimedWorkload, request: TimedRequest, run: WorkloadRun, nursery: trio.Nursery) -> None:
        limit_s = float("inf") if request.cancel_after_s is None else request.cancel_after_s
        salt = f"{self._num_runs}:{request.cache_salt or ''}"
        with trio.move_on_after(limit_s):
            try:
                await self._answer(
                    tuple(request.prompt), request.output_tokens, request.priority, salt,
                    admitted=lambda number: run.requests.__setitem__(number, request),
                )  # fmt: skip
            except CapacityError:
                if not self._engine.health.ok:
                    raise
                run.num_refused += 1
        following = workload.follow_up(request, trio.current_time() - run.begin_s)
        if following is not None:
            await trio.sleep_until(run.begin_s + following.arrival_s)
            nursery.start_soon(self._client, workload, following, run, nursery)

    async def _answer(
        self, prompt: tuple[int, ...], output_tokens: int, priority: int, salt: str, admitted: Callable[[RequestId], None] | None = None
    ) -> None:
        from engine.actors.gateway import Generation

        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        async with self._engine.generate(Generation(prompt=prompt, params=params, priority=priority, cache_salt=salt)) as stream:
            number = stream.samples[0].id
            self.requests[number] = Request(number, prompt, params, priority=priority, cache_salt=salt)
            if admitted is not None:
                admitted(number)
            async for _ in stream:
                pass


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """All that an engine did from its start to its end."""

    log: DriverLog
    requests: dict[RequestId, Request]
    core_config: SchedulerConfig  # as its scheduler had it


def run_workloads(
    launch: Launch, workloads: Sequence[Callable[[], TimedWorkload]], done: Callable[[SessionRecord, WorkloadRun], None]
) -> SessionRecord:
    """Open an engine and run ``workloads``, each made just before it runs: what makes it may take its time, the engine is idle then.
    ``done`` hears of each at its end. Raises StoppedError after a stop signal, and what opening an engine raises."""
    return trio.run(_run_workloads, launch, workloads, done)


async def _run_workloads(
    launch: Launch, workloads: Sequence[Callable[[], TimedWorkload]], done: Callable[[SessionRecord, WorkloadRun], None]
) -> SessionRecord:
    from engine.actors.supervisor import open_engine

    log = DriverLog()
    record = SessionRecord(log, {}, msgspec.structs.replace(launch.config.scheduler, max_waiting=launch.config.max_requests))
    engine: Gateway | None = None
    try:
        async with open_engine(launch.config, None, handle_signals=True, observers=(log,)) as engine:
            session = EngineSession(engine, log, record.requests)
            await session.warm_up(launch.config.scheduler.num_ranks)
            for make in workloads:
                workload = await trio.to_thread.run_sync(make)
                run = await session.run(workload)
                await trio.to_thread.run_sync(done, record, run)
    except (CapacityError, BaseExceptionGroup):
        if engine is None or engine.stop_signal is None:
            raise
    if engine.stop_signal is not None:  # half a comparison is none
        raise StoppedError(128 + engine.stop_signal)
    return record


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine that is ready to be opened, for who must not start actors itself."""

    launch: Launch

    @property
    def spec(self) -> ModelSpec:
        return self.launch.spec

    @property
    def scheduler(self) -> SchedulerConfig:
        return self.launch.config.scheduler

    @property
    def max_requests(self) -> int:
        return self.launch.config.max_requests

    @property
    def layout(self) -> str:
        return self.launch.config.workers[0].layout

    @property
    def dtype(self) -> str:
        return self.launch.config.workers[0].dtype

    def run(self, workloads: Sequence[Callable[[], TimedWorkload]], done: Callable[[SessionRecord, WorkloadRun], None]) -> SessionRecord:
        return run_workloads(self.launch, workloads, done)


def plan_engine(model: str, options: Resolved) -> PlannedEngine:
    """Raises ConfigError for what cannot work, before anything is loaded."""
    from engine.launch import open_model, plan_launch

    if options["nnodes"] > 1:
        raise ConfigError(f"--nnodes is {options['nnodes']}: a workload runs on one machine here")
    return PlannedEngine(plan_launch(options, open_model(model).spec, model))
