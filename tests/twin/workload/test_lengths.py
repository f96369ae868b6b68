"""Lengths against scipy's distributions and plain counting."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.core.errors import ConfigError
from twin.workload.lengths import MAX_LENGTH_TOKENS, Empirical, Independent, Lognormal, Uniform, histogram, parse_lengths

GRID = [(index + 0.5) / 6000 for index in range(6000)]


def test_every_length_of_a_range_is_as_frequent() -> None:
    assert Counter(Uniform(3, 8).draw(uniform) for uniform in GRID) == dict.fromkeys(range(3, 9), 1000)
    assert Uniform(5, 5).draw(0.999) == 5


@pytest.mark.parametrize(("mean", "cv"), [(500.0, 0.3), (2000.0, 1.5), (100.0, 0.0)])
def test_lognormal_quantiles(mean: float, cv: float) -> None:
    """The witness: scipy's distribution with sigma and scale solved from the moments by its own formulas for them."""
    lengths = Lognormal(mean, cv)
    sigma = float(stats.lognorm.std(s=1.0) / stats.lognorm.mean(s=1.0)) if cv == 0 else _sigma(cv)
    for uniform in (0.01, 0.5, 0.9, 0.999):
        wanted = mean if cv == 0 else float(stats.lognorm.ppf(uniform, sigma, scale=mean / stats.lognorm.mean(sigma)))
        assert lengths.draw(uniform) == pytest.approx(max(wanted, 1), abs=0.51)
    assert sum(lengths.draw(uniform) for uniform in GRID) / len(GRID) == pytest.approx(mean, rel=0.02)


def _sigma(cv: float) -> float:
    """By bisection on the distribution's own coefficient of variation."""
    low, high = 1e-3, 5.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if stats.lognorm.std(middle) / stats.lognorm.mean(middle) < cv else (low, middle)
    return low


def test_lognormal_lengths_stay_within_their_ends() -> None:
    lengths = Lognormal(float(MAX_LENGTH_TOKENS), 100.0)
    assert lengths.draw(1 - 2**-52) == MAX_LENGTH_TOKENS
    assert Lognormal(1.0, 100.0).draw(2**-53) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=8, unique_by=lambda pair: pair[0]))
def test_a_histogram_is_drawn_as_it_was_counted(counts: list[tuple[int, int]]) -> None:
    total = sum(count for _, count in counts)
    if total == 0:
        return
    lengths = histogram([value for value, _ in counts], [count for _, count in counts])
    drawn = Counter(lengths.draw((index + 0.5) / (total * 10)) for index in range(total * 10))
    assert drawn == {value: count * 10 for value, count in counts if count}


def test_pairs_stay_together() -> None:
    pairs = Empirical(array("i", [1, 20, 300]), array("i", [9, 8, 7]))
    drawn = Counter(pairs.draw(uniform, 0.5) for uniform in GRID)
    assert drawn == {(1, 9): 2000, (20, 8): 2000, (300, 7): 2000}
    assert (pairs.max_input_tokens, pairs.max_output_tokens) == (300, 9)


def test_lengths_from_text() -> None:
    assert parse_lengths("isl", "7") == Uniform(7, 7)
    assert parse_lengths("isl", " 7:9 ") == Uniform(7, 9)
    assert parse_lengths("isl", "1000", 0.8) == Uniform(800, 1000)
    assert parse_lengths("isl", "3", 0.0) == Uniform(1, 3)
    assert parse_lengths("isl", "600:1000", 0.8) == Uniform(600, 1000)
    assert parse_lengths("isl", "lognormal:200:1.5") == Lognormal(200.0, 1.5)
    both = Independent(Uniform(1, 4), Uniform(10, 13))
    assert both.draw(0.1, 0.9) == (1, 13)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "9:8", "1:2:3", "x", "16777217", "\u0663", "9" * 5000),
        *("lognormal", "lognormal:5", "lognormal:0.5:1", "lognormal:5:nan", "lognormal:5:-1", "lognormal:inf:1", "lognormal:5:101"),
        "lognormal:5:1:1",
    ],
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--isl is ") as caught:
        parse_lengths("isl", text)
    assert len(str(caught.value)) < 250
