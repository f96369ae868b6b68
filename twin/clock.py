"""Simulated time: SimPy's heap behind primitives that take no delay which is not a number, not finite, or negative.

Who comes first at the same instant is a rule, not an accident of who was scheduled first: what arrives at a replica, then the ends of
steps, by the replicas' numbers, then replicas that wake up. So a step that ends sees all that came up to its end, and a replica that was
idle begins with everybody who came at that instant.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Generator
from typing import Any

import simpy

from engine.core.errors import DomainError, InvariantError

Process = Generator[simpy.Event, Any, None]


class Turn(enum.IntEnum):
    """Order at the same instant. To the turn of a step's end the replica's number is added."""

    ARRIVAL = 0
    STEP_END = 1
    WAKE = 1 << 32


class _Environment(simpy.Environment):
    """SimPy's, with events at a time rather than after a delay: now + (time - now) is not always time."""

    def schedule_at(self, event: simpy.Event, turn: int, time_s: float) -> None:
        heapq.heappush(self._queue, (time_s, turn, next(self._eid), event))  # type: ignore[misc]  # SimPy takes any int as a priority


class Clock:
    """One simulation's time, from 0. ``where`` in every call names the place in an error."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._latest_turn = -1  # that this instant has seen

    @property
    def now_s(self) -> float:
        return float(self._environment.now)

    def after(self, delay_s: float, turn: int, where: str) -> simpy.Event:
        """An event ``delay_s`` from now, for a process to wait for. Raises DomainError for a delay that no time can pass in."""
        if not 0.0 <= delay_s < math.inf:
            raise DomainError(f"{where}: a delay of {delay_s} s; allowed: finite, 0 or more")
        return self._event_at(self.now_s + delay_s, turn, where)

    def at(self, time_s: float, turn: int, where: str) -> simpy.Event:
        """An event at exactly ``time_s``. Raises DomainError for a time that is past, infinite or none at all."""
        if not self.now_s <= time_s < math.inf:
            raise DomainError(f"{where}: an event at {time_s} s; allowed: finite, not before the present {self.now_s} s")
        return self._event_at(time_s, turn, where)

    def sooner(self, event: simpy.Event, time_s: float, turn: int, where: str) -> simpy.Event:
        """An event at ``time_s`` for all that wait for ``event``, which then happens to nobody."""
        earlier = self.at(time_s, turn, where)
        earlier.callbacks, event.callbacks = event.callbacks, []
        return earlier

    def has_had(self, turn: int) -> bool:
        """Whether this instant has come to what is due in ``turn``."""
        return self._latest_turn >= turn

    def call_at(self, time_s: float, function: Callable[[], None], where: str) -> None:
        """Have ``function`` called at ``time_s``, in the turn of arrivals."""
        self.at(time_s, Turn.ARRIVAL, where).callbacks.append(lambda _: function())

    def signal(self) -> simpy.Event:
        """An event that happens when ``wake`` is called on it."""
        return simpy.Event(self._environment)

    def wake(self, event: simpy.Event) -> None:
        """Let ``event`` happen at this instant, after everything else of it."""
        event._ok, event._value = True, None
        self._environment.schedule_at(event, Turn.WAKE, self.now_s)

    def process(self, process: Process) -> None:
        """Start a process; it begins in this instant."""
        simpy.Process(self._environment, process)

    def run(self) -> None:
        """Until nothing is left to happen. Raises InvariantError if time ever went back."""
        environment = self._environment
        last_s = self.now_s
        queue = environment._queue
        while queue:
            now_s, turn = queue[0][:2]
            if now_s != last_s:
                if now_s < last_s:
                    raise InvariantError(f"simulated time went back from {last_s} s to {now_s} s")
                last_s, self._latest_turn = now_s, -1
            self._latest_turn = max(self._latest_turn, turn)
            environment.step()

    def _event_at(self, time_s: float, turn: int, where: str) -> simpy.Event:
        if time_s == math.inf:
            raise DomainError(f"{where}: simulated time overflows; allowed: finite times")
        event = simpy.Event(self._environment)
        event._ok, event._value = True, None
        self._environment.schedule_at(event, turn, time_s)
        return event
