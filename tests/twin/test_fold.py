"""Distributions that do not grow, and a simulation that does not either."""

from __future__ import annotations

import gc
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.metrics import distribution
from tests.twin.twin_support import ClosedLoop, constant, twin_config
from twin import fold
from twin.cluster import Cluster
from twin.fold import Values

seconds = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=60)


@given(seconds)
def test_exact_values_are_those_of_the_log(values: list[float]) -> None:
    kept = Values()
    for value in values:
        kept.extend((value,))
    assert kept.is_exact
    assert kept.distribution() == distribution(values)


@given(seconds)
def test_bins_are_off_by_half_their_width(values: list[float]) -> None:
    binned, ordered = Values(max_exact=0), sorted(values)
    binned.extend(values)
    found = binned.distribution()
    assert not binned.is_exact
    assert (found.count, found.max) == (len(values), max(values))
    assert found.mean == pytest.approx(sum(values) / len(values))
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == pytest.approx(ordered[math.floor(share * (len(values) - 1))], rel=0.006)


@given(seconds, st.integers(1, 59))
def test_exact_values_become_bins_when_they_are_too_many(values: list[float], bound: int) -> None:
    bounded, flat = Values(max_exact=bound), Values(max_exact=0)
    for value in values:
        bounded.extend((value,))
        flat.extend((value,))
    if len(values) <= bound:
        assert bounded.is_exact
        assert bounded.distribution() == distribution(values)
    else:
        one, two = bounded.distribution(), flat.distribution()
        assert not bounded.is_exact
        assert (one.p50, one.p90, one.p99, one.max, one.count) == (two.p50, two.p90, two.p99, two.max, two.count)
        assert one.mean == pytest.approx(two.mean)


def test_no_values_have_no_distribution() -> None:
    assert Values().distribution() == Values(max_exact=0).distribution() == distribution([])


def kept_bytes(num_requests: int) -> int:
    """What a simulation holds at its end."""
    cluster = Cluster(twin_config(metrics="flat", prefix_caching=False), ClosedLoop(num_requests, 6, 5, 3), constant(0.1))
    gc.collect()
    tracemalloc.start()
    try:
        cluster.run()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_is_flat_in_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_BINNED_AT_ONCE", 64)  # values are put into bins so many at a time
    kept_bytes(50)  # what is loaded once
    few, many = kept_bytes(200), kept_bytes(700)
    assert many - few < 20 * 500  # bytes a request: less than any object of it
