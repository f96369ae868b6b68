"""What a driver did with its Scheduler, in order: all that another driver needs to bring about the same plans.

The scheduler's calls have an order and no time: a request is submitted (or its client's leaving noticed) after so many plans were made
and so many committed. With that, and with what came of each step, the plans follow; times are kept for the log alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.core.events import Arrived, Event, Finished
from engine.core.plan import RequestId, StepPlan, StepResult


class Place(msgspec.Struct, frozen=True, order=True):
    """Between which calls something reached the scheduler."""

    num_committed: int
    num_planned: int


class Arrival(msgspec.Struct, frozen=True):
    place: Place
    request: RequestId
    arrived_s: float


class Departure(msgspec.Struct, frozen=True):
    """An abort: the client left."""

    place: Place
    request: RequestId
    now_s: float


class DriverLog:
    """An observer of the engine's scheduler (``actors.scheduler.Observer``); memory grows with steps and tokens."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.planned_s: list[float] = []
        self.results: list[StepResult] = []
        self.committed_s: list[float] = []
        self.calls: list[Arrival | Departure] = []
        self.log: list[Event] = []

    @property
    def place(self) -> Place:
        return Place(len(self.committed_s), len(self.plans))

    def planned(self, plan: StepPlan, now_s: float) -> None:
        self.plans.append(plan)
        self.planned_s.append(now_s)

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        assert plan is self.plans[len(self.committed_s)]
        self.results.append(result)
        self.committed_s.append(now_s)

    def events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                self.calls.append(Arrival(self.place, event.request, event.now_s))
            elif isinstance(event, Finished) and event.reason == "abort":
                self.calls.append(Departure(self.place, event.request, event.now_s))
        self.log += events
