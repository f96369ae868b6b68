"""What a workload is to the simulator: requests in order of arrival, and what a finished one brings after it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

import msgspec


class SimRequest(msgspec.Struct, frozen=True):
    """One request as its client knows it.

    prompt         token ids; equal beginnings are what the prefix cache shares
    output_tokens  the answer's true length, which no policy sees: the scheduler is told ``max_tokens`` alone
    output_token   the id that every generated token of this request has; a later turn's prompt repeats it
    cancel_after_s seconds after arrival at which the client leaves if it is not done; None: never
    """

    index: int
    arrival_s: float
    prompt: array[int]
    output_tokens: int
    max_tokens: int
    output_token: int = 1
    priority: int = 0
    cache_salt: str | None = None
    cancel_after_s: float | None = None


class Workload(Protocol):
    """Deterministic: the same object built with the same seed gives the same requests."""

    num_requests: int  # in all, followers included

    def arrivals(self) -> Iterator[SimRequest]:
        """Those that come by themselves, by ascending ``arrival_s``. Made one by one: a long workload is never in memory as a whole."""
        ...

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        """What its end at ``end_s`` brings: the next of a closed loop, or a session's next turn; ``arrival_s`` >= ``end_s``."""
        ...
