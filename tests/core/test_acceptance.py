"""Drafts accepted: shares, conditional probabilities and draws against each other and against closed forms."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.acceptance import (
    MAX_DRAFT_TOKENS,
    acceptance_of_counts,
    acceptance_probabilities,
    draw_accepted,
    mean_accepted,
)
from engine.core.errors import ConfigError

conditional = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def distribution(probabilities: list[float]) -> list[float]:
    """Probability of each number accepted, over every outcome of every position."""
    found = [0.0] * (len(probabilities) + 1)
    for outcome in itertools.product((False, True), repeat=len(probabilities)):
        weight = 1.0
        for probability, is_accepted in zip(probabilities, outcome, strict=True):
            weight *= probability if is_accepted else 1.0 - probability
        found[len(list(itertools.takewhile(bool, outcome)))] += weight
    return found


@settings(max_examples=60)
@given(conditional)
def test_the_mean_is_that_of_every_outcome(probabilities: list[float]) -> None:
    wanted = sum(count * weight for count, weight in enumerate(distribution(probabilities)))
    assert mean_accepted(probabilities) == pytest.approx(wanted, abs=1e-12)


@given(st.integers(1, MAX_DRAFT_TOKENS).flatmap(lambda count: st.tuples(st.just(count), st.floats(0, count))))
def test_a_mean_is_met_by_one_probability(case: tuple[int, float]) -> None:
    count, mean = case
    found = acceptance_probabilities(mean, count)
    assert len(found) == count
    assert len(set(found)) == 1
    assert 0.0 <= found[0] <= 1.0
    assert mean_accepted(found) == pytest.approx(mean, abs=1e-9)


def test_two_drafts_have_a_closed_form() -> None:
    """p + p^2 = mean."""
    assert acceptance_probabilities(1.0, 2)[0] == pytest.approx((5**0.5 - 1) / 2)
    assert acceptance_probabilities(0.75, 2) == pytest.approx((0.5, 0.5))
    assert acceptance_probabilities(0.0, 3) == (0.0,) * 3
    assert acceptance_probabilities(3.0, 3) == (1.0,) * 3
    assert acceptance_probabilities(0.0, 0) == ()


@given(conditional)
def test_shares_are_the_products_of_the_conditional_probabilities(probabilities: list[float]) -> None:
    shares = list(itertools.accumulate(probabilities, lambda one, two: one * two))
    found = acceptance_probabilities(shares, len(shares))
    assert mean_accepted(found) == pytest.approx(sum(shares), abs=1e-9)
    assert list(itertools.accumulate(found, lambda one, two: one * two)) == pytest.approx(shares, abs=1e-12)


def test_draws_have_the_distribution() -> None:
    probabilities, draw, count = [0.9, 0.8, 0.6], random.Random(1), 20_000
    seen = [0] * 4
    for _ in range(count):
        seen[draw_accepted(probabilities, 3, draw.random)] += 1
    for number, weight in zip(seen, distribution(probabilities), strict=True):
        assert number / count == pytest.approx(weight, abs=4 * (weight * (1 - weight) / count) ** 0.5)


def test_a_draw_looks_at_no_more_drafts_than_there_are() -> None:
    assert draw_accepted([1.0] * 5, 2, lambda: 0.5) == 2
    assert draw_accepted([1.0, 0.0, 1.0], 3, lambda: 0.0) == 1
    assert draw_accepted([1.0], 0, lambda: 0.0) == 0


def test_counters_of_an_engine_are_its_shares() -> None:
    shares = acceptance_of_counts([90, 72, 0], [100, 100, 0])
    assert shares == (0.9, 0.72, 0.0)
    assert acceptance_probabilities(shares, 3) == pytest.approx((0.9, 0.8, 0.0))
    # 100 verifications of one draft, 10 of two: the second position's share is of those ten.
    assert acceptance_of_counts([50, 9], [110, 10]) == (50 / 110, 50 / 110)


@pytest.mark.parametrize(
    ("acceptance", "draft_tokens", "words"),
    [
        (-0.1, 3, "a mean from 0 to the draft tokens = 3"),
        (3.1, 3, "acceptance is 3.1"),
        (float("nan"), 3, "acceptance is nan"),
        ([0.9, 0.8], 3, "has 2 positions"),
        ([0.9, 0.95, 0.5], 3, "position 1 is 0.95; needed: 0 to 0.9"),
        ([0.9, float("nan"), 0.5], 3, "position 1"),
        ([1.2], 1, "position 0 is 1.2"),
        (0.0, 65, "draft tokens are 65"),
    ],
)
def test_impossible_acceptances_are_refused(acceptance: float | list[float], draft_tokens: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        acceptance_probabilities(acceptance, draft_tokens)


@pytest.mark.parametrize(("accepted", "drafts"), [([2], [1]), ([-1], [1]), ([1, 1], [1])])
def test_impossible_counters_are_refused(accepted: list[int], drafts: list[int]) -> None:
    with pytest.raises(ConfigError):
        acceptance_of_counts(accepted, drafts)
