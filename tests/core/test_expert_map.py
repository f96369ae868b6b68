"""Where experts lie: laws of the maps, and how well the greedy placement balances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import ConfigError, InvariantError
from engine.core.expert_map import ExpertMap, balanced_map, even_map, kept_in_place, moves, rank_loads


def zipf(count: int, exponent: float) -> list[float]:
    return [1000.0 / (rank + 1) ** exponent for rank in range(count)]


@pytest.mark.parametrize(("experts", "redundant", "ranks"), [(8, 0, 1), (8, 0, 4), (16, 8, 4), (6, 6, 2), (384, 64, 64), (8, 16, 4)])
def test_an_even_map_gives_every_rank_as_much(experts: int, redundant: int, ranks: int) -> None:
    placement = even_map(experts, redundant, ranks)
    placement.check()
    assert placement.slots_per_rank == (experts + redundant) // ranks
    own = experts // ranks
    for rank in range(ranks):
        assert placement.of_rank(rank)[:own] == tuple(range(rank * own, (rank + 1) * own))
        assert not set(placement.of_rank(rank)[own:]) & set(placement.of_rank(rank)[:own])  # a copy of one's own would be of no use
    counts = [len(slots) for slots in placement.slots()]
    if redundant <= experts:
        assert max(counts) <= 2


def test_what_does_not_divide_is_refused() -> None:
    for experts, redundant, ranks in ((8, 0, 3), (8, 3, 2), (8, 8, 1)):
        with pytest.raises(ConfigError):
            even_map(experts, redundant, ranks)
    with pytest.raises(ConfigError):
        balanced_map([1.0] * 8, 1, 2)


def test_check_finds_a_missing_expert_and_an_uneven_map() -> None:
    with pytest.raises(InvariantError, match=r"experts \[1\] have no slot"):
        ExpertMap(2, 2, (0, 0)).check()
    with pytest.raises(InvariantError, match="evenly"):
        ExpertMap(2, 2, (0, 1, 0)).check()


@given(st.data())
def test_moves_turn_one_map_into_the_other(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    experts = ranks * data.draw(st.integers(1, 6))
    redundant = 0 if ranks == 1 else ranks * data.draw(st.integers(0, 3))
    loads = st.lists(st.integers(0, 50), min_size=experts, max_size=experts)
    old, new = (balanced_map([float(load) for load in data.draw(loads)], redundant, ranks) for _ in range(2))
    for target in (new, kept_in_place(old, new)):
        target.check()
        held = list(old.logical)
        for move in moves(old, target):
            held[move.slot] = old.logical[move.source_slot]
        assert tuple(held) == target.logical
    kept = kept_in_place(old, new)
    assert [sorted(kept.of_rank(rank)) for rank in range(ranks)] == [sorted(new.of_rank(rank)) for rank in range(ranks)]
    assert len(moves(old, kept)) <= len(moves(old, new))
    assert not moves(old, old)


def test_maps_of_different_shape_are_no_moves() -> None:
    with pytest.raises(InvariantError):
        moves(even_map(8, 0, 2), even_map(8, 2, 2))


def test_the_greedy_placement_balances_skewed_loads() -> None:
    """Zipf(0.8) over 384 experts; the published figure for 64 ranks is 5.55 without redundant experts and 1.07 with 64."""
    loads = zipf(384, 0.8)

    def skew(placement: ExpertMap) -> float:
        sums = rank_loads(placement, loads)
        return max(sums) * len(sums) / sum(sums)

    assert skew(even_map(384, 0, 4)) > 2.5
    assert skew(balanced_map(loads, 0, 4)) < 1.02
    assert skew(balanced_map(loads, 0, 64)) == pytest.approx(5.56, abs=0.02)  # one expert alone is so heavy
    assert skew(balanced_map(loads, 64, 64)) < 1.05


def test_rank_loads_by_hand() -> None:
    placement = ExpertMap(3, 2, (0, 1, 2, 1))
    assert rank_loads(placement, [10.0, 8.0, 2.0]) == [14.0, 6.0]
