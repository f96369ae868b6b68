"""Re-balancing: it pays where it moves, and it leaves alone what does not gain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.expert_balance import LEAST_CHOICES_PER_EXPERT, ExpertBalancer, first_maps, imbalance
from engine.core.expert_map import even_map, rank_loads
from engine.core.layout import Layout
from engine.core.sharding import RankPlace
from tests.core.test_tensors import dense_spec
from tests.model.engine_harness import small_v41_spec


@given(st.lists(st.integers(0, 5000), min_size=8, max_size=8), st.sampled_from([0, 2, 4]), st.sampled_from([2, 4]))
@settings(max_examples=200, deadline=None)
def test_what_is_proposed_is_sound_and_pays(loads: list[int], redundant: int, ranks: int) -> None:
    if redundant % ranks:
        redundant = ranks
    start = even_map(8, redundant, ranks)
    balancer = ExpertBalancer([start])
    balancer.add([loads])
    proposed = balancer.propose()
    if proposed is None:
        assert balancer.maps == (start,)
        return
    proposed[0].check()
    assert max(rank_loads(start, loads)) >= 1.05 * max(rank_loads(proposed[0], loads)) - 1e-9
    assert imbalance(proposed[0], loads) <= imbalance(start, loads)
    # The same loads again: there is nothing left to gain.
    balancer.add([loads])
    assert balancer.propose() is None
    assert balancer.num_rebalances == 1


def test_two_busy_experts_of_one_rank_are_parted() -> None:
    balancer = ExpertBalancer([even_map(4, 0, 2)])
    balancer.add([[1000, 1000, 10, 10]])
    proposed = balancer.propose()
    assert proposed is not None
    busy = {rank for rank in range(2) for expert in proposed[0].of_rank(rank) if expert in (0, 1)}
    assert busy == {0, 1}


def test_few_choices_say_nothing_and_old_reports_are_forgotten() -> None:
    balancer = ExpertBalancer([even_map(4, 0, 2)], window_reports=2)
    few = LEAST_CHOICES_PER_EXPERT * 4 - 1
    balancer.add([[few, 0, 0, 0]])
    assert balancer.propose() is None
    for _ in range(2):
        balancer.add([[500, 500, 500, 500]])
    assert balancer.propose() is None  # even by now: the first report has left the window


def test_reports_that_do_not_fit_are_refused() -> None:
    balancer = ExpertBalancer([even_map(4, 0, 2)])
    for counts in ([[1, 2, 3]], [[1, 2, 3, 4], [1, 2, 3, 4]], []):
        with pytest.raises(InvariantError):
            balancer.add(counts)


def test_first_maps_have_a_layer_each() -> None:
    spec = small_v41_spec()
    assert spec.dspark is not None
    place = RankPlace(layout=Layout(dp=2, ep=2))
    maps = first_maps(spec, place)
    assert len(maps) == spec.num_layers + spec.dspark.num_layers
    assert maps[0].num_experts == spec.num_experts
    assert maps[-1].num_experts == spec.dspark.num_experts
    assert first_maps(spec, RankPlace()) == ()
    assert first_maps(dense_spec(), RankPlace(layout=Layout(tp=2))) == ()
