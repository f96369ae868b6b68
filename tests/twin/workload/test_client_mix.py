"""Clients with rates of their own, together."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.twin.workload.workload_support import digest, write_lines
from twin.workload.spec import WorkloadSpec, make_workload
from twin.workload.types import SimRequest, Workload

STEADY = {"client": "steady", "rate": 8.0, "input_tokens": 10, "output_tokens": [1, 4]}
BURSTY = {"client": "bursty", "rate": 2.0, "cv": 2.0, "input_tokens": [50, 60], "output_tokens": 9, "prefix_tokens": 100}


def mix(tmp_path: Path, *clients: dict[str, Any], **values: Any) -> Workload:
    return make_workload(WorkloadSpec(workload=write_lines(tmp_path / "clients.jsonl", *clients), **values))


def of_client(requests: list[SimRequest], low: int, high: int) -> list[SimRequest]:
    return [request for request in requests if low <= len(request.prompt) <= high]


def test_each_client_has_its_rate_its_gaps_and_its_lengths(tmp_path: Path) -> None:
    found = list(mix(tmp_path, STEADY, BURSTY, requests=8000).arrivals())
    assert [request.index for request in found] == list(range(8000))
    times = [request.arrival_s for request in found]
    assert times == sorted(times)
    for requests, shape, scale in ((of_client(found, 10, 10), 1.0, 1 / 8), (of_client(found, 150, 160), 1 / 4, 4 / 2)):
        gaps = [later.arrival_s - earlier.arrival_s for earlier, later in itertools.pairwise(requests)]
        assert stats.kstest(gaps, stats.gamma(shape, scale=scale).cdf).pvalue > 1e-3
    assert len(of_client(found, 10, 10)) + len(of_client(found, 150, 160)) == 8000
    outputs = Counter(request.output_tokens for request in of_client(found, 10, 10))
    assert set(outputs) == {1, 2, 3, 4}
    assert len({tuple(request.prompt[:100]) for request in of_client(found, 150, 160)}) == 1
    assert len({tuple(request.prompt) for request in found}) == 8000


def test_a_client_does_not_move_when_another_is_added_behind_it(tmp_path: Path) -> None:
    alone = list(mix(tmp_path, STEADY, requests=50).arrivals())
    both = of_client(list(mix(tmp_path, STEADY, BURSTY, requests=80).arrivals()), 10, 10)
    assert [(request.arrival_s, request.prompt) for request in alone[: len(both)]] == [
        (request.arrival_s, request.prompt) for request in both[: len(alone)]
    ]


def test_rates_over_time_end(tmp_path: Path) -> None:
    client = {**STEADY, "rate": [[0, 5.0], [10, 0.0], [20, 50.0], [30, 0]], "cv": 0}
    workload = mix(tmp_path, client, requests=10_000)
    times = [request.arrival_s for request in workload.arrivals()]
    assert len(times) == workload.num_requests == pytest.approx(550, abs=1)
    assert sum(10 < time_s < 20 for time_s in times) == 0
    assert sum(time_s <= 10 for time_s in times) == pytest.approx(50, abs=1)
    assert max(times) <= 30
    assert workload.follow_up(next(workload.arrivals()), 5.0) is None


def test_a_request_rate_is_the_highest_sum_of_the_rates(tmp_path: Path) -> None:
    clients = [{**STEADY, "rate": [[0, 1.0], [5, 3.0], [9, 0]], "cv": 0}, {**BURSTY, "rate": [[0, 2.0], [5, 1.0], [9, 0]], "cv": 0}]
    assert mix(tmp_path, *clients).num_requests == pytest.approx(5 * 3 + 4 * 4, abs=2)
    assert mix(tmp_path, *clients, request_rate=40.0).num_requests == pytest.approx(10 * (5 * 3 + 4 * 4), abs=2)
    slow = list(mix(tmp_path, *clients, time_scale=2.0).arrivals())
    assert [request.arrival_s for request in slow] == [request.arrival_s * 2 for request in mix(tmp_path, *clients).arrivals()]


def test_a_mix_is_the_same_every_time(tmp_path: Path) -> None:
    workload = mix(tmp_path, STEADY, BURSTY, requests=60, cancel_share=0.5)
    assert digest(workload.arrivals()) == digest(workload.arrivals())
    assert digest(workload.arrivals()) != digest(mix(tmp_path, STEADY, BURSTY, requests=60, cancel_share=0.5, seed=1).arrivals())


def test_clients_do_not_begin_together(tmp_path: Path) -> None:
    times = [request.arrival_s for request in mix(tmp_path, *[{**STEADY, "rate": 0.1}] * 50, requests=400).arrivals()]
    assert times[0] > 0
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert stats.kstest(gaps, stats.expon(scale=1 / 5).cdf).pvalue > 1e-3  # Poisson processes together are one
