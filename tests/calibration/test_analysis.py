"""Busy time, overlap, gaps, waits and the replay, against a model that counts single microseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.analysis import Intervals, at_depth, intersection_s, length_s, summarise, union
from calibration.collectives import groups, peer_waits
from calibration.errors import ReplayError
from calibration.replay import build_replay, checked_replay
from calibration.trace import KernelRows, KernelTable, Provenance

US = 1e-6
Row = tuple[int, int, int, int, str | None, int | None]  # start and duration (us), rank, stream, component, step


def table_of(rows: list[Row]) -> KernelTable:
    collected = KernelRows()
    for start, duration, rank, stream, component, step in rows:
        collected.add(
            start_s=start * US,
            duration_s=duration * US,
            rank=rank,
            stream=str(stream),
            kernel=component or "k",
            component=component,
            step=step,
        )
    return collected.finish(Provenance("t", "", "test"))


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([begin for begin, _ in pairs], dtype=np.float64)
    return start, start + np.array([length for _, length in pairs], dtype=np.float64)


def seconds_of(pairs: list[tuple[int, int]]) -> set[int]:
    """The naive model: every whole unit of time that is covered."""
    return {unit for begin, length in pairs for unit in range(begin, begin + length)}


@settings(max_examples=50)
@given(spans)
def test_union_against_single_units(pairs: list[tuple[int, int]]) -> None:
    start, end = union(*arrays(pairs))
    assert length_s((start, end)) == len(seconds_of(pairs))
    assert (start[1:] > end[:-1]).all()
    assert (end > start).all()


@settings(max_examples=50)
@given(st.lists(spans, min_size=1, max_size=4), st.integers(1, 4))
def test_depth_against_single_units(tracks: list[list[tuple[int, int]]], depth: int) -> None:
    unions: list[Intervals] = [union(*arrays(pairs)) for pairs in tracks]
    counts = [sum(unit in seconds_of(pairs) for pairs in tracks) for unit in range(81)]
    assert at_depth(unions, depth) == sum(count >= depth for count in counts)


@settings(max_examples=50)
@given(spans, spans)
def test_intersection_against_single_units(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert intersection_s(union(*arrays(first)), union(*arrays(second))) == len(seconds_of(first) & seconds_of(second))


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 80), st.integers(0, 15), st.integers(0, 2), st.integers(0, 2),
        st.sampled_from(["projection", "all_reduce", "norm", None]), st.sampled_from([None, 0, 1]),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=60)
@given(rows_strategy)
def test_a_rank_s_time_adds_up(rows: list[Row]) -> None:
    summary = summarise(table_of(rows))
    for rank in summary.ranks:
        mine = [(row[0], row[1], row[3]) for row in rows if row[2] == rank.rank]
        busy = seconds_of([(start, duration) for start, duration, _ in mine])
        streams = [seconds_of([(start, duration) for start, duration, stream in mine if stream == key]) for key in {row[2] for row in mine}]
        overlapped = [unit for unit in busy if sum(unit in stream for stream in streams) > 1]
        assert rank.busy_s == pytest.approx(len(busy) * US, abs=1e-12)
        assert rank.overlap_s == pytest.approx(len(overlapped) * US, abs=1e-12)
        assert rank.busy_s + rank.gap_s == pytest.approx(summary.span_s, abs=1e-12)
        assert rank.launch_gap_s + rank.step_gap_s + rank.edge_gap_s == pytest.approx(rank.gap_s, abs=1e-12)
        other = seconds_of([(row[0], row[1]) for row in rows if row[2] == rank.rank and row[4] != "all_reduce"])
        assert rank.exposed_communication_s == pytest.approx(len(busy - other) * US, abs=1e-12)
    assert sum(time.seconds for time in summary.by_component.values()) == pytest.approx(sum(row[1] for row in rows) * US)
    assert 0 <= summary.unclassified_share <= 1


def test_gaps_inside_and_between_steps() -> None:
    summary = summarise(table_of([(0, 10, 0, 0, None, 0), (13, 7, 0, 0, None, 0), (25, 5, 0, 0, None, 1), (26, 2, 0, 1, None, 1)]))
    assert summary.launch_gap_s == pytest.approx(3 * US)
    assert summary.step_gap_s == pytest.approx(5 * US)
    assert summary.overlap_s == pytest.approx(2 * US)


# Rank 1 comes 6 us late to the all-reduce, whose own time is 4 us; rank 0 waits inside its kernel.
LATE: list[Row] = [
    (0, 10, 0, 0, "projection", 0), (10, 10, 0, 0, "all_reduce", 0), (20, 5, 0, 0, "norm", 0),
    (0, 16, 1, 0, "projection", 0), (16, 4, 1, 0, "all_reduce", 0), (20, 5, 1, 0, "norm", 0),
]  # fmt: skip


def test_waiting_for_a_peer_is_no_gap() -> None:
    table = table_of(LATE)
    summary = summarise(table)
    assert [rank.peer_wait_s for rank in summary.ranks] == pytest.approx([6 * US, 0])
    assert summary.by_component["all_reduce"].peer_wait_s == pytest.approx(6 * US)
    assert summary.gap_s == pytest.approx(0, abs=1e-12)


def test_replay_moves_the_wait_to_where_it_comes_from() -> None:
    table = table_of(LATE)
    replay = checked_replay(table)
    assert replay.span_s() == pytest.approx(25 * US)
    faster = np.where((table.rank == 1) & (table.duration_s > 15 * US), 10 * US, replay.own_s)
    assert replay.span_s(faster) == pytest.approx(19 * US)  # nobody waits: 10 + 4 + 5


def test_ranks_that_disagree_about_their_collectives_are_not_matched() -> None:
    table = table_of([*LATE, (30, 4, 1, 0, "all_reduce", 0)])
    assert not groups(table).any()
    assert not peer_waits(table).any()


def test_replay_keeps_streams_apart_and_their_order() -> None:
    """Stream 1 starts after the first kernel of stream 0 and runs beside the second; the third waits for both."""
    table = table_of([(0, 10, 0, 0, None, 0), (10, 20, 0, 0, None, 0), (12, 10, 0, 1, None, 0), (31, 4, 0, 0, None, 0)])
    replay = checked_replay(table)
    start, _ = replay.run()
    np.testing.assert_allclose(start, table.start_s)
    start, _ = replay.run(np.array([5, 20, 10, 4]) * US)
    np.testing.assert_allclose(start, np.array([0, 5, 7, 26]) * US)


def test_replay_refuses_what_it_cannot_reproduce() -> None:
    """Two kernels of one stream at the same time: not what a stream does."""
    table = table_of([(0, 100, 0, 0, None, 0), (50, 100, 0, 0, None, 0)])
    with pytest.raises(ReplayError, match=r"span 0\.0002 s; recorded were 0\.00015 s \(\+33\.3%, allowed 2%\)"):
        checked_replay(table)


@st.composite
def serial_streams(draw: st.DrawFn) -> list[Row]:
    """Ranks of streams whose kernels do not overlap on their stream."""
    rows: list[Row] = []
    for rank in range(draw(st.integers(1, 3))):
        for stream in range(draw(st.integers(1, 3))):
            now = draw(st.integers(0, 20))
            for _ in range(draw(st.integers(1, 8))):
                now += draw(st.integers(0, 5))
                duration = draw(st.integers(0, 9))
                rows.append((now, duration, rank, stream, draw(st.sampled_from(["norm", "all_reduce"])), 0))
                now += duration
    return rows


@settings(max_examples=80)
@given(serial_streams())
def test_replay_of_serial_streams_is_the_recording(rows: list[Row]) -> None:
    table = table_of(rows)
    start, end = build_replay(table).run()
    np.testing.assert_allclose(start, table.start_s, atol=1e-12)
    np.testing.assert_allclose(end, table.end_s, atol=1e-12)


@settings(max_examples=40)
@given(serial_streams(), st.floats(0, 1))
def test_less_work_is_never_slower(rows: list[Row], factor: float) -> None:
    replay = build_replay(table_of(rows))
    assert replay.span_s(replay.own_s * factor) <= replay.span_s() + 1e-12
