"""The server's metrics: one object that the events are folded into, and that /metrics, the steady log line and the tests read.

Definitions are those of ``engine.core.metrics``, computed as the events come and in bounded memory: what is kept of a request ends
with it. All times are differences on the events' own clock. Nothing that a client sends becomes a label.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from engine.actors.gateway import EngineStats, Gateway
from engine.actors.grammar_check import GrammarCheck
from engine.api.histogram import Histogram, doubling
from engine.api.info import ServerInfo
from engine.api.metrics_compat import COMPAT_FAMILIES
from engine.api.metrics_families import FAMILIES, FamilyCollector
from engine.core.errors import InvariantError
from engine.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Preempted,
    Rejected,
    Resumed,
    StepCommitted,
    StepMeasured,
    StepPriced,
    TokensEmitted,
)
from engine.core.metrics import DraftCounts
from engine.core.plan import RequestId, StepPlan, StepResult
from engine.core.rank_counters import RankCounters, added
from engine.core.shadow import ShadowState, StepClock

Compat = Literal["none", "vllm", "sglang"]

# From a fake worker's tens of microseconds to a long queue's minutes.
LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
GAP_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
# Measured / predicted: 1 is as predicted.
RATIO_BOUNDS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
# Routes come from the server's own table; the bound is for the day when something else is handed in.
_MAX_ROUTES = 64
_OTHER_ROUTE = "other"

_log = logging.getLogger("twinfer.metrics")


class Counters(msgspec.Struct):
    """Totals since ``start``. Tokens of the prompt: ``prompt`` as admitted (once per request, whatever its n), of which ``prefix_hit``
    were found in the cache; ``prefill`` were computed before a sample's first token; ``recomputed`` again after a preemption.
    """

    started: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    invariant_violations: int = 0


class Histograms:
    """Times of requests in seconds. Those of a request's end are kept only of requests that ended by themselves."""

    def __init__(self) -> None:
        self.ttft_s: Histogram = Histogram(LATENCY_BOUNDS_S)
        self.itl_s: Histogram = Histogram(GAP_BOUNDS_S)
        self.tpot_s: Histogram = Histogram(GAP_BOUNDS_S)
        self.e2e_s: Histogram = Histogram(LATENCY_BOUNDS_S)
        self.queue_s: Histogram = Histogram(LATENCY_BOUNDS_S)
        self.prefill_s: Histogram = Histogram(LATENCY_BOUNDS_S)
        self.decode_s: Histogram = Histogram(LATENCY_BOUNDS_S)
        self.prompt_tokens: Histogram = Histogram(doubling(1, 1 << 20))
        self.generation_tokens: Histogram = Histogram(doubling(1, 1 << 20))
        self.iteration_tokens: Histogram = Histogram(doubling(1, 1 << 16))
        self.step_s: Histogram = Histogram(GAP_BOUNDS_S)
        self.forward_s: Histogram = Histogram(GAP_BOUNDS_S)
        self.predicted_s: Histogram = Histogram(GAP_BOUNDS_S)
        self.residual_ratio: Histogram = Histogram(RATIO_BOUNDS)


class Reading(NamedTuple):
    """Everything that one scrape or one log line says, taken at one moment. ``stats`` is None before the start, and where a conservation
    law is broken: then there are no gauges to believe.
    """

    metrics: ServerMetrics
    info: ServerInfo | None
    stats: EngineStats | None
    heartbeat_ages_s: dict[str, float]
    mailbox_depths: dict[str, int]
    grammars: GrammarCheck | None
    num_rebalances: int = 0
    shadow: ShadowState | None = None  # None without a cost model


class _Running:
    """What is kept of a sample while it lives."""

    __slots__ = ("admitted_s", "arrived_s", "first_token_s", "last_token_s", "num_tokens")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.admitted_s = arrived_s
        self.first_token_s: float | None = None
        self.last_token_s = arrived_s
        self.num_tokens = 0


class ServerMetrics:
    """An observer of the scheduler and the server's hooks. Counts from ``start`` on, so that a warm-up is not in it."""

    def __init__(self) -> None:
        self.counters: Counters = Counters()
        self.histograms = Histograms()
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error", "rejected"), 0)
        self.preempted: set[RequestId] = set()  # now
        self.preemptions: dict[str, int] = dict.fromkeys(("recompute", "swap"), 0)
        self.drafts = DraftCounts()
        self.component_s: dict[str, float] = {}
        self.ranks: RankCounters = RankCounters()  # of all ranks, added up over their reports
        self.http_requests: dict[tuple[str, int], int] = {}
        self.open_streams: int = 0
        self._routes: set[str] = set()
        self._running: dict[RequestId, _Running] = {}
        self._clock = StepClock()
        self._engine: Gateway | None = None
        self._info: ServerInfo | None = None
        self._registry: CollectorRegistry | None = None

    def start(self, engine: Gateway, info: ServerInfo, compat: Compat = "none") -> None:
        """Begin to count, and to answer."""
        self._engine = engine
        self._info = info
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FamilyCollector(self.read, (*FAMILIES, *COMPAT_FAMILIES[compat])))
        ProcessCollector(registry=self._registry)

    def read(self) -> Reading:
        """The present state; never raises."""
        if self._engine is None:
            return Reading(self, None, None, {}, {}, None)
        stats: EngineStats | None = None
        try:
            stats = self._engine.stats()
        except InvariantError:
            self.counters.invariant_violations += 1
            _log.exception("the engine's books do not add up")
        engine = self._engine
        return Reading(
            self,
            self._info,
            stats,
            engine.heartbeat_ages_s(),
            engine.mailbox_depths(),
            engine.grammars,
            engine.num_rebalances,
            engine.shadow.state() if engine.shadow is not None else None,
        )

    def exposition(self) -> bytes:
        """Prometheus text; empty before ``start``."""
        return generate_latest(self._registry) if self._registry is not None else b""

    # -- hooks of the server --------------------------------------------------------------------------------------------------

    def http_request(self, route: str, status: int) -> None:
        """A request was answered. ``route`` is the matched route's own path, never what the client sent."""
        if route not in self._routes:
            if len(self._routes) >= _MAX_ROUTES:
                route = _OTHER_ROUTE
            self._routes.add(route)
        key = (route, status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    def stream_opened(self) -> None:
        self.open_streams += 1

    def stream_closed(self) -> None:
        self.open_streams -= 1

    # -- observer of the scheduler --------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, now_s: float) -> None:
        self._clock.planned(plan.step, now_s)

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        step_s = self._clock.committed(plan.step, now_s)
        if self._engine is None:
            return
        self.histograms.step_s.observe(step_s)
        self.histograms.forward_s.observe(result.forward_s)
        for name, seconds in result.components:
            self.component_s[name] = self.component_s.get(name, 0.0) + seconds
        if result.counters is not None:
            self.ranks = added((self.ranks, result.counters))
        for rank_plan in plan.ranks:
            for item in rank_plan.items:
                sequence = self._running.get(item.request)
                if sequence is None:
                    continue
                if sequence.first_token_s is None:
                    self.counters.prefill_tokens += item.num_new_tokens
                else:  # a decode step computes the one token that it goes on from, and the drafts; more is a repetition
                    self.counters.recomputed_tokens += item.num_new_tokens - item.num_draft_tokens - item.emits

    def events(self, events: Sequence[Event]) -> None:
        if self._engine is None:
            return
        for event in events:
            match event:
                case TokensEmitted():
                    self._tokens(event)
                case Arrived():
                    self.counters.started += 1
                    self._running[event.request] = _Running(event.now_s)
                case Admitted():
                    self._admitted(event)
                case Finished():
                    self._finished(event)
                case Preempted():
                    self.preemptions[event.kind] += 1
                    self.preempted.add(event.request)
                case Resumed():
                    self.preempted.discard(event.request)
                case Rejected():
                    self.finished["rejected"] += 1
                case StepCommitted():
                    self.counters.steps += 1
                    self.drafts.add(event)
                    self.histograms.iteration_tokens.observe(event.num_tokens)
                case StepPriced():
                    self.histograms.predicted_s.observe(event.predicted_s)
                case StepMeasured():
                    if event.within is not None:
                        self.histograms.residual_ratio.observe(event.measured_s / event.predicted_s)
                case _:
                    pass  # a plan tells no more than its commit

    def _tokens(self, event: TokensEmitted) -> None:
        sequence, count = self._running.get(event.request), len(event.tokens)
        if sequence is None or count == 0:
            return
        now_s, histograms = event.now_s, self.histograms
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            histograms.ttft_s.observe(now_s - sequence.arrived_s)
            histograms.prefill_s.observe(now_s - sequence.admitted_s)
        else:
            histograms.itl_s.observe(now_s - sequence.last_token_s)
        if count > 1:
            histograms.itl_s.observe(0.0, count - 1)
        sequence.last_token_s = now_s
        sequence.num_tokens += count
        self.counters.generation_tokens += count

    def _admitted(self, event: Admitted) -> None:
        sequence = self._running.get(event.request)
        if sequence is None:
            return
        sequence.admitted_s = event.now_s
        self.histograms.queue_s.observe(event.now_s - sequence.arrived_s)
        if event.origin != "fork":  # forks share the prompt of the first sample: they do not hit
            self.counters.prompt_tokens += event.num_prompt_tokens
            self.counters.prefix_hit_tokens += event.num_cached_tokens
            self.histograms.prompt_tokens.observe(event.num_prompt_tokens)

    def _finished(self, event: Finished) -> None:
        sequence = self._running.pop(event.request, None)
        self.preempted.discard(event.request)
        if sequence is None:
            return
        self.finished[event.reason] += 1
        if event.reason not in ("stop", "length"):
            return
        histograms = self.histograms
        histograms.e2e_s.observe(event.now_s - sequence.arrived_s)
        histograms.generation_tokens.observe(sequence.num_tokens)
        if sequence.first_token_s is not None:
            decode_s = event.now_s - sequence.first_token_s
            histograms.decode_s.observe(decode_s)
            if sequence.num_tokens > 1:
                histograms.tpot_s.observe(decode_s / (sequence.num_tokens - 1))
