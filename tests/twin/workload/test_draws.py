"""Numbers and token ids by key."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from twin.workload.draws import Draws, TokenIds, mix

GAMMA = 0x9E3779B97F4A7C15
KEYS = st.integers(0, 2**64 - 1)


def test_the_generator_is_splitmix64() -> None:
    # The first numbers of the published reference implementation for the seed 1234567.
    assert [mix(1234567 + index * GAMMA) for index in range(1, 6)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_draws_are_uniform_independent_and_their_own() -> None:
    lengths, arrivals = Draws(3, "lengths"), Draws(3, "arrivals")
    found = [lengths.uniform(index) for index in range(5000)]
    assert stats.kstest(found, stats.uniform.cdf).pvalue > 1e-3
    for other in (found[1:], [arrivals.uniform(index) for index in range(5000)], [Draws(4, "lengths").uniform(i) for i in range(5000)]):
        assert abs(stats.pearsonr(found[: len(other)], other).statistic) < 4 / 5000**0.5
    assert found[7] == Draws(3, "lengths").uniform(7)


def test_uniform_leaves_out_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(0, "x")
    for key, low, high in ((0, 0.0, 1e-15), (2**64 - 1, 1 - 1e-15, 1.0)):
        monkeypatch.setattr(draws, "key", lambda _, key=key: key)
        assert low < draws.uniform(0) < high


@settings(max_examples=40, deadline=None)
@given(KEYS, KEYS, st.integers(0, 70_000), st.integers(0, 70_000), st.sampled_from([(0, 2), (100, 3000), (5, 2**31)]))
def test_a_text_is_a_function_of_its_key(key: int, other: int, count: int, longer: int, ids: tuple[int, int]) -> None:
    tokens = TokenIds(*ids)
    count, longer = sorted((count, longer))
    text = tokens.text(key, longer)
    assert len(text) == longer
    assert tokens.text(key, count) == text[:count]
    assert all(ids[0] <= token < ids[1] for token in itertools.islice(text, 200))
    if key != other and longer >= 64:  # 64 tokens hold a key even where there are two ids alone
        assert tokens.text(other, 64) != text[:64]
    joined = tokens.text(other, 3)
    tokens.append(joined, key, longer)
    assert joined[3:] == text


def test_token_ids_are_spread_over_the_whole_range() -> None:
    text = TokenIds(100, 116).text(7, 16_000)
    counts = [text.count(token) for token in range(100, 116)]
    assert sum(counts) == 16_000
    assert stats.chisquare(counts).pvalue > 1e-3
