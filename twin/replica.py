"""One replica on the simulated clock: the core's scheduler, driven as ``engine/actors/scheduler.py`` drives it.

The order of a turn is that actor's, since it decides which plan is the first to see a newcomer: the mailbox is read, up to two plans are
made and sent; when the older one's step ends it is committed, and only then is the mailbox read again. What comes while a step runs is thus
in the plan made at its end, which with overlap runs one step later still. A step is one event, whatever the number of its tokens.

A step takes as long as its slowest data rank, to which collectives hold the others. Where ranks have none between them, an engine's faster
rank begins the next plan, which has been sent, while the slowest ends the one before: what it gains so is not counted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import simpy

from engine.core.errors import CapacityError, RequestError
from engine.core.events import Event, Finished, LogEvent
from engine.core.plan import RequestId, StepPlan, StepResult
from engine.core.rank import RankState
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import ComponentPrice, Provenance, StepCost, StepPrice
from engine.core.stretch import StretchCost, StretchPrice
from twin.clock import Clock, Process, Turn
from twin.config import TransferCost
from twin.fold import MetricsFold
from twin.leap import Foreknown, Leap, find_leap
from twin.outcomes import Outcomes
from twin.result import KvPeak, StepTime
from twin.workload.types import SimRequest

MAX_PLANS_IN_FLIGHT = 2  # the actor's: one runs, one waits at the worker
MAX_NOTES = 8


class Listener(Protocol):
    """Hears of the events of every replica, of each in their order; steps that only decode may come as one."""

    def events(self, replica: int, events: Sequence[LogEvent]) -> None: ...


class Observer(Protocol):
    """Sees what every replica decides, as it happens: what the engine's own observers see, and of which replica. No step is skipped."""

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
        self._component_s: dict[str, float] = {}
        self._provenance: dict[str, Provenance] = {}
        self.peak_blocks = self.peak_tokens = 0

    def add(self, price: StepPrice, transfer_s: float) -> None:
        self.num_steps += 1
        self.busy_s += price.step_s + transfer_s
        self.low_s += price.low_s + transfer_s
        self.high_s += price.high_s + transfer_s
        self.transfer_s += transfer_s
        self.num_extrapolated += price.extrapolated
        component_s = self._component_s
        for name, part in price.components.items():
            if name in component_s:
                component_s[name] += part.seconds
            else:
                component_s[name], self._provenance[name] = part.seconds, part.provenance
        self._note(price.note)

    def add_stretch(self, price: StretchPrice, count: int) -> None:
        """The first ``count`` steps of ``price``, in the order of steps: the sums are those of adding them one by one."""
        self.num_steps += count
        self.num_extrapolated += sum(price.extrapolated[:count])
        self.busy_s = _added(self.busy_s, price.step_s, count)
        self.low_s = _added(self.low_s, price.low_s, count)
        self.high_s = _added(self.high_s, price.high_s, count)
        for name, seconds in price.components.items():
            if name in self._component_s or any(seconds[:count]):
                self._component_s[name] = _added(self._component_s.get(name, 0.0), seconds, count)
                self._provenance.setdefault(name, price.provenance[name])
        self._note(price.note)

    def _note(self, note: str) -> None:
        if note and len(self.notes) < MAX_NOTES:
            self.notes[note] = None

    def look(self, core: Scheduler) -> None:
        """After a plan took its blocks."""
        for rank in core.ranks:
            self.fill(rank.pool.num_blocks - rank.num_allocatable, rank)

    def fill(self, held_blocks: int, rank: RankState) -> None:
        """Of the moments with most blocks in use, that with most tokens counts."""
        if held_blocks >= self.peak_blocks:
            tokens = rank.num_held_tokens
            if (held_blocks, tokens) > (self.peak_blocks, self.peak_tokens):
                self.peak_blocks, self.peak_tokens = held_blocks, tokens

    def include(self, other: StepTotals) -> None:
        """Those of another replica, whose steps all come after these."""
        self.num_steps += other.num_steps
        self.num_extrapolated += other.num_extrapolated
        self.busy_s += other.busy_s
        self.low_s += other.low_s
        self.high_s += other.high_s
        self.transfer_s += other.transfer_s
        for note in other.notes:
            self._note(note)
        for name, seconds in other._component_s.items():
            self._component_s[name] = self._component_s.get(name, 0.0) + seconds
            self._provenance.setdefault(name, other._provenance[name])
        peak = max((self.peak_blocks, self.peak_tokens), (other.peak_blocks, other.peak_tokens))
        self.peak_blocks, self.peak_tokens = peak

    def step_time(self) -> StepTime:
        share = self.num_extrapolated / self.num_steps if self.num_steps else 0.0
        components = {name: ComponentPrice(seconds, self._provenance[name]) for name, seconds in self._component_s.items()}
        return StepTime(self.busy_s, self.low_s, self.high_s, self.transfer_s, share, tuple(self.notes), components)

    def kv_peak(self, num_blocks: int) -> KvPeak:
        return KvPeak(self.peak_blocks / num_blocks, self.peak_blocks, self.peak_tokens)


def _added(total: float, values: Sequence[float], count: int) -> float:
    for value in values[:count]:
        total += value
    return total


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
        listeners: Sequence[Listener] = (),
        fast_forward: bool = False,
        keeps_cache: bool = False,
    ) -> None:
        """``ended(call, is_rejected)`` is told of every call that the scheduler is done with. ``fast_forward``: decode steps in one go,
        where cost and outcomes allow it and nobody looks on; ``keeps_cache``: and no cached prefix comes or goes (a router looks at these).
        """
        self.index = index
        self.core = Scheduler(config, cost)
        self.core.joins_decodes = not observers
        self.queued_prompt_tokens = 0  # of calls that have not ended
        self._clock, self._cost, self._outcomes = clock, cost, outcomes
        self._fold, self._totals, self._ended = fold, totals, ended
        self._transfer = transfer
        self._observers = tuple(observers)
        self._listeners = tuple(listeners)
        self._keeps_cache = keeps_cache
        self._leap: Leap | None = None
        self._foreknown: tuple[Foreknown, StretchCost] | None = None
        if fast_forward and not observers and isinstance(outcomes, Foreknown) and isinstance(cost, StretchCost):
            self._foreknown = outcomes, cost
        self._where = f"step time of replica {index}"
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
        where, turn = self._where, Turn.STEP_END + self.index
        while True:
            self._read_mailbox()
            leap_end = self._find_leap()
            if leap_end is not None:
                yield leap_end
                self._land()
                continue
            while len(self._in_flight) < MAX_PLANS_IN_FLIGHT and self._dispatch():
                pass
            if not self._in_flight:
                self._sleeper = self._clock.signal()
                yield self._sleeper
                continue
            # The older plan's step began now: it was sent to an idle worker, or the step before it has just ended.
            yield self._clock.after(self._in_flight[0].seconds, turn, where)
            ends = self._commit(self._in_flight.popleft())
            if not self._in_flight:
                self._read_mailbox()
                self._dispatch()
            self._deliver(ends)

    # -- parts of the loop ----------------------------------------------------------------------------------------------------

    def _read_mailbox(self) -> None:
        while self._mailbox:
            message = self._mailbox.popleft()
            if isinstance(message, _Submit):
                self._num_submitted -= 1
                self._submit(message)
            elif message.request.index in self._calls:
                self._publish(self.core.abort(message.request.index, self._clock.now_s))

    def _submit(self, message: _Submit) -> None:
        call, request = message.call, message.request
        if call.left:  # before we looked
            self.queued_prompt_tokens -= len(request.prompt)
            return
        try:
            events = self.core.submit(request, message.arrived_s)
        except (RequestError, CapacityError):
            self._publish(self.core.take_events())
            self.queued_prompt_tokens -= len(request.prompt)
            self._ended(call, True)
            return
        self._calls[request.id] = call
        self._outcomes.begin(call.request)
        self._publish(events)

    def _find_leap(self) -> simpy.Event | None:
        """To be asked with one plan under way, before the next is made. The event is the leap's end."""
        if self._foreknown is None or len(self._in_flight) != MAX_PLANS_IN_FLIGHT - 1:
            return None
        now_s = self._clock.now_s
        self._leap = find_leap(self.core, *self._foreknown, now_s, now_s + self._in_flight[0].seconds, keeps_cache=self._keeps_cache)
        if self._leap is None:
            return None
        self._sleeper = self._clock.at(self._leap.ends_s[-1], Turn.STEP_END + self.index, self._where)
        return self._sleeper

    def _land(self) -> None:
        """Take the scheduler to where the leap ends."""
        leap, flight = self._leap, self._in_flight.popleft()
        assert leap is not None
        assert self._foreknown is not None
        self._leap = self._sleeper = None
        price, count = leap.price, len(leap.ends_s)
        gap_s = price.components.get("host_gap")
        forward_s = [
            flight.forward_s,
            *(price.step_s if gap_s is None else [step - gap for step, gap in zip(price.step_s, gap_s, strict=True)]),
        ]
        events = leap.stretch.advance(leap.begin_s, leap.ends_s, forward_s[:count])
        for rank in self.core.ranks:
            for sequence in rank.running:
                self._foreknown[0].skip(sequence.id, count)
            self._totals.fill(leap.stretch.held_blocks[rank.rank], rank)
        self._totals.add_stretch(price, count)
        self._in_flight.append(_Flight(self.core.uncommitted[0].plan, price.step_s[count - 1], forward_s[count]))
        for listener in self._listeners:
            listener.events(self.index, events)
        self._deliver(self._fold.add(events))

    def _dispatch(self) -> bool:
        """Make, price and send one plan; false where the core has none."""
        now_s = self._clock.now_s
        plan = self.core.plan(now_s)
        if plan is None:
            return False
        price = self._cost.price(plan)
        transfer_s = 0.0 if self._transfer is None else self._transfer.seconds(plan)
        step_s = price.step_s + transfer_s
        gap = price.components.get("host_gap")
        self._in_flight.append(_Flight(plan, step_s, step_s if gap is None else step_s - gap.seconds))
        self._totals.add(price, transfer_s)
        self._totals.look(self.core)
        for observer in self._observers:
            observer.planned(self.index, plan, now_s)
        return True

    def _commit(self, flight: _Flight) -> list[Finished]:
        """Returns the ends, to be told after the next plan: so does the actor."""
        now_s = self._clock.now_s
        result = self._outcomes.result(flight.plan, flight.forward_s)
        events = self.core.commit(flight.plan, result, now_s)
        for observer in self._observers:
            observer.committed(self.index, flight.plan, result, now_s)
        return self._note(events)

    def _publish(self, events: Sequence[Event]) -> None:
        self._deliver(self._note(events))

    def _deliver(self, ends: Sequence[Finished]) -> None:
        for end in ends:
            call = self._calls.pop(end.request)
            self.queued_prompt_tokens -= end.num_prompt_tokens
            self._outcomes.end(end.request)
            self._ended(call, False)

    def _note(self, events: Sequence[Event]) -> list[Finished]:
        """In the order of the log. Returns the ends among them."""
        if events:
            for observer in self._observers:
                observer.events(self.index, events)
            for listener in self._listeners:
                listener.events(self.index, events)
        return self._fold.add(events)

    def _wake(self) -> None:
        if self._leap is not None and self._sleeper is not None:
            turn = Turn.STEP_END + self.index
            end_s = self._leap.ends_s[-1]
            sooner_s = self._leap.cut(self._clock.now_s, self._clock.has_had(turn))
            if sooner_s < end_s:
                self._sleeper = self._clock.sooner(self._sleeper, sooner_s, turn, self._where)
        elif self._sleeper is not None:
            self._clock.wake(self._sleeper)
            self._sleeper = None
