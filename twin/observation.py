"""What a report draws of a simulation beside its result, folded from its events while it runs: windows of time, and some requests. Memory
is bounded whatever the number of requests: windows that become many are joined, the sample of requests is thinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.core.events import Admitted, Arrived, DecodeStretch, Event, Finished, LogEvent, Preempted, Resumed, TokensEmitted
from engine.core.metrics import RequestMetrics
from engine.core.plan import RequestId, StepPlan, StepResult

if TYPE_CHECKING:
    from twin.cluster import Cluster

MAX_WINDOWS = 240
FIRST_WINDOW_S = 1e-3
MAX_TIMELINE = 400


class Windows:
    """Means over equal windows of time. ``add`` takes amounts that happen at an instant; ``hold`` levels that last until they change."""

    def __init__(self, levels: tuple[str, ...]) -> None:
        self.width_s = FIRST_WINDOW_S
        self.amounts: list[float] = []
        self.integrals: dict[str, list[float]] = {name: [] for name in levels}
        self._level: dict[str, tuple[float, float]] = dict.fromkeys(levels, (0.0, 0.0))  # (since, level)

    def add(self, now_s: float, amount: float) -> None:
        place = self._place(now_s)
        self.amounts[place] += amount

    def hold(self, now_s: float, name: str, level: float) -> None:
        """From ``now_s`` on it is ``level``. A time before the last change counts as the last change."""
        since_s, before = self._level[name]
        if before == level:
            return
        now_s = max(now_s, since_s)
        self._level[name] = (now_s, level)
        if before:
            self._integrate(name, since_s, now_s, before)

    def rows(self, end_s: float) -> list[dict[str, float]]:
        """The windows up to ``end_s``: the middle of each, the amounts by the second, the mean of each level."""
        for name in self._level:
            self.hold(end_s, name, 0.0)
        self._place(end_s)
        found = []
        for place, amount in enumerate(self.amounts):
            begin_s = place * self.width_s
            length_s = min(self.width_s, end_s - begin_s)
            if length_s <= 0:
                break
            levels = {name: values[place] / length_s for name, values in self.integrals.items()}
            found.append({"time_s": begin_s + length_s / 2, "amount_per_s": amount / length_s, **levels})
        return found

    def _integrate(self, name: str, since_s: float, until_s: float, level: float) -> None:
        last = self._place(until_s)
        values = self.integrals[name]
        for place in range(int(since_s / self.width_s), last + 1):
            begin_s = place * self.width_s
            values[place] += level * max(0.0, min(until_s, begin_s + self.width_s) - max(since_s, begin_s))

    def _place(self, now_s: float) -> int:
        """The window of ``now_s``, made where it is missing; pairs are joined where there would be too many."""
        while now_s >= self.width_s * MAX_WINDOWS:
            self.width_s *= 2
            self.amounts = _paired(self.amounts)
            self.integrals = {name: _paired(values) for name, values in self.integrals.items()}
        place = int(now_s / self.width_s)
        missing = place + 1 - len(self.amounts)
        if missing > 0:
            for values in (self.amounts, *self.integrals.values()):
                values.extend([0.0] * missing)
        return place


def _paired(values: list[float]) -> list[float]:
    return [sum(values[place : place + 2]) for place in range(0, len(values), 2)]


class Observation:
    """An observer of a cluster (``twin.replica.Observer``), which ``bind`` names before it runs: how full memory is, is read from there."""

    def __init__(self) -> None:
        self.windows = Windows(("running", "waiting", "kv_used"))
        self._cluster: Cluster | None = None
        self._live: dict[RequestId, RequestMetrics] = {}
        self._running: set[RequestId] = set()
        self._kv_used: list[float] = []
        self._timeline: dict[RequestId, dict[str, Any]] = {}
        self._stride = 1
        self._end_s = 0.0

    def bind(self, cluster: Cluster) -> None:
        self._cluster, self._kv_used = cluster, [0.0] * len(cluster.replicas)

    def planned(self, replica: int, plan: StepPlan, now_s: float) -> None:  # noqa: ARG002 (an observer's)
        self._look(replica, now_s)

    def _look(self, replica: int, now_s: float) -> None:
        """At the fullest rank, of all replicas."""
        assert self._cluster is not None
        ranks = self._cluster.replicas[replica].core.ranks
        self._kv_used[replica] = max(1.0 - rank.num_allocatable / rank.pool.num_blocks for rank in ranks)
        self.windows.hold(now_s, "kv_used", max(self._kv_used))

    def committed(self, replica: int, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """All of it is in the events."""

    def events(self, replica: int, events: Sequence[LogEvent]) -> None:
        for event in events:
            if isinstance(event, TokensEmitted):
                self._live[event.request].emitted(event.now_s, len(event.tokens))
                self._live[event.request].gaps_s.clear()
                self.windows.add(event.now_s, len(event.tokens))
            elif isinstance(event, DecodeStretch):
                self._stretched(event)
                self._look(replica, event.committed_s[-1])
            else:
                self._add(event)

    def details(self) -> dict[str, Any]:
        """``windows`` and ``timeline`` of ``dashboards.simulation_report``."""
        windows = [
            {**{name: value for name, value in row.items() if name != "amount_per_s"}, "output_tokens_per_s": row["amount_per_s"]}
            for row in self.windows.rows(self._end_s)
        ]
        return {"windows": windows, "timeline": [self._timeline[request] for request in sorted(self._timeline)]}

    def _add(self, event: Event) -> None:
        match event:
            case Arrived():
                self._live[event.request] = RequestMetrics(event.request, event.now_s, event.num_prompt_tokens)
            case Admitted() | Resumed():
                self._running.add(event.request)
            case Preempted():
                self._running.discard(event.request)
            case Finished():
                self._finished(event)
            case _:
                return
        running = len(self._running)
        self.windows.hold(event.now_s, "running", running)
        self.windows.hold(event.now_s, "waiting", len(self._live) - running)

    def _stretched(self, event: DecodeStretch) -> None:
        for committed_s in event.committed_s:
            self.windows.add(committed_s, len(event.requests))
        for request in event.requests:
            if self._live[request].first_token_s is None:
                self._live[request].emitted(event.committed_s[0], 1)

    def _finished(self, event: Finished) -> None:
        request = self._live.pop(event.request)
        self._running.discard(event.request)
        self._end_s = max(self._end_s, event.now_s)
        self._sample(request, event)

    def _sample(self, request: RequestMetrics, event: Finished) -> None:
        """Every ``_stride``-th request is kept; the stride doubles where they become too many."""
        if event.request % self._stride:
            return
        self._timeline[event.request] = {
            "index": event.request,
            "sent_s": request.arrived_s,
            "first_token_s": request.first_token_s,
            "ended_s": event.now_s,
            "outcome": "cancelled" if event.reason == "abort" else event.reason,
        }
        while len(self._timeline) > MAX_TIMELINE:
            self._stride *= 2
            self._timeline = {index: row for index, row in self._timeline.items() if index % self._stride == 0}
