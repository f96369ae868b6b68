"""What a kernel table says of time: busy, idle, overlapped, waited for a peer, and where.

For one rank, ``span_s = busy_s + gap_s`` where busy is the union of its streams and the span is the whole table's. An idle moment
is a launch gap when the kernels around it belong to one step (or to none), a step gap when they do not, and an edge when the rank had not
begun or was through.
Waiting for a peer is inside kernels: a collective's time beyond that of the rank that waited least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibration.collectives import COLLECTIVES, peer_waits
from calibration.trace import KernelTable, Origin, Provenance
from engine.core.specs import COMPONENTS

Floats = NDArray[np.float64]
Intervals = tuple[Floats, Floats]  # starts and ends, sorted, apart from each other


class ComponentTime(msgspec.Struct, frozen=True):
    """``seconds`` sums the kernels' durations over ranks and streams, waits inside them included."""

    seconds: float
    count: int
    peer_wait_s: float = 0.0


class StreamTime(msgspec.Struct, frozen=True):
    rank: int
    stream: str
    num_kernels: int
    busy_s: float


class RankTime(msgspec.Struct, frozen=True):
    """``overlap_s``: at least two streams busy. ``exposed_communication_s``: a collective runs and nothing else does."""

    rank: int
    busy_s: float
    gap_s: float
    launch_gap_s: float
    step_gap_s: float
    edge_gap_s: float
    overlap_s: float
    peer_wait_s: float
    exposed_communication_s: float


class Summary(msgspec.Struct, frozen=True):
    """``busy_s``, ``gap_s``, ``overlap_s``, ``launch_gap_s``, ``step_gap_s`` and ``peer_wait_s`` are means over the ranks."""

    num_kernels: int
    num_steps: int
    span_s: float
    busy_s: float
    gap_s: float
    launch_gap_s: float
    step_gap_s: float
    overlap_s: float
    peer_wait_s: float
    by_component: dict[str, ComponentTime]
    unclassified_share: float
    unclassified_kernels: dict[str, float]  # the longest ones, with their seconds
    streams: tuple[StreamTime, ...]
    ranks: tuple[RankTime, ...]
    sources: tuple[Provenance, ...]


def summarise(table: KernelTable) -> Summary:
    """Every figure above, from a checked table."""
    waits_s = peer_waits(table)
    ranks = tuple(_rank_time(table, rank, waits_s) for rank in table.ranks)

    def mean(name: str) -> float:
        return float(np.mean([getattr(rank, name) for rank in ranks]))

    return Summary(
        num_kernels=len(table),
        num_steps=len(np.unique(table.step[table.in_step])),
        span_s=table.span_s,
        unclassified_share=table.unclassified_share,
        unclassified_kernels=_unclassified(table),
        by_component=_by_component(table, waits_s),
        streams=_streams(table),
        ranks=ranks,
        sources=table.sources,
        **{name: mean(name) for name in ("busy_s", "gap_s", "launch_gap_s", "step_gap_s", "overlap_s", "peer_wait_s")},
    )


def union(start: Floats, end: Floats) -> Intervals:
    """The intervals' union; touching ones are joined, empty ones dropped."""
    kept = end > start
    start, end = start[kept], end[kept]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    return start[first], end[np.concatenate([np.flatnonzero(first)[1:] - 1, [len(end) - 1]])]


def length_s(intervals: Intervals) -> float:
    return float((intervals[1] - intervals[0]).sum())


def at_depth(parts: Sequence[Intervals], depth: int) -> float:
    """Seconds during which at least ``depth`` of the unions in ``parts`` are busy."""
    edges = np.concatenate([*(part[0] for part in parts), *(part[1] for part in parts)]) if parts else np.zeros(0)
    if not len(edges):
        return 0.0
    change = np.repeat([1, -1], len(edges) // 2)
    order = np.argsort(edges, kind="stable")
    busy = np.cumsum(change[order])[:-1] >= depth
    return float(np.diff(edges[order])[busy].sum())


def intersection_s(first: Intervals, second: Intervals) -> float:
    return at_depth([first, second], 2)


def _rank_time(table: KernelTable, rank: int, waits_s: Floats) -> RankTime:
    mine = table.rank == rank
    start, end, stream = table.start_s[mine], table.end_s[mine], table.stream[mine]
    per_stream = [union(start[stream == key], end[stream == key]) for key in np.unique(stream)]
    busy = union(start, end)
    span_s, busy_s = table.span_s, length_s(busy)
    launch_s, between_s = _gaps(table, mine, busy)
    communicating = np.isin(table.component[mine], [COMPONENTS.index(name) for name in COLLECTIVES])
    communication = union(start[communicating], end[communicating])
    computation = union(start[~communicating], end[~communicating])
    return RankTime(
        rank=rank,
        busy_s=busy_s,
        gap_s=max(0.0, span_s - busy_s),
        launch_gap_s=launch_s,
        step_gap_s=between_s,
        edge_gap_s=max(0.0, span_s - busy_s - launch_s - between_s),
        overlap_s=at_depth(per_stream, 2),
        peer_wait_s=float(waits_s[mine].sum()),
        exposed_communication_s=length_s(communication) - intersection_s(communication, computation),
    )


def _gaps(table: KernelTable, mine: NDArray[np.bool_], busy: Intervals) -> tuple[float, float]:
    """Idle seconds of a rank inside its steps, and between them."""
    gap_start, gap_end = busy[1][:-1], busy[0][1:]
    if not len(gap_start):
        return 0.0, 0.0
    start, end = table.start_s[mine], table.end_s[mine]
    step = np.where(table.in_step[mine], table.step[mine].astype(np.int64) + 1, 0)
    by_end = np.argsort(end, kind="stable")
    before = step[by_end][np.searchsorted(end[by_end], gap_start, side="right") - 1]
    after = step[np.searchsorted(start, gap_end, side="left")]  # rows are ordered by start
    gap_s, inside = gap_end - gap_start, before == after
    return float(gap_s[inside].sum()), float(gap_s[~inside].sum())


def _by_component(table: KernelTable, waits_s: Floats) -> dict[str, ComponentTime]:
    seconds = np.bincount(table.component, weights=table.duration_s, minlength=len(COMPONENTS))
    waits = np.bincount(table.component, weights=waits_s, minlength=len(COMPONENTS))
    counts = np.bincount(table.component, minlength=len(COMPONENTS))
    return {
        name: ComponentTime(float(seconds[code]), int(counts[code]), float(waits[code]))
        for code, name in enumerate(COMPONENTS)
        if counts[code]
    }


def _streams(table: KernelTable) -> tuple[StreamTime, ...]:
    found = []
    for rank in table.ranks:
        mine = table.rank == rank
        for stream in np.unique(table.stream[mine]):
            rows = mine & (table.stream == stream)
            busy_s = length_s(union(table.start_s[rows], table.end_s[rows]))
            found.append(StreamTime(rank, table.stream_names[stream], int(rows.sum()), busy_s))
    return tuple(found)


def _unclassified(table: KernelTable, most: int = 10) -> dict[str, float]:
    rows = table.origin == Origin.NONE
    if not rows.any():
        return {}
    seconds = np.bincount(table.kernel[rows], weights=table.duration_s[rows])
    longest: Any = np.argsort(-seconds, kind="stable")[:most]
    return {table.kernel_names[code]: float(seconds[code]) for code in longest if seconds[code] > 0}
