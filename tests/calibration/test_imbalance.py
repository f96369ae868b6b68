"""The busiest expert rank: against every outcome, against drawn ones, against the engine's own routing, and at its limits."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibration.features import Array
from calibration.imbalance import (
    BALANCED,
    ExpertBalance,
    ExpertLoads,
    choice_probabilities,
    expected_maximum,
    expert_loads,
    parse_expert_balance,
)
from engine.core.errors import ConfigError, DomainError
from engine.core.expert_balance import imbalance
from engine.core.expert_map import ExpertMap, balanced_map, even_map
from engine.core.layout import parse_layout
from engine.core.sharding import RankPlace
from engine.parallel.experts import Routing, forced_ids


def numbers(tokens: float) -> Array:
    return np.array([float(tokens)])


def busiest(chosen_TE: NDArray[np.bool_], placement: ExpertMap, first_turn: int = 0) -> tuple[int, int, int]:
    """(choices, experts touched, rows) at their most over the ranks, an expert's tokens dealt out over its slots in turn."""
    choices, touched, rows = [], [], []
    slots = placement.slots()
    turn = np.arange(len(chosen_TE)) + first_turn
    for rank in range(placement.num_ranks):
        here = []
        for slot in range(rank * placement.slots_per_rank, (rank + 1) * placement.slots_per_rank):
            expert = placement.logical[slot]
            mine = slots[expert].index(slot)
            here.append(chosen_TE[:, expert] & (turn % len(slots[expert]) == mine))
        taken = np.stack(here)
        choices.append(int(taken.sum()))
        touched.append(int(taken.any(axis=1).sum()))
        rows.append(int(taken.any(axis=0).sum()))
    return max(choices), max(touched), max(rows)


def of(loads: ExpertLoads, tokens: float) -> tuple[float, float, float]:
    return tuple(float(of(numbers(tokens))[0]) for of in (loads.choices, loads.touched, loads.rows))  # type: ignore[return-value]


# --- every outcome ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "tokens"),
    [(4, 1, 2, 1), (4, 1, 2, 4), (4, 2, 2, 1), (4, 2, 2, 4), (4, 2, 4, 3), (6, 2, 3, 3), (8, 1, 4, 4), (8, 3, 2, 2), (8, 1, 8, 4)],
)
def test_balanced_experts_are_as_over_all_outcomes(experts: int, top_k: int, ranks: int, tokens: int) -> None:
    subsets = list(itertools.combinations(range(experts), top_k))
    placement, found = even_map(experts, 0, ranks), []
    for outcome in itertools.product(subsets, repeat=tokens):
        chosen = np.zeros((tokens, experts), dtype=bool)
        for token, subset in enumerate(outcome):
            chosen[token, list(subset)] = True
        found.append(busiest(chosen, placement))
    one, wanted = of(expert_loads(experts, top_k, 1, ranks), tokens), np.mean(found, axis=0)
    assert one[:2] == pytest.approx(tuple(wanted[:2]), rel=0.08)
    if ranks > top_k:  # where rows go to the ranks of their experts alone
        assert one[2] == pytest.approx(wanted[2], rel=0.1)


# --- drawn outcomes --------------------------------------------------------------------------------------------------------------


def drawn(random: np.random.Generator, chances: Array, tokens: int) -> NDArray[np.bool_]:
    """[T, E] with exactly these probabilities of each expert: systematic sampling in an order drawn for each token."""
    order = np.argsort(random.random((tokens, len(chances))), axis=1)
    ends = np.cumsum(chances[order], axis=1)
    ends[:, -1] = round(chances.sum())
    starts, first = np.hstack((np.zeros((tokens, 1)), ends[:, :-1])), random.random((tokens, 1))
    chosen = np.zeros((tokens, len(chances)), dtype=bool)
    np.put_along_axis(chosen, order, np.floor(ends - first) > np.floor(starts - first), axis=1)
    return chosen


@pytest.mark.parametrize("tokens", [1, 5, 24, 150])
@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "redundant", "zipf", "rebalanced"),
    [
        (16, 2, 2, 0, 0.0, False),
        (16, 2, 2, 0, 1.0, False),
        (16, 2, 8, 0, 0.8, False),
        (32, 4, 8, 8, 0.7, False),
        (64, 6, 16, 16, 0.8, True),
        (384, 6, 64, 0, 0.5, False),
    ],
)
def test_the_busiest_rank_is_as_drawn(
    experts: int, top_k: int, ranks: int, redundant: int, zipf: float, rebalanced: bool, tokens: int
) -> None:
    random, balance, num_layers = np.random.default_rng(tokens), ExpertBalance(zipf=zipf), 3
    found: list[tuple[int, int, int]] = []
    for chances in choice_probabilities(balance, experts, top_k, num_layers):
        placement = balanced_map(list(chances), redundant, ranks) if rebalanced else even_map(experts, redundant, ranks)
        found += [busiest(drawn(random, chances, tokens), placement, turn) for turn in range(200 if experts < 100 else 60)]
    loads = expert_loads(experts, top_k, num_layers, ranks, num_redundant=redundant, balance=balance, is_rebalanced=rebalanced)
    error = 4 * np.std(found, axis=0) / len(found) ** 0.5
    for name, one, wanted, noise in zip(("choices", "touched", "rows"), of(loads, tokens), np.mean(found, axis=0), error, strict=True):
        if name != "rows" or ranks > top_k:
            assert one == pytest.approx(wanted, rel=0.1 if tokens == 1 or name == "rows" else 0.05, abs=float(noise)), name


def test_the_largest_of_independent_normals() -> None:
    """Large counts are normal: the mean of the largest of n is m + s e(n), e(n) from Pearson and Hartley's table."""
    for count, wanted in ((2, 0.56419), (3, 0.84628), (10, 1.53875)):
        mean, variance = np.full((1, count), 50_000.0), np.full((1, count), 40_000.0)
        free = (expected_maximum(mean, variance, is_total_known=False)[0] - 50_000) / 200
        held = (expected_maximum(mean, variance, is_total_known=True)[0] - 50_000) / 200
        assert free == pytest.approx(wanted, abs=0.01)
        # Held to their total each has less spread, by sqrt((n - 1) / n), and they spread apart: as far from their mean as free ones are.
        assert held == pytest.approx(wanted, abs=0.05)


# --- the engine's own routing ----------------------------------------------------------------------------------------------------


def forced_counts(routing: Routing, experts: int, top_k: int, tokens: int, ranks: int) -> list[int]:
    """What the engine would count: the ids its measuring switch deals out."""
    place = RankPlace(layout=parse_layout(f"tp1dp{ranks}ep{ranks}").decode.unit)

    class Groups:
        pass

    class Spread:
        groups = Groups()

    Groups.place = place  # type: ignore[attr-defined]
    ids = forced_ids(routing, torch.zeros((tokens, top_k)), experts, Spread(), [tokens] * ranks)  # type: ignore[arg-type]
    return torch.bincount(ids.flatten(), minlength=experts).tolist()


def test_forced_imbalance_loads_one_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"expert_tokens": [forced_counts("imbalanced", 16, 2, 40, 4)] * 3}))
    loads = expert_loads(16, 2, 3, 4, balance=parse_expert_balance(f"measured:{path}"))
    for tokens in (1, 7, 300):
        assert loads.imbalance(numbers(tokens)) == pytest.approx(4.0)
        assert of(loads, tokens) == pytest.approx((2 * tokens, 2, tokens))
    assert loads.visited == pytest.approx(1 / 4)


def test_forced_balance_is_even_in_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"expert_tokens": [forced_counts("balanced", 16, 2, 64, 4)]}))
    measured, law = (expert_loads(16, 2, 1, 4, balance=balance) for balance in (parse_expert_balance(f"measured:{path}"), BALANCED))
    assert of(measured, 100) == pytest.approx(of(law, 100))
    assert measured.imbalance(numbers(1e9)) == pytest.approx(1.0, abs=0.01)


# --- limits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(16, 2, 2), (32, 4, 8), (384, 6, 64)])
def test_many_tokens_leave_no_chance(experts: int, top_k: int, ranks: int) -> None:
    loads = expert_loads(experts, top_k, 1, ranks)
    assert loads.imbalance(numbers(1e7)) == pytest.approx(1.0, abs=0.02)
    assert loads.touched(numbers(1e7)) == pytest.approx(experts / ranks)


@pytest.mark.parametrize("zipf", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("redundant", [0, 8])
def test_many_tokens_are_as_uneven_as_their_experts(zipf: float, redundant: int) -> None:
    balance = ExpertBalance(zipf=zipf)
    chances = choice_probabilities(balance, 32, 4, 5)
    wanted = np.mean([imbalance(even_map(32, redundant, 8), list(layer)) for layer in chances])
    found = expert_loads(32, 4, 5, 8, num_redundant=redundant, balance=balance).imbalance(numbers(1e7))
    assert found == pytest.approx(wanted, rel=0.01)


def test_a_steep_law_sends_everything_to_the_same_experts() -> None:
    loads = expert_loads(16, 1, 1, 4, balance=ExpertBalance(zipf=8.0))
    assert loads.imbalance(numbers(1000)) == pytest.approx(4.0, rel=0.01)
    assert expert_loads(16, 1, 1, 1, balance=ExpertBalance(zipf=8.0)).imbalance(numbers(1000)) == pytest.approx(1.0)


def test_redundant_experts_pay_where_they_are_placed_by_load() -> None:
    """384 experts, Zipf 0.8, 64 ranks: DeepInfer 0.1.0's own placement leaves 5.55 without copies, and nearly nothing with 64."""
    options = {"balance": ExpertBalance(zipf=0.8), "is_rebalanced": True}
    plain, copies = (expert_loads(384, 6, 4, 64, num_redundant=count, **options) for count in (0, 64))
    assert plain.imbalance(numbers(2048)) == pytest.approx(5.55, rel=0.02)
    assert copies.imbalance(numbers(1e6)) < 1.05
    static = expert_loads(384, 6, 4, 64, balance=ExpertBalance(zipf=0.8))
    assert static.imbalance(numbers(2048)) > plain.imbalance(numbers(2048))


# --- properties ------------------------------------------------------------------------------------------------------------------

case_of = st.sampled_from(
    [
        (16, 2, 3, 2, 0, 0.0), (16, 2, 3, 2, 4, 1.3), (32, 4, 3, 8, 0, 0.6), (24, 3, 2, 12, 12, 1.0), (8, 8, 1, 4, 0, 0.0),
        (9, 1, 1, 3, 0, 4.0),
    ]
)  # fmt: skip


@functools.cache
def made(case: tuple[int, int, int, int, int, float]) -> ExpertLoads:
    experts, top_k, layers, ranks, redundant, zipf = case
    return expert_loads(experts, top_k, layers, ranks, num_redundant=redundant, balance=ExpertBalance(zipf=zipf))


@settings(max_examples=100, deadline=None)
@given(case_of, st.floats(0, 1e8), st.floats(1, 4))
def test_loads_are_bounded_and_grow_with_the_tokens(case: tuple[int, int, int, int, int, float], tokens: float, times: float) -> None:
    experts, top_k, _, ranks, redundant, _ = case
    before, after = of(made(case), tokens), of(made(case), tokens * times)
    for one, two in zip(before, after, strict=True):
        assert 0.0 <= one <= two * (1 + 1e-9)
    choices, touched, rows = before
    assert tokens * top_k / ranks * (1 - 1e-9) <= choices <= tokens * top_k * (1 + 1e-6)
    assert touched <= (experts + redundant) / ranks * (1 + 1e-9)
    assert rows <= tokens * (1 + 1e-9)
    assert 1 / ranks * (1 - 1e-9) <= made(case).visited <= 1.0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(16, 2, 2), (32, 4, 4), (24, 2, 8)]), st.sampled_from([0, 3, 6, 9]), st.sampled_from([4, 40, 4000]))
def test_a_steeper_law_is_less_even(shape: tuple[int, int, int], tenths: int, tokens: int) -> None:
    experts, top_k, ranks = shape
    flat, steep = (made((experts, top_k, 6, ranks, 0, value / 10)).imbalance(numbers(tokens)) for value in (tenths, tenths + 3))
    assert flat <= steep * 1.005  # of few tokens the chance is a little smaller where fewer experts are likely


@pytest.mark.parametrize("zipf", [0.0, 0.8])
def test_more_ranks_are_less_even(zipf: float) -> None:
    for tokens in (2, 64, 5000):
        found = [float(made((48, 4, 6, ranks, 0, zipf)).imbalance(numbers(tokens))[0]) for ranks in (1, 2, 4, 8, 16, 48)]
        assert found == sorted(found)
        assert found[0] == pytest.approx(1.0)


@given(st.floats(0, 8), st.sampled_from([(16, 2), (8, 7), (5, 5), (40, 1)]))
@settings(max_examples=40, deadline=None)
def test_probabilities_add_up_to_the_experts_of_a_token(zipf: float, shape: tuple[int, int]) -> None:
    chances = choice_probabilities(ExpertBalance(zipf=zipf), *shape, 3)
    assert chances.sum(axis=1) == pytest.approx(np.full(len(chances), shape[1]))
    assert (chances >= 0).all()
    assert (chances <= 1 + 1e-12).all()


# --- what is refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["even", "zipf:", "zipf:x", "zipf:-1", "zipf:9", "zipf:nan", "zipf:inf", "measured:/nowhere/at/all"])
def test_other_balances_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_expert_balance(text)


def test_balances_are_read() -> None:
    assert parse_expert_balance("balanced").is_balanced
    assert parse_expert_balance("zipf:0.8") == ExpertBalance(zipf=0.8)


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 layers of \[4\] experts are counted; the model has 3 of 4"):
        expert_loads(4, 2, 3, 2, balance=ExpertBalance(counts=((1, 2, 3, 4),) * 2))
    with pytest.raises(ConfigError, match=r"of \[4\] experts are counted; the model has 1 of 8"):
        expert_loads(8, 2, 1, 2, balance=ExpertBalance(counts=((1, 2, 3, 4),)))
    with pytest.raises(ConfigError, match="1 experts of a layer have tokens; a token chooses 2"):
        expert_loads(4, 2, 1, 2, balance=ExpertBalance(counts=((0, 9, 0, 0),)))
    with pytest.raises(DomainError):
        expert_loads(0, 0, 1, 1)
