"""Who sends when. Open loop: by a clock, whatever the server does. Closed loop: so many clients, each of which waits for its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from twin.workload.contents import Contents, delay_s
from twin.workload.draws import Draws
from twin.workload.types import SimRequest

TimesMaker = Callable[[], Iterator[float]]


class ThinkTime(msgspec.Struct, frozen=True):
    """What a client waits between an answer's end and its next request; exponential with this mean."""

    mean_s: float
    draws: Draws

    def after_s(self, index: int) -> float:
        """After the request of this index."""
        return delay_s(self.mean_s, False, self.draws.uniform(index)) if self.mean_s else 0.0


class OpenLoop:
    """Sessions begin at the given times; a session's next turn follows its answer."""

    def __init__(self, contents: Contents, make_times_s: TimesMaker, think: ThinkTime) -> None:
        self.num_requests = contents.num_requests
        self._contents, self._make_times_s, self._think = contents, make_times_s, think

    def arrivals(self) -> Iterator[SimRequest]:
        for session, time_s in zip(range(self._contents.num_sessions), self._make_times_s(), strict=False):
            yield self._contents.first(session, time_s)

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        return self._contents.next_turn(request, end_s + self._think.after_s(request.index))


class ClosedLoop:
    """``concurrency`` clients begin one after the other over ``ramp_up_s`` (at once where it is 0); each goes on with its session's next
    turn, or with the next session that nobody has begun, until there is none.

    The sessions' contents are functions of their numbers; which client has which depends on the order of the ends, that is on the server.
    """

    def __init__(self, contents: Contents, concurrency: int, ramp_up_s: float, think: ThinkTime) -> None:
        self.num_requests = contents.num_requests
        self._contents, self._concurrency, self._ramp_up_s, self._think = contents, concurrency, ramp_up_s, think
        self._num_begun = 0

    def arrivals(self) -> Iterator[SimRequest]:
        first = min(self._concurrency, self._contents.num_sessions)
        self._num_begun = first  # these are the clients' own, however late they come
        for session in range(first):
            yield self._contents.first(session, self._ramp_up_s * session / self._concurrency)

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        arrival_s = end_s + self._think.after_s(request.index)
        turn = self._contents.next_turn(request, arrival_s)
        if turn is not None or self._num_begun == self._contents.num_sessions:
            return turn
        self._num_begun += 1
        return self._contents.first(self._num_begun - 1, arrival_s)
