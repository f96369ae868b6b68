"""Arrival times against the distributions they should have."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from twin.workload.arrivals import Bursts, Profile, Ramp, Steady, Steps, arrival_times_s


def times_s(profile: Profile, cv: float, count: int, seed: str = "1") -> list[float]:
    return list(itertools.islice(arrival_times_s(profile, cv, seed), count))


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("cv", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("rate_per_s", [0.5, 40.0])
def test_gaps_are_gamma_distributed(cv: float, rate_per_s: float) -> None:
    found = gaps(times_s(Steady(rate_per_s), cv, 5000))
    # Mean 1 / rate with a standard error of cv / (rate sqrt(n)); scipy's gamma distribution is the witness of the shape.
    assert statistics.fmean(found) == pytest.approx(1 / rate_per_s, abs=4 * cv / rate_per_s / math.sqrt(len(found)))
    shape = 1 / cv**2
    assert stats.kstest(found, stats.gamma(shape, scale=1 / (rate_per_s * shape)).cdf).pvalue > 1e-3
    # No memory: neighbouring gaps are uncorrelated.
    assert abs(stats.spearmanr(found[:-1], found[1:]).statistic) < 4 / math.sqrt(len(found))


def test_the_test_of_the_shape_can_fail() -> None:
    found = gaps(times_s(Steady(1.0), 1.2, 5000))
    assert stats.kstest(found, stats.expon.cdf).pvalue < 1e-3


def test_a_metronome_and_all_at_once() -> None:
    assert times_s(Steady(4.0), 0.0, 4) == [0.0, 0.25, 0.5, 0.75]
    assert times_s(Steady(math.inf), 1.0, 3) == [0.0, 0.0, 0.0]


def test_a_first_gap_where_clients_should_not_begin_together() -> None:
    first_s = [next(arrival_times_s(Steady(2.0), 1.0, str(seed), from_start=False)) for seed in range(2000)]
    assert stats.kstest(first_s, stats.expon(scale=0.5).cdf).pvalue > 1e-3


# -- profiles: the inverse against a plain numerical integral of the rate ---------------------------------------------------------


def integral(rate: Callable[[float], float], end_s: float, steps: int = 4000) -> float:
    width_s = end_s / steps
    return math.fsum(rate((index + 0.5) * width_s) for index in range(steps)) * width_s


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0.5, 100), st.floats(0.01, 300))
def test_a_ramp_inverts_its_integral(start: float, end: float, ramp_s: float, expected: float) -> None:
    time_s = Ramp(start, end, ramp_s).time_s(expected)
    on_ramp = integral(lambda at_s: start + (end - start) * at_s / ramp_s, min(time_s, ramp_s), 1000)
    assert on_ramp + max(0.0, time_s - ramp_s) * end == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.5, 20), st.floats(0.05, 1.0), st.floats(0.01, 100))
def test_bursts_invert_their_integral_and_keep_the_mean(rate_per_s: float, period_s: float, share: float, expected: float) -> None:
    bursts = Bursts(rate_per_s, period_s, share)
    time_s = bursts.time_s(expected)
    on_s, begin_s = 0.0, 0.0
    while begin_s < time_s:  # burst by burst
        on_s += min(share * period_s, time_s - begin_s)
        begin_s += period_s
    assert on_s * rate_per_s / share == pytest.approx(expected, rel=1e-6)
    assert time_s % period_s <= share * period_s * (1 + 1e-9) or period_s - time_s % period_s < 1e-6  # nobody comes while it is off
    assert bursts.time_s(1000 * rate_per_s * period_s) == pytest.approx(1000 * period_s, rel=1.01e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 5), st.sampled_from([0.0, 0.5, 3.0, 20.0])), min_size=1, max_size=6),
    st.floats(0.01, 60),
)
def test_steps_invert_their_integral(stretches: list[tuple[float, float]], expected: float) -> None:
    starts_s = list(itertools.accumulate((width_s for width_s, _ in stretches), initial=0.0))[:-1]
    rates = [rate_per_s for _, rate_per_s in stretches]

    def rate(time_s: float) -> float:
        return rates[max(index for index, start_s in enumerate(starts_s) if start_s <= time_s)]

    time_s = Steps(starts_s, rates).time_s(expected)
    if math.isinf(time_s):
        assert rates[-1] == 0
        assert integral(rate, starts_s[-1]) <= expected * 1.01 if starts_s[-1] else True
    else:
        assert integral(rate, time_s) == pytest.approx(expected, rel=0.01, abs=0.05)


def test_steps_wait_through_a_stretch_without_arrivals() -> None:
    profile = Steps([0.0, 2.0, 5.0], [1.0, 0.0, 4.0])
    assert [profile.time_s(expected) for expected in (0.0, 1.5, 2.0, 3.0)] == [0.0, 1.5, 5.0, 5.25]
    assert Steps([0.0, 2.0], [1.0, 0.0]).time_s(2.0) == math.inf
    assert Steps([0.0, 2.0], [0.0, 1.0]).time_s(0.0) == 2.0


def test_poisson_arrivals_on_a_ramp_are_poisson_on_the_clock_of_the_rate() -> None:
    ramp = Ramp(2.0, 30.0, 100.0)
    times = times_s(ramp, 1.0, 3000)
    expected = [2 * t + 28 * t**2 / 200 if t < 100 else 1600 + 30 * (t - 100) for t in times]
    assert stats.kstest(gaps(expected), stats.expon.cdf).pvalue > 1e-3
    assert times == sorted(times)


def test_arrivals_in_bursts_fall_into_the_bursts() -> None:
    times = times_s(Bursts(10.0, 4.0, 0.25), 1.0, 4000)
    assert all(time_s % 4.0 <= 1.0 for time_s in times)
    assert len(times) / times[-1] == pytest.approx(10.0, rel=4 / math.sqrt(len(times)))
