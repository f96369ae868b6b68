"""Parity: given what reached the scheduler between which of its calls, and what came of each step, the twin's driver makes the engine's
plans, byte for byte. So it does the event log, but for the times in it.

The replica that is driven here is the simulator's own. No cost model is asked: every step takes a second, because only the order counts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from engine.core.driver_log import Arrival, Departure, DriverLog, Place
from engine.core.errors import InvariantError, TwinferError
from engine.core.events import Event
from engine.core.metrics import Slo
from engine.core.plan import RequestId, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepPrice
from twin.clock import Clock
from twin.fold import MetricsFold
from twin.replica import Call, Replica, StepTotals
from twin.workload.types import SimRequest

_MAX_SHOWN = 300


class Parity(msgspec.Struct, frozen=True):
    """``difference`` names the first one and is empty where there is none."""

    num_plans: int
    num_equal: int
    num_requests: int
    num_plan_bytes: int
    num_events: int
    difference: str = ""


def check_parity(config: SchedulerConfig, log: DriverLog, requests: Mapping[RequestId, Request]) -> Parity:
    """Replay ``log`` of an engine's scheduler that was made with ``config``; ``requests`` are those that it was given."""
    replay = _Replay(config, log, requests)
    try:
        replay.run()
        difference = replay.difference or _first_event(log.log, replay.log.log)
    except _DifferenceError as found:
        difference = str(found)
    except TwinferError as error:
        difference = f"after {_at(replay.log.place)} the core refuses what the engine's did not: {error}"
    arrivals = sum(isinstance(call, Arrival) for call in log.calls)
    return Parity(len(log.plans), replay.num_equal, arrivals, replay.num_plan_bytes, len(log.log), difference)


class _DifferenceError(Exception):
    """Ends the replay at the first difference."""


class _Second:
    """Every step takes one."""

    def price(self, _plan: StepPlan) -> StepPrice:
        return StepPrice(1.0, 1.0, 1.0, {})


class _Recorded:
    """The results of the engine's steps."""

    def __init__(self, results: Sequence[StepResult]) -> None:
        self._results = results

    def begin(self, request: SimRequest) -> None: ...

    def end(self, request: RequestId) -> None: ...

    def result(self, plan: StepPlan, _forward_s: float) -> StepResult:
        if plan.step >= len(self._results):
            raise _DifferenceError(f"the engine's log ends before step {plan.step} was committed, and the twin goes on")
        return self._results[plan.step]


class _Replay:
    """Also the replica's observer: between its calls of the core it puts into the mailbox what the engine's found in its own."""

    def __init__(self, config: SchedulerConfig, recorded: DriverLog, requests: Mapping[RequestId, Request]) -> None:
        self.log = DriverLog()
        self.num_equal = self.num_plan_bytes = 0
        self._recorded, self._requests = recorded, requests
        self._waiting = deque(recorded.calls)
        self._calls: dict[RequestId, Call] = {}
        self._clock = Clock()
        self._encode = msgspec.json.Encoder().encode
        self._replica = Replica(
            0,
            config,
            self._clock,
            _Second(),
            _Recorded(recorded.results),
            MetricsFold(Slo(), 0.0, "flat"),
            StepTotals(),
            lambda _call, _is_rejected: None,
            observers=(self,),
        )

    @property
    def difference(self) -> str:
        """At the end: what the engine did beyond what the twin has done."""
        if self._waiting:
            call = self._waiting[0]
            return f"request {call.request} reached the engine after {_at(call.place)}; the twin is done after {_at(self.log.place)}"
        if len(self.log.plans) < len(self._recorded.plans):
            return f"the engine made {len(self._recorded.plans)} plans; the twin has nothing to do after {len(self.log.plans)}"
        return ""

    def run(self) -> None:
        self._clock.process(self._replica.run())
        self._clock.run()
        # Idle: only a newcomer makes it go on.
        while self._waiting and self._waiting[0].place == self.log.place:
            self._put()
            self._clock.run()

    def planned(self, _replica: int, plan: StepPlan, now_s: float) -> None:
        number = len(self.log.plans)
        if number >= len(self._recorded.plans):
            raise _DifferenceError(f"the engine made {number} plans; the twin makes another one after {_at(self.log.place)}")
        mine, theirs = self._encode(plan), self._encode(self._recorded.plans[number])
        if mine != theirs:
            raise _DifferenceError(
                f"plan {number} differs after {_at(self.log.place)}: engine {_cut(theirs, mine)}, twin {_cut(mine, theirs)}"
            )
        self.num_equal += 1
        self.num_plan_bytes += len(theirs)
        self.log.planned(plan, now_s)
        self._put()

    def committed(self, _replica: int, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self.log.committed(plan, result, now_s)
        self._put()

    def events(self, _replica: int, events: Sequence[Event]) -> None:
        self.log.events(events)

    def _put(self) -> None:
        while self._waiting and self._waiting[0].place == self.log.place:
            call = self._waiting.popleft()
            if isinstance(call, Departure):
                self._replica.leave(self._calls[call.request])
                continue
            request = self._requests.get(call.request)
            if request is None:
                raise InvariantError(f"the log has a request {call.request} that nobody sent")
            sent = SimRequest(request.id, call.arrived_s, array("q", request.prompt), request.params.max_tokens, request.params.max_tokens)
            self._calls[call.request] = Call(sent)
            self._replica.submit(self._calls[call.request], request)


def _at(place: Place) -> str:
    return f"{place.num_planned} plans and {place.num_committed} commits"


def _cut(text: bytes, other: bytes) -> str:
    """From a little before the first byte that differs."""
    first = next((index for index, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))
    begin = max(0, first - 40)
    cut = text[begin : begin + _MAX_SHOWN].decode("ascii", "replace")
    return f"{'...' if begin else ''}{cut}{'...' if begin + _MAX_SHOWN < len(text) else ''}"


def _first_event(engine: Sequence[Event], twin: Sequence[Event]) -> str:
    """The times left away."""
    for number, (one, two) in enumerate(zip(engine, twin, strict=False)):
        if msgspec.structs.replace(one, now_s=0.0) != msgspec.structs.replace(two, now_s=0.0):
            return f"event {number} differs: engine {one}, twin {two}"[: 2 * _MAX_SHOWN]
    return "" if len(engine) == len(twin) else f"the engine's log has {len(engine)} events, the twin's {len(twin)}"
