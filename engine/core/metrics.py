"""Every service metric, defined once, from the event log. All times in seconds, on the log's own clock.

Per request (a sample of n > 1 is a request of its own, that arrived with its parent):

ttft_s    first TokensEmitted - Arrived. Set once; a preemption does not change it. None without a token.
itl_s     gaps between consecutive tokens, len = tokens - 1. Tokens that arrive in one step have a gap of 0 between them: under
          speculation the first token of a step carries the whole wait, so the sum is last token - first token.
e2e_s     Finished - Arrived.
tpot_s    (e2e_s - ttft_s) / (tokens - 1). None for fewer than two tokens.

Over a log (distributions of ttft and itl over every request that has one, of tpot and e2e over those that ended by themselves):

goodput_per_s      requests finished with "stop" or "length" that meet every given limit, / duration_s
duration_s         last Finished - first Arrived
acceptance_length  tokens per verified item, the target's own token included = 1 + accepted drafts / verified items
acceptance_by_position  accepted drafts / proposed drafts at each place after the last token
prefix_hit_rate    cached prompt tokens / prompt tokens over first admissions (forks left out: they share, they do not hit)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from typing import assert_never

import msgspec

from engine.core.events import (
    Admitted,
    Arrived,
    DecodesEmitted,
    DecodeStretch,
    DriftAlarm,
    Finished,
    FinishReason,
    LogEvent,
    Preempted,
    Rejected,
    Resumed,
    StepCommitted,
    StepMeasured,
    StepPlanned,
    StepPriced,
    TokensEmitted,
)
from engine.core.plan import RequestId


class RequestMetrics(msgspec.Struct):
    """Times of one request as far as the log goes; see the module for the formulas."""

    request: RequestId
    arrived_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    reason: FinishReason | None = None
    gaps_s: list[float | tuple[float, ...]] = []  # itl_s; a tuple holds gaps that the requests of a stretch have in common

    def emitted(self, now_s: float, num_tokens: int) -> None:
        """``num_tokens`` tokens came out together. Where the first ones do, their time is the request's first token."""
        if num_tokens == 0:
            return
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        if num_tokens > 1:
            self.gaps_s.extend([0.0] * (num_tokens - 1))
        self.last_token_s = now_s
        self.num_output_tokens += num_tokens

    def decoded(self, committed_s: tuple[float, ...], gaps_s: tuple[float, ...]) -> None:
        """A token at each of ``committed_s``, which are ``gaps_s`` apart."""
        self.emitted(committed_s[0], 1)
        if gaps_s:
            self.gaps_s.append(gaps_s)
            self.last_token_s = committed_s[-1]
            self.num_output_tokens += len(gaps_s)

    @property
    def itl_s(self) -> list[float]:
        found: list[float] = []
        for part in self.gaps_s:
            if isinstance(part, tuple):
                found += part
            else:
                found.append(part)
        return found

    @property
    def itl_s_max(self) -> float | None:
        return max((max(part) if isinstance(part, tuple) else part for part in self.gaps_s), default=None)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        ttft_s, e2e_s = self.ttft_s, self.e2e_s
        if ttft_s is None or e2e_s is None or self.num_output_tokens < 2:
            return None
        return (e2e_s - ttft_s) / (self.num_output_tokens - 1)


class Distribution(msgspec.Struct, frozen=True):
    """``count`` values: mean and percentiles (linear between closest ranks, as numpy's default). All None without a value."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Slo(msgspec.Struct, frozen=True):
    """Limits a good request keeps, in seconds; None does not limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s_max: float | None = None
    e2e_s: float | None = None


class Summary(msgspec.Struct, frozen=True):
    """The headline of a log. What was refused, dropped or failed stands beside what was served."""

    num_arrived: int
    num_rejected: int
    num_finished: dict[str, int]  # by reason
    num_unfinished: int
    num_preemptions: int
    num_output_tokens: int
    duration_s: float | None
    output_tokens_per_s: float | None
    goodput_per_s: float | None
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_hit_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: list[float]
    num_steps: int
    forward_s: float


class DraftCounts(msgspec.Struct):
    """Verifications of drafts, added up over steps. Position 0 is the draft right after the last token."""

    num_verified_items: int = 0
    drafts_by_position: list[int] = []
    accepted_by_position: list[int] = []

    def add(self, event: StepCommitted) -> None:
        self.num_verified_items += event.num_verified_items
        for total, part in (
            (self.drafts_by_position, event.drafts_by_position),
            (self.accepted_by_position, event.accepted_by_position),
        ):
            total.extend([0] * (len(part) - len(total)))  # as long as the longest draft that is configured
            for position, count in enumerate(part):
                total[position] += count

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafts_by_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float | None:
        return 1.0 + self.num_accepted_tokens / self.num_verified_items if self.num_verified_items else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / proposed, 0 where nothing was. A draft behind a rejected one counts as not accepted."""
        pairs = zip(self.accepted_by_position, self.drafts_by_position, strict=True)
        return [accepted / drafts if drafts else 0.0 for accepted, drafts in pairs]

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """What was added after ``earlier``, a copy of this one."""
        lists = []
        for now, before in (
            (self.drafts_by_position, earlier.drafts_by_position),
            (self.accepted_by_position, earlier.accepted_by_position),
        ):
            lists.append([count - (before[position] if position < len(before) else 0) for position, count in enumerate(now)])
        return DraftCounts(self.num_verified_items - earlier.num_verified_items, *lists)

    def copy(self) -> DraftCounts:
        return self.since(DraftCounts())

    def summary(self) -> dict[str, object]:
        """Everything of it, for JSON."""
        return {
            "verified_items": self.num_verified_items,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "draft_tokens_by_position": self.drafts_by_position,
            "accepted_tokens_by_position": self.accepted_by_position,
        }


class MetricsLog:
    """Folds events, in log order, into requests and counters. Memory grows with requests and tokens; for a live server keep a window."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, RequestMetrics] = {}
        self.num_rejected = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.forward_s = 0.0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.drafts = DraftCounts()
        self.shared_gaps_s: list[tuple[tuple[float, ...], int]] = []  # of stretches, and how many requests have them

    def extend(self, events: Iterable[LogEvent]) -> None:
        for event in events:
            self.add(event)

    def add(self, event: LogEvent) -> None:
        match event:
            case TokensEmitted():
                self.requests[event.request].emitted(event.now_s, len(event.tokens))
            case DecodesEmitted():
                for request_id in event.requests:
                    self.requests[request_id].emitted(event.now_s, 1)
            case Arrived():
                self.requests[event.request] = RequestMetrics(event.request, event.now_s, event.num_prompt_tokens)
            case Admitted():
                self.requests[event.request].num_cached_tokens = event.num_cached_tokens
                if event.origin != "fork":
                    self.prefix_query_tokens += event.num_prompt_tokens
                    self.prefix_hit_tokens += event.num_cached_tokens
            case Preempted():
                self.requests[event.request].num_preemptions += 1
                self.num_preemptions += 1
            case Finished():
                request = self.requests[event.request]
                request.finished_s, request.reason = event.now_s, event.reason
            case Rejected():
                self.num_rejected += 1
            case StepCommitted():
                self.num_steps += 1
                self.forward_s += event.forward_s
                self.drafts.add(event)
            case DecodeStretch():
                self._add_stretch(event)
            case Resumed() | StepPlanned() | StepPriced() | StepMeasured() | DriftAlarm():
                pass
            case _:
                assert_never(event)

    def _add_stretch(self, event: DecodeStretch) -> None:
        """As its expanded events, in O(requests + steps)."""
        committed_s, gaps_s = event.committed_s, event.gaps_s
        for request in event.requests:
            self.requests[request].decoded(committed_s, gaps_s)
        self.shared_gaps_s.append((gaps_s, len(event.requests)))
        self.num_steps += len(committed_s)
        for forward_s in event.forward_s:
            self.forward_s += forward_s

    @property
    def prefix_hit_rate(self) -> float | None:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None

    def num_good(self, slo: Slo) -> int:
        return sum(is_good(request, slo) for request in self.requests.values())

    def _weighted_gaps(self) -> list[tuple[float, int]]:
        """Every gap between tokens, with how many requests it stands for."""
        own = [(gap, 1) for request in self.requests.values() for gap in request.gaps_s if not isinstance(gap, tuple)]
        return own + [(gap_s, count) for gaps_s, count in self.shared_gaps_s for gap_s in gaps_s]

    def summary(self, slo: Slo | None = None) -> Summary:
        requests = list(self.requests.values())
        ends_s = [request.finished_s for request in requests if request.finished_s is not None]
        duration_s = max(ends_s) - min(request.arrived_s for request in requests) if ends_s else None
        finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        for request in requests:
            if request.reason is not None:
                finished[request.reason] += 1
        served = [request for request in requests if request.reason in ("stop", "length")]
        output_tokens = sum(request.num_output_tokens for request in requests)
        return Summary(
            num_arrived=len(requests),
            num_rejected=self.num_rejected,
            num_finished=finished,
            num_unfinished=len(requests) - len(ends_s),
            num_preemptions=self.num_preemptions,
            num_output_tokens=output_tokens,
            duration_s=duration_s,
            output_tokens_per_s=output_tokens / duration_s if duration_s else None,
            goodput_per_s=self.num_good(slo or Slo()) / duration_s if duration_s else None,
            ttft_s=distribution(request.ttft_s for request in requests),
            itl_s=weighted_distribution(self._weighted_gaps()),
            tpot_s=distribution(request.tpot_s for request in served),
            e2e_s=distribution(request.e2e_s for request in served),
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            prefix_hit_rate=self.prefix_hit_rate,
            acceptance_length=self.drafts.acceptance_length,
            acceptance_by_position=self.drafts.acceptance_by_position,
            num_steps=self.num_steps,
            forward_s=self.forward_s,
        )


def is_good(request: RequestMetrics, slo: Slo) -> bool:
    """Finished by itself and within every limit. A limit on a gap that does not exist (one token) is kept."""
    if request.reason not in ("stop", "length"):
        return False
    pairs = (
        (request.ttft_s, slo.ttft_s),
        (request.tpot_s, slo.tpot_s),
        (None if slo.itl_s_max is None else request.itl_s_max, slo.itl_s_max),
        (request.e2e_s, slo.e2e_s),
    )
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def distribution(values: Iterable[float | None]) -> Distribution:
    """None values (not defined for that request) are left out; ``count`` says how many remain."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Distribution(0, None, None, None, None, None)
    mean = math.fsum(known) / len(known)
    return Distribution(len(known), mean, percentile(known, 0.5), percentile(known, 0.9), percentile(known, 0.99), known[-1])


def weighted_distribution(values: list[tuple[float, int]]) -> Distribution:
    """``distribution`` of each value as often as its count says, to the last bit, without writing them all down."""
    ordered = sorted(values)
    ends = list(itertools.accumulate(count for _, count in ordered))
    if not ordered:
        return distribution([])
    total = ends[-1]

    def at(share: float) -> float:
        place = share * (total - 1)
        low = math.floor(place)
        first, second = (ordered[bisect.bisect_right(ends, index)][0] for index in (low, min(low + 1, total - 1)))
        return first + (second - first) * (place - low)

    # A count is a sum of powers of two, and by these a product is exact: fsum sees the same sum as of the values one by one.
    mean = math.fsum(value * (1 << bit) for value, count in ordered for bit in range(count.bit_length()) if count >> bit & 1) / total
    return Distribution(total, mean, at(0.5), at(0.9), at(0.99), ordered[-1][0])


def percentile(ordered: list[float], share: float) -> float:
    """Linear between closest ranks, of a sorted non-empty list."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
