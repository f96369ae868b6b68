"""One replica on the simulated clock: the core's scheduler, driven as ``engine/actors/scheduler.py`` drives it.

The order of a turn is that actor's, since it decides which plan is the first to see a newcomer: the mailbox is read, up to two plans are
made and sent; when the older one's step ends it is committed, and only then is the mailbox read again. What comes while a step runs is thus
in the plan made at its end, which with overlap runs one step later still. A step is one event, whatever the number of its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import simpy

from engine.core.errors import CapacityError, RequestError
from engine.core.events import Event
from engine.core.plan import RequestId, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepCost, StepPrice
from twin.clock import Clock, Process, Turn
from twin.config import TransferCost
from twin.fold import MetricsFold
from twin.outcomes import Outcomes
from twin.result import KvPeak, StepTime
from twin.workload.types import SimRequest

MAX_PLANS_IN_FLIGHT = 2  # the actor's: one runs, one waits at the worker
MAX_NOTES = 8


class Observer(Protocol):
    """Sees what every replica decides, as it happens: what the engine's own observers see, and of which replica."""

    def planned(self, replica: int, plan: StepPlan, now_s: float) -> None: ...

    def committed(self, replica: int, plan: StepPlan, result: StepResult, now_s: float) -> None: ...

    def events(self, replica: int, events: Sequence[Event]) -> None: ...


class Call:
    """A client's request on its way. ``left``: the client is gone, which the scheduler may not have read yet."""

    __slots__ = ("left", "replica", "request")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.left = False
        self.replica: Replica | None = None  # once it is through the door


class _Submit:
    __slots__ = ("arrived_s", "call", "request")

    def __init__(self, call: Call, request: Request, arrived_s: float) -> None:
        self.call, self.request, self.arrived_s = call, request, arrived_s


class _Flight:
    """A plan that was sent, and its price."""

    __slots__ = ("forward_s", "plan", "seconds")

    def __init__(self, plan: StepPlan, seconds: float, forward_s: float) -> None:
        self.plan, self.seconds, self.forward_s = plan, seconds, forward_s


class StepTotals:
    """What all replicas' steps cost, and how full their memory was."""

    def __init__(self) -> None:
        self.num_steps = self.num_extrapolated = 0
        self.busy_s = self.low_s = self.high_s = self.transfer_s = 0.0
        self.notes: dict[str, None] = {}
        self.peak_blocks = self.peak_tokens = 0

    def add(self, price: StepPrice, transfer_s: float) -> None:
        self.num_steps += 1
        self.busy_s += price.step_s + transfer_s
        self.low_s += price.low_s + transfer_s
        self.high_s += price.high_s + transfer_s
        self.transfer_s += transfer_s
        self.num_extrapolated += price.extrapolated
        if price.note and len(self.notes) < MAX_NOTES:
            self.notes[price.note] = None

    def look(self, core: Scheduler) -> None:
        """After a plan took its blocks."""
        for rank in core.ranks:
            held = rank.pool.num_blocks - rank.num_allocatable
            if held > self.peak_blocks:
                self.peak_blocks, self.peak_tokens = held, rank.num_held_tokens

    def step_time(self) -> StepTime:
        share = self.num_extrapolated / self.num_steps if self.num_steps else 0.0
        return StepTime(self.busy_s, self.low_s, self.high_s, self.transfer_s, share, tuple(self.notes))

    def kv_peak(self, num_blocks: int) -> KvPeak:
        return KvPeak(self.peak_blocks / num_blocks, self.peak_blocks, self.peak_tokens)


class Replica:
    """``submit`` and ``leave`` are its mailbox; ``run`` is its process."""

    def __init__(
        self,
        index: int,
        config: SchedulerConfig,
        clock: Clock,
        cost: StepCost,
        outcomes: Outcomes,
        fold: MetricsFold,
        totals: StepTotals,
        ended: Callable[[Call, bool], None],
        *,
        transfer: TransferCost | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``ended(call, is_rejected)`` is told of every call that the scheduler is done with."""
        self.index = index
        self.core = Scheduler(config)
        self.queued_prompt_tokens = 0  # of calls that have not ended
        self._clock, self._cost, self._outcomes = clock, cost, outcomes
        self._fold, self._totals, self._ended = fold, totals, ended
        self._transfer = transfer
        self._observers = tuple(observers)
        self._mailbox: deque[_Submit | Call] = deque()
        self._calls: dict[RequestId, Call] = {}
        self._num_submitted = 0  # in the mailbox
        self._in_flight: deque[_Flight] = deque()
        self._sleeper: simpy.Event | None = None

    @property
    def num_calls(self) -> int:
        """Not ended, those in the mailbox included."""
        return len(self._calls) + self._num_submitted

    def submit(self, call: Call, request: Request) -> None:
        call.replica = self
        self.queued_prompt_tokens += len(request.prompt)
        self._num_submitted += 1
        self._mailbox.append(_Submit(call, request, self._clock.now_s))
        self._wake()

    def leave(self, call: Call) -> None:
        """The client is gone; its blocks are free once the scheduler has read of it."""
        self._mailbox.append(call)
        self._wake()

    def run(self) -> Process:
        """The actor's ``serve``."""
        where = f"step time of replica {self.index}"
        while True:
            self._read_mailbox()
            while len(self._in_flight) < MAX_PLANS_IN_FLIGHT and self._dispatch():
                pass
            if not self._in_flight:
                self._sleeper = self._clock.signal()
                yield self._sleeper
                continue
            # The older plan's step began now: it was sent to an idle worker, or the step before it has just ended.
            yield self._clock.after(self._in_flight[0].seconds, Turn.STEP_END, where)
            events = self._commit(self._in_flight.popleft())
            if not self._in_flight:
                self._read_mailbox()
                self._dispatch()
            self._deliver(events)

    # -- parts of the loop ----------------------------------------------------------------------------------------------------

    def _read_mailbox(self) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            if isinstance(message, _Submit):
                self._num_submitted -= 1
                self._submit(message)
            elif message.request.index in self._calls:
                events = self.core.abort(message.request.index, self._clock.now_s)
                self._note(events)
                self._deliver(events)

    def _submit(self, message: _Submit) -> None:
        call, request = message.call, message.request
        if call.left:  # before we looked
            self.queued_prompt_tokens -= len(request.prompt)
            return
        try:
            events = self.core.submit(request, message.arrived_s)
        except (RequestError, CapacityError):
            self._note(self.core.take_events())
            self.queued_prompt_tokens -= len(request.prompt)
            self._ended(call, True)
            return
        self._calls[request.id] = call
        self._outcomes.begin(call.request)
        self._note(events)
        self._fold.add(events)

    def _dispatch(self) -> bool:
        """Make, price and send one plan; false where the core has none."""
        now_s = self._clock.now_s
        plan = self.core.plan(now_s)
        if plan is None:
            return False
        price = self._cost.price(plan)
        transfer_s = 0.0 if self._transfer is None else self._transfer.seconds(plan)
        gap = price.components.get("host_gap")
        self._in_flight.append(_Flight(plan, price.step_s + transfer_s, price.step_s + transfer_s - (gap.seconds if gap else 0.0)))
        self._totals.add(price, transfer_s)
        self._totals.look(self.core)
        for observer in self._observers:
            observer.planned(self.index, plan, now_s)
        return True

    def _commit(self, flight: _Flight) -> tuple[Event, ...]:
        now_s = self._clock.now_s
        result = self._outcomes.result(flight.plan, flight.forward_s)
        events = self.core.commit(flight.plan, result, now_s)
        for observer in self._observers:
            observer.committed(self.index, flight.plan, result, now_s)
        self._note(events)
        return events

    def _deliver(self, events: Sequence[Event]) -> None:
        for end in self._fold.add(events):
            call = self._calls.pop(end.request)
            self.queued_prompt_tokens -= end.num_prompt_tokens
            self._outcomes.end(end.request)
            self._ended(call, False)

    def _note(self, events: Sequence[Event]) -> None:
        if events:
            for observer in self._observers:
                observer.events(self.index, events)

    def _wake(self) -> None:
        if self._sleeper is not None:
            self._clock.wake(self._sleeper)
            self._sleeper = None
