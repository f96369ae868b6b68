"""Several clients at once: the merged arrivals of all, each with its own lengths and system prompt."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from engine.core.errors import ConfigError
from twin.workload.arrivals import Steps, arrival_times_s
from twin.workload.clients import Client
from twin.workload.contents import Context, Drawn, Leaving
from twin.workload.draws import Draws, TokenIds
from twin.workload.types import SimRequest


class ClientMix:
    """The first ``limit`` requests of all clients together. ``peak_per_s`` multiplies all rates alike, so that the highest sum of them over
    time is this; ``time_scale`` multiplies times. Raises ConfigError where no request ever comes."""

    def __init__(
        self,
        seed: int,
        clients: Sequence[Client],
        limit: int,
        token_ids: TokenIds,
        *,
        peak_per_s: float | None,
        time_scale: float,
        max_tokens: int | None,
        context: Context,
        leaving: Leaving,
    ) -> None:
        factor = 1.0 if peak_per_s is None else peak_per_s / (_peak_per_s(clients) or math.inf)
        self._clients, self._factor, self._time_scale = clients, factor, time_scale
        self._seeds = [Draws(seed, "clients").key(number) for number in range(len(clients))]
        counts = Counter(number for _, number in itertools.islice(self._times_s(), limit))
        self.num_requests = counts.total()
        if not self.num_requests:
            raise ConfigError("the clients of the file send nothing: all their rates are 0")
        self._contents = {
            number: Drawn(
                self._seeds[number],
                count,
                clients[number].lengths,
                token_ids,
                prefix_tokens=clients[number].prefix_tokens,
                max_tokens=max_tokens,
                context=context,
                leaving=leaving,
            )
            for number, count in sorted(counts.items())
        }

    def arrivals(self) -> Iterator[SimRequest]:
        sent: Counter[int] = Counter()
        for index, (time_s, number) in enumerate(itertools.islice(self._times_s(), self.num_requests)):
            request = self._contents[number].first(sent[number], time_s)
            sent[number] += 1
            yield msgspec.structs.replace(request, index=index)

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        """None: clients send by their clocks."""
        del request, end_s
        return None

    def _times_s(self) -> Iterator[tuple[float, int]]:
        """(arrival, client) of all, ascending; at the same time the client that stands first comes first."""
        return heapq.merge(*(self._times_of_s(number) for number in range(len(self._clients))))

    def _times_of_s(self, number: int) -> Iterator[tuple[float, int]]:
        client = self._clients[number]
        profile = Steps(client.starts_s, [rate_per_s * self._factor for rate_per_s in client.rates_per_s])
        for time_s in arrival_times_s(profile, client.cv, f"{self._seeds[number]}:arrivals", from_start=False):
            if math.isinf(time_s):
                return
            yield time_s * self._time_scale, number


def _peak_per_s(clients: Sequence[Client]) -> float:
    """The highest sum of the clients' rates over time."""
    changes: list[tuple[float, float]] = []
    for client in clients:
        before = 0.0
        for start_s, rate_per_s in zip(client.starts_s, client.rates_per_s, strict=True):
            changes.append((start_s, rate_per_s - before))
            before = rate_per_s
    total = peak = 0.0
    for _, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        total += math.fsum(change for _, change in group)
        peak = max(peak, total)
    return peak
