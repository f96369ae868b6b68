"""Metrics of a simulation while it runs: the definitions of ``engine.core.metrics``, in memory that does not grow with the requests.

A request's own times are kept while it lives. When it ends they go into distributions: of every value, up to a bound on their number, and
of bins beyond it, or from the start where that is asked for.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from engine.core.events import (
    Admitted,
    Arrived,
    DecodesEmitted,
    DecodeStretch,
    Finished,
    LogEvent,
    Preempted,
    Rejected,
    StepCommitted,
    TokensEmitted,
)
from engine.core.metrics import Distribution, DraftCounts, RequestMetrics, Slo, is_good, percentile
from engine.core.plan import RequestId
from twin.config import MetricsMode

MAX_EXACT_VALUES = 1 << 23  # 64 MB of one quantity
# Bins of equal ratio: a percentile is off by half a bin at most, 0.5 %. What is below the first counts as 0 (tokens that come together).
_LOWEST_S, _HIGHEST_S, _RATIO = 1e-7, 1e7, 1.01
_NUM_BINS = math.ceil(math.log(_HIGHEST_S / _LOWEST_S) / math.log(_RATIO)) + 2
_PER_LOG = 1.0 / math.log(_RATIO)
_BINNED_AT_ONCE = 1 << 13


class Values:
    """Non-negative seconds. ``exact`` until there are more than ``max_exact``."""

    def __init__(self, max_exact: int = MAX_EXACT_VALUES) -> None:
        self._max_exact = max_exact
        self._values: array[float] | None = array("d") if max_exact else None
        self._unbinned = array("d")
        self._bins = np.zeros(0, dtype=np.int64)
        self._count, self._sum, self._highest = 0, 0.0, 0.0

    @property
    def is_exact(self) -> bool:
        return self._values is not None

    def extend(self, values: Sequence[float]) -> None:
        if self._values is None:
            self._unbinned.extend(values)
            if len(self._unbinned) >= _BINNED_AT_ONCE:
                self._bin()
            return
        self._values.extend(values)
        if len(self._values) > self._max_exact:
            self._unbinned, self._values = self._values, None
            self._bin()

    def _bin(self) -> None:
        """Into the bins with what has come; every reader of these begins with it."""
        values, self._unbinned = self._unbinned, array("d")
        if not values:
            return
        if not len(self._bins):
            self._bins = np.zeros(_NUM_BINS, dtype=np.int64)
        numbers = np.frombuffer(values, dtype=np.float64)
        places = np.log(np.maximum(numbers, _LOWEST_S) * (1.0 / _LOWEST_S)) * _PER_LOG + 1.0
        indices = np.where(numbers < _LOWEST_S, 0, np.clip(places, 1, _NUM_BINS - 1)).astype(np.int64)
        self._bins += np.bincount(indices, minlength=_NUM_BINS)
        self._count += len(numbers)
        self._sum += float(numbers.sum())
        self._highest = max(self._highest, float(numbers.max()))

    def distribution(self) -> Distribution:
        """As ``core.metrics.distribution``."""
        if self._values is not None:
            if not self._values:
                return Distribution(0, None, None, None, None, None)
            ordered = np.sort(np.frombuffer(self._values, dtype=np.float64)).tolist()
            p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
            return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
        self._bin()
        if self._count == 0:
            return Distribution(0, None, None, None, None, None)
        ends = np.cumsum(self._bins)
        p50, p90, p99 = (self._binned(ends, share) for share in (0.5, 0.9, 0.99))
        return Distribution(self._count, self._sum / self._count, p50, p90, p99, self._highest)

    def quantiles(self, number: int) -> list[float]:
        """Values at ``number`` (2 or more) even shares, the smallest and the largest among them; none of none."""
        shares = np.linspace(0.0, 1.0, number)
        if self._values is not None:
            found: list[float] = np.quantile(np.frombuffer(self._values, dtype=np.float64), shares).tolist() if self._values else []
            return found
        self._bin()
        ends = np.cumsum(self._bins)
        return [self._binned(ends, share) for share in shares.tolist()] if self._count else []

    def _binned(self, ends: np.ndarray, share: float) -> float:
        """The geometric middle of the bin that holds the closest rank."""
        index = int(np.searchsorted(ends, share * (self._count - 1), side="right"))
        middle = 0.0 if index == 0 else _LOWEST_S * math.exp((index - 0.5) / _PER_LOG)
        return min(middle, self._highest)


class _Together:
    """Requests that got a token each at all of ``times_s``: kept once, however many they are."""

    __slots__ = ("requests", "times_s")

    def __init__(self, requests: tuple[RequestId, ...]) -> None:
        self.requests = requests
        self.times_s: list[float] = []


class MetricsFold:
    """Takes events in the order of the log and keeps what ``SimResult`` needs.

    ``outside_s``: seconds of every request before its Arrived and after each of its tokens, which its client waits as well.
    """

    def __init__(self, slo: Slo, outside_s: float, mode: MetricsMode) -> None:
        self._slo = slo
        self._outside_s = outside_s
        bound = MAX_EXACT_VALUES if mode == "exact" else 0
        self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s = Values(bound), Values(bound), Values(bound), Values(bound)
        self.live: dict[RequestId, RequestMetrics] = {}
        self._together: dict[RequestId, _Together] = {}  # of each that has one
        self.drafts = DraftCounts()
        self.num_good = self.num_preemptions = self.num_steps = self.num_output_tokens = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.first_arrival_s, self.last_end_s = math.inf, -math.inf

    @property
    def is_exact(self) -> bool:
        return all(values.is_exact for values in (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s))

    def quantiles(self, number: int) -> dict[str, list[float]]:
        """Of each latency, by its name."""
        return {name: getattr(self, name).quantiles(number) for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}

    @property
    def duration_s(self) -> float:
        """Last end - first arrival, 0 without an end."""
        return max(0.0, self.last_end_s - self.first_arrival_s)

    def add(self, events: Iterable[LogEvent]) -> list[Finished]:
        """Returns the ends among them."""
        live, ended = self.live, list[Finished]()
        for event in events:
            if type(event) is DecodesEmitted:
                self._decoded(event)
            elif type(event) is TokensEmitted:
                self._part(event.request)
                request, now_s = live[event.request], event.now_s
                if len(event.tokens) == 1 and request.last_token_s is not None:  # as emitted() has it
                    request.gaps_s.append(now_s - request.last_token_s)
                    request.last_token_s = now_s
                    request.num_output_tokens += 1
                else:
                    request.emitted(now_s, len(event.tokens))
            elif type(event) is Finished:
                self._end(event)
                ended.append(event)
            else:
                self._count(event)
        return ended

    def _decoded(self, event: DecodesEmitted) -> None:
        together = self._together.get(event.requests[0])
        if together is None or together.requests is not event.requests:
            for request in event.requests:
                self._part(request)
            together = _Together(event.requests)
            self._together.update(dict.fromkeys(event.requests, together))
        together.times_s.append(event.now_s)

    def _part(self, request: RequestId) -> None:
        """Give those that it decodes together with what they have in common, before it gets anything else."""
        together = self._together.get(request)
        if together is None:
            return
        times_s = tuple(together.times_s)
        gaps_s = tuple([after - before for before, after in itertools.pairwise(times_s)])
        for each in together.requests:
            del self._together[each]
            self.live[each].decoded(times_s, gaps_s)

    def _count(self, event: LogEvent) -> None:
        match event:
            case Arrived():
                arrived_s = event.now_s - self._outside_s
                self.live[event.request] = RequestMetrics(event.request, arrived_s, event.num_prompt_tokens)
                self.first_arrival_s = min(self.first_arrival_s, arrived_s)
            case Admitted():
                self.prefix_query_tokens += event.num_prompt_tokens
                self.prefix_hit_tokens += event.num_cached_tokens
            case Preempted():
                self.num_preemptions += 1
            case DecodeStretch():
                gaps_s = event.gaps_s
                for request in event.requests:
                    self._part(request)
                    self.live[request].decoded(event.committed_s, gaps_s)
                self.num_steps += len(event.committed_s)
            case StepCommitted():
                self.num_steps += 1
                if event.num_verified_items:
                    self.drafts.add(event)
            case Rejected() | _:
                pass  # the gateway counts refusals, its own ones too

    def _end(self, event: Finished) -> None:
        self._part(event.request)
        request = self.live.pop(event.request)
        request.finished_s, request.reason = event.now_s, event.reason
        self.last_end_s = max(self.last_end_s, event.now_s)
        self.num_output_tokens += request.num_output_tokens
        self.num_good += is_good(request, self._slo)
        if request.ttft_s is not None:
            self.ttft_s.extend((request.ttft_s,))
        self.itl_s.extend(request.itl_s)
        if request.reason in ("stop", "length"):
            if request.e2e_s is not None:
                self.e2e_s.extend((request.e2e_s,))
            if request.tpot_s is not None:
                self.tpot_s.extend((request.tpot_s,))
