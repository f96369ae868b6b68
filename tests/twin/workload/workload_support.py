"""A server of the simplest kind: every request ends a while after it came, in the order of the ends."""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from twin.workload.types import SimRequest, Workload


class Served:
    """``requests`` in order of arrival, ``ends_s`` by index, and the most that were there at a time."""

    def __init__(self) -> None:
        self.requests: list[SimRequest] = []
        self.ends_s: dict[int, float] = {}
        self.peak = 0

    def at(self, time_s: float) -> int:
        """How many are there at a time that is nobody's arrival or end."""
        return sum(request.arrival_s < time_s < self.ends_s[request.index] for request in self.requests)


def serve(workload: Workload, seed: int = 0, service_s: Callable[[SimRequest], float] | None = None) -> Served:
    source, served = random.Random(seed), Served()
    running: list[tuple[float, int, SimRequest]] = []
    coming = sorted(((request.arrival_s, request.index, request) for request in workload.arrivals()), key=lambda entry: entry[:2])
    while coming or running:
        if coming and (not running or coming[0][0] < running[0][0]):
            arrival_s, index, request = heapq.heappop(coming)
            took_s = service_s(request) if service_s is not None else source.expovariate(1.0)
            served.requests.append(request)
            served.ends_s[index] = arrival_s + took_s
            heapq.heappush(running, (arrival_s + took_s, index, request))
            served.peak = max(served.peak, len(running))
        else:
            end_s, _, request = heapq.heappop(running)
            following = workload.follow_up(request, end_s)
            if following is not None:
                assert following.arrival_s >= end_s
                heapq.heappush(coming, (following.arrival_s, following.index, following))
    return served


def digest(requests: Iterable[SimRequest]) -> str:
    """Of every byte of them."""
    total = hashlib.sha256()
    for request in requests:
        total.update(repr(request).encode())
    return total.hexdigest()


def write_lines(path: Path, *lines: object) -> str:
    """Texts as they are, anything else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return str(path)
