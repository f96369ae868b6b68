"""Which replica a request goes to."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from engine.core.events import Arrived
from tests.twin.twin_support import GivenWorkload, Log, constant, sim_request, twin_config
from twin.cluster import simulate
from twin.result import SimResult
from twin.workload.types import SimRequest


def route(routing: str, requests: list[SimRequest], num_replicas: int = 3) -> tuple[SimResult, dict[int, int]]:
    """The result, and the replica of each request."""
    log = Log()
    config = twin_config(num_replicas=num_replicas, routing=routing, num_blocks=200)
    result = simulate(config, GivenWorkload(requests), constant(0.1), observers=[log])
    return result, {event.request: replica for replica, events in log.by_replica.items() for event in events if isinstance(event, Arrived)}


def test_round_robin_takes_turns() -> None:
    _, places = route("round-robin", [sim_request(index, 0.01 * index, 4, 30) for index in range(9)])
    assert places == {index: index % 3 for index in range(9)}


def test_least_tokens_goes_where_the_fewest_prompt_tokens_are() -> None:
    sizes = [40, 10, 20, 5, 10, 1]
    _, places = route("least-tokens", [sim_request(index, 0.01 * index, size, 30) for index, size in enumerate(sizes)])
    load, wanted = [0, 0, 0], {}
    for index, size in enumerate(sizes):
        wanted[index] = load.index(min(load))
        load[wanted[index]] += size
    assert places == wanted


def test_least_tokens_forgets_who_has_ended() -> None:
    requests = [sim_request(0, 0.0, 40, 1), *(sim_request(index, 10.0 * index, 4, 1) for index in range(1, 4))]
    assert route("least-tokens", requests)[1] == dict.fromkeys(range(4), 0)


def families(num_families: int) -> list[SimRequest]:
    """Each family's members share all of a long prompt but its end."""
    requests = []
    for index in range(8 * num_families):
        prompt = array("i", [index % num_families + 2, *[1] * 39, 100 + index])
        requests.append(sim_request(index, 2.0 * index, 41, 2, prompt=prompt))
    return requests


def test_prefix_aware_keeps_families_together() -> None:
    result, places = route("prefix-aware", families(4))
    homes = {family: Counter(places[index] for index in range(family, 32, 4)) for family in range(4)}
    assert all(len(home) == 1 for home in homes.values())
    blind, _ = route("round-robin", families(4))
    assert result.prefix_hit_rate is not None
    assert blind.prefix_hit_rate is not None
    assert result.prefix_hit_rate == pytest.approx(7 / 8 * 40 / 41)
    assert blind.prefix_hit_rate < result.prefix_hit_rate
