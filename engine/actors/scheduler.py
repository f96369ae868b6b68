"""The scheduler actor: owns the core's Scheduler and the clock, and turns the three verbs plan, execute, commit into a loop.

One task does everything between two results (read the mailbox, plan, encode, send, commit, make text, publish): a hop to
another task would cost more than most of these steps. It awaits workers and its own mailbox, never a client.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, assert_never

import trio

from engine.actors.cache import CacheManager
from engine.actors.messages import Abort, Forget, Prepare, Rebalance, Record, Register, SchedulerMessage, Submit
from engine.actors.stream import RequestStream
from engine.actors.worker_group import WorkerGroup
from engine.core.errors import CapacityError, GenerationError, InvariantError, RequestError, TwinferError
from engine.core.events import Admitted, DriftAlarm, Event, Finished, Rejected, TokensEmitted
from engine.core.expert_balance import ExpertBalancer
from engine.core.plan import RequestId, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.shadow import Shadow, drift_text

# Overlap: one plan runs, the next one waits at the worker. More would only make decisions older.
MAX_PLANS_IN_FLIGHT = 2
# Grammars announced while one step runs. They are hints: the oldest is dropped.
_MAX_HINTS = 64

_log = logging.getLogger("twinfer.shadow")


class Observer(Protocol):
    """Sees everything the scheduler decides, as it happens: the event log, the trace recorder, the shadowing twin.

    Called in the scheduler's task, between steps: to be quick, and not to raise.
    """

    def planned(self, plan: StepPlan, now_s: float) -> None:
        """Before the plan is sent."""
        ...

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None: ...

    def events(self, events: Sequence[Event]) -> None: ...


class _Record:
    """What the actor keeps of a sample until its Finished: where its outputs go, and what a worker must be told of it."""

    __slots__ = ("data_rank", "request", "seed", "stream")

    def __init__(self, request: Request, seed: int, stream: RequestStream) -> None:
        self.request = request
        self.seed = seed
        self.stream = stream
        self.data_rank: int | None = None  # where it is registered


class SchedulerActor:
    """``tell`` is its mailbox, ``serve`` its life with one generation of workers."""

    def __init__(
        self,
        make_core: Callable[[], Scheduler],
        cache: CacheManager,
        max_requests: int,
        observers: Sequence[Observer] = (),
        *,
        report_steps: int = 0,
        make_balancer: Callable[[], ExpertBalancer | None] = lambda: None,
        shadow: Shadow | None = None,
        timed_steps: int = 0,
    ) -> None:
        """Every ``report_steps`` (0: never) the workers tell what they have counted; a balancer may then have experts moved. A ``shadow``
        prices each plan; every ``timed_steps`` (0: never) the workers time the step's components for it."""
        self._make_core = make_core
        self._cache = cache
        self._observers = tuple(observers)
        # Every sample may be submitted and aborted while one long step runs, and the gateway admits max_requests of them; a recording is
        # begun once.
        self._mailbox: deque[SchedulerMessage] = deque()
        self._max_messages = 2 * max_requests + 1
        self._hints: deque[Prepare] = deque(maxlen=_MAX_HINTS)
        self._sleeper: trio.lowlevel.Task | None = None
        self._records: dict[RequestId, _Record] = {}
        self._num_submitted = 0  # samples in the mailbox
        self._waiting = True
        self._turn_s = 0.0  # when its present turn began
        self.num_steps = 0  # committed by this generation
        self.num_rebalances = 0  # expert placements taken up
        self._make_balancer = make_balancer
        self._balancer: ExpertBalancer | None = None
        self._report_steps = report_steps
        self.shadow = shadow
        self._timed_steps = timed_steps if shadow is not None else 0
        self.core = make_core()
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_requests(self) -> int:
        """Samples that are not finished, those in the mailbox included."""
        return len(self._records) + self._num_submitted

    @property
    def mailbox_depth(self) -> int:
        return len(self._mailbox)

    @property
    def heartbeat_age_s(self) -> float:
        """0 while it waits for a result or has nothing to do; else how long its present turn has taken."""
        idle = self._waiting and (bool(self._in_flight) or not self._mailbox)
        return 0.0 if idle else trio.current_time() - self._turn_s

    def tell(self, message: SchedulerMessage) -> None:
        """Leave a message; it is read before the next plan. The bound can only be passed by a caller that ignores max_requests."""
        if len(self._mailbox) >= self._max_messages:
            raise InvariantError(f"the scheduler's mailbox is full: {self._max_messages} messages")
        self._mailbox.append(message)
        if isinstance(message, Submit):
            self._num_submitted += len(message.seeds)
        self._wake()

    def prepare(self, grammar: str) -> None:
        """Have the workers compile a grammar that a request may bring; at once where they have nothing else to do."""
        self._hints.append(Prepare(grammar))
        self._wake()

    def reset(self) -> None:
        """Begin anew with empty caches, for a new generation of workers."""
        if self._records or self._in_flight:
            raise InvariantError("a scheduler is reset while it has requests")
        self.core = self._make_core()
        self._balancer = self._make_balancer()  # new workers begin with the first placements
        if self.shadow is not None:
            self.shadow.reset()
        self.num_steps = 0

    async def serve(self, workers: WorkerGroup) -> NoReturn:
        """Drive the workers until cancelled. Raises WorkerError where one fails; the requests are then ended by ``fail_all``."""
        self._turned()
        while True:
            while self._hints:
                await workers.send_all(self._hints.popleft())
            self._read_mailbox(workers)
            while len(self._in_flight) < MAX_PLANS_IN_FLIGHT and await self._dispatch(workers):
                pass
            if not self._in_flight:
                self._waiting = True
                await self._sleep()
                self._turned()
                continue
            plan = self._in_flight[0]
            self._waiting = True
            result = await workers.receive_result(plan)
            self._turned()
            self._in_flight.popleft()
            now_s = trio.current_time()
            events = self.core.commit(plan, result, now_s)
            self.num_steps += 1
            self._cache.complete(plan.step, now_s)
            for observer in self._observers:
                observer.committed(plan, result, now_s)
            self._note(events)
            if self.shadow is not None:
                self._compare(self.shadow, plan, result, now_s)
            if result.counters is not None and self._balancer is not None:
                await self._rebalance(self._balancer, result.counters.expert_choices, workers)
            # Text is made while the worker computes: after the next plan, where it has nothing to do until then.
            if not self._in_flight:
                self._read_mailbox(workers)
                await self._dispatch(workers)
            self._deliver(events, workers)

    def fail_all(self, error: TwinferError) -> None:
        """End every request with ``error`` and take all blocks back."""
        now_s = trio.current_time()
        while self._mailbox:
            message = self._mailbox.popleft()
            if isinstance(message, Submit):
                message.stream.fail(error)
        self._num_submitted = 0
        for record in self._records.values():
            record.stream.fail(error)
        self._in_flight.clear()
        events = self.core.fail_all(str(error), now_s)
        self._note(events)
        self._records.clear()
        self.core.check()

    def abort_all(self, error: TwinferError) -> None:
        """End every request with ``error`` at its client now; the next turn of the loop frees what they hold."""
        for message in self._mailbox:
            if isinstance(message, Submit):
                message.stream.fail(error)
        for sample_id, record in self._records.items():
            record.stream.fail(error)
            if len(self._mailbox) < self._max_messages:
                self.tell(Abort(sample_id))

    def _turned(self) -> None:
        self._waiting = False
        self._turn_s = trio.current_time()

    async def _rebalance(self, balancer: ExpertBalancer, counts: Sequence[Sequence[int]], workers: WorkerGroup) -> None:
        """No step is lost: plans under way are executed before, the next one after."""
        balancer.add(counts)
        maps = balancer.propose()
        if maps is not None:
            await workers.send_all(Rebalance(maps))
            self.num_rebalances += 1

    # -- parts of the loop ----------------------------------------------------------------------------------------------------

    def _read_mailbox(self, workers: WorkerGroup) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            match message:
                case Submit(seeds=seeds):
                    self._num_submitted -= len(seeds)
                    self._submit(message, workers)
                case Abort(request=sample_id):
                    if sample_id in self._records:
                        self._publish(self.core.abort(sample_id, trio.current_time()), workers)
                case Record():
                    workers.queue_all(message)  # they leave with the next plan: all ranks begin with the same step
                case _:
                    assert_never(message)

    def _submit(self, message: Submit, workers: WorkerGroup) -> None:
        request, stream = message.request, message.stream
        if stream.ended:  # its client left before we looked
            return
        for sample_id, seed in zip(request.sample_ids or (request.id,), message.seeds, strict=True):
            self._records[sample_id] = _Record(request, seed, stream)
        try:
            events = self.core.submit(request, message.arrived_s)
        except (RequestError, CapacityError) as error:
            self._note(self.core.take_events())
            self._refuse(request, error)
            return
        self._publish(events, workers)

    async def _dispatch(self, workers: WorkerGroup) -> bool:
        """Make and send one plan; false where the core has none (nothing to do, or what comes next depends on a result)."""
        now_s = trio.current_time()
        plan = self.core.plan(now_s)
        if plan is None:
            return False
        self._in_flight.append(plan)
        for rank, rank_plan in enumerate(plan.ranks):
            for start in rank_plan.starts:
                record = self._records[start.request]
                if record.data_rank is None:
                    record.data_rank = rank
                    request = record.request
                    workers.queue(rank, Register(start.request, tuple(request.prompt), request.params, record.seed))
        self._cache.begin(plan)
        for observer in self._observers:
            observer.planned(plan, now_s)
        await workers.send_plan(
            plan,
            report_counters=bool(self._report_steps) and plan.step % self._report_steps == 0,
            time_components=bool(self._timed_steps) and plan.step % self._timed_steps == self._timed_steps - 1,
        )
        if self.shadow is not None:
            # While the worker computes: a price is of the plan alone, and stands in the log before anybody has looked for the result.
            self._note((self.shadow.price(plan, now_s, trio.current_time()),))
        return True

    def _compare(self, shadow: Shadow, plan: StepPlan, result: StepResult, now_s: float) -> None:
        events = shadow.compare(plan, result, now_s)
        self.core.price_factor = shadow.correction
        for event in events:
            if isinstance(event, DriftAlarm):
                _log.warning("%s", drift_text(event))
        self._note(events)

    def _publish(self, events: Sequence[Event], workers: WorkerGroup) -> None:
        self._note(events)
        self._deliver(events, workers)

    def _deliver(self, events: Sequence[Event], workers: WorkerGroup) -> None:
        """Hand events to the streams they concern. A commit's tokens and end of one sample come side by side."""
        finished = {event.request: event for event in events if isinstance(event, Finished)}
        for event in events:
            match event:
                case TokensEmitted(request=sample_id):
                    self._publish_tokens(sample_id, event, finished.pop(sample_id, None), workers)
                case Admitted(request=sample_id, num_cached_tokens=num_cached_tokens):
                    if (record := self._records.get(sample_id)) is not None and sample_id == record.request.id:
                        record.stream.cached_tokens = num_cached_tokens
                case Rejected(request=sample_id, code=code, message=message):
                    if (record := self._records.get(sample_id)) is not None:
                        self._refuse(record.request, CapacityError(message) if code == "queue_full" else RequestError(message, code=code))
                case _:
                    pass  # the rest is for the log
        for sample_id, end in finished.items():
            self._publish_tokens(sample_id, None, end, workers)

    def _publish_tokens(self, sample_id: RequestId, emitted: TokensEmitted | None, end: Finished | None, workers: WorkerGroup) -> None:
        record = self._records.get(sample_id)
        if record is None:  # its stop string was found in an earlier step, or its client left
            return
        tokens = emitted.tokens if emitted is not None else ()
        logprobs = emitted.logprobs if emitted is not None else ()
        stopped = failed = False
        if end is None:
            stopped = record.stream.push(sample_id, tokens, logprobs, None)
            failed = record.stream.ended and not stopped  # dropped as too slow
        elif end.reason == "error":
            record.stream.fail(GenerationError(end.message))
            failed = True
        else:
            own = record.request.params.stop_token_ids
            record.stream.push(
                sample_id,
                tokens,
                logprobs,
                end.reason,
                end.stop_token if end.stop_token in own else None,
                last_is_silent=end.stop_token is not None,
            )
        if end is not None:
            self._drop(sample_id, record, workers)
        if stopped:
            self._publish(self.core.stop(sample_id, trio.current_time()), workers)
        elif failed:  # a stream's samples end together then
            for open_id in record.request.sample_ids or (record.request.id,):
                if open_id in self._records:
                    self._publish(self.core.abort(open_id, trio.current_time()), workers)

    def _drop(self, sample_id: RequestId, record: _Record, workers: WorkerGroup) -> None:
        del self._records[sample_id]
        if record.data_rank is not None:
            workers.queue(record.data_rank, Forget(sample_id))

    def _refuse(self, request: Request, error: TwinferError) -> None:
        """The core does not take the request: none of its samples has begun."""
        for sample_id in request.sample_ids or (request.id,):
            record = self._records.pop(sample_id, None)
            if record is not None:
                record.stream.fail(error)

    def _note(self, events: Sequence[Event]) -> None:
        if events:
            for observer in self._observers:
                observer.events(events)

    def _wake(self) -> None:
        if self._sleeper is not None:
            trio.lowlevel.reschedule(self._sleeper)
            self._sleeper = None

    async def _sleep(self) -> None:
        """Until somebody writes; not at all where something has come since the caller looked."""
        if self._mailbox or self._hints:
            await trio.lowlevel.checkpoint()
            return
        self._sleeper = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
