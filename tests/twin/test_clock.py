"""Simulated time: what it refuses, and who comes first at the same instant."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import DomainError
from engine.core.plan import StepPlan
from tests.twin.twin_support import Cost, GivenWorkload, constant, sim_request, twin_config
from twin.clock import Clock, Process, Turn
from twin.cluster import simulate

BAD = [math.nan, math.inf, -math.inf, -1e-12]


@pytest.mark.parametrize("delay_s", BAD)
@pytest.mark.parametrize(
    "wait",
    [
        lambda clock, value: clock.after(value, Turn.ARRIVAL, "the door"),
        lambda clock, value: clock.at(value, Turn.STEP_END, "the door"),
        lambda clock, value: clock.call_at(value, lambda: None, "the door"),
    ],
)
def test_impossible_delays_are_refused_by_value_and_place(wait: Callable[[Clock, float], object], delay_s: float) -> None:
    with pytest.raises(DomainError, match="the door") as error:
        wait(Clock(), delay_s)
    assert str(delay_s) in str(error.value)


def test_a_time_that_overflows_is_refused() -> None:
    clock = Clock()
    clock.call_at(1e308, lambda: None, "late")
    clock.run()
    with pytest.raises(DomainError, match="overflows"):
        clock.after(1e308, Turn.ARRIVAL, "later")


@pytest.mark.parametrize("step_s", BAD)
def test_an_impossible_step_time_ends_the_simulation(step_s: float) -> None:
    with pytest.raises(DomainError, match=f"step time of replica 0.*{step_s}"):
        simulate(twin_config(), GivenWorkload([sim_request(0, 0.0, 4, 2)]), constant(step_s))


def test_the_second_of_two_plans_is_refused_as_well() -> None:
    def seconds(plan: StepPlan) -> float:
        return 1.0 if plan.step == 0 else math.nan

    with pytest.raises(DomainError, match="step time of replica 0"):
        simulate(twin_config(), GivenWorkload([sim_request(0, 0.0, 4, 3)]), Cost(seconds))


def test_arrivals_and_followers_do_not_go_back_in_time() -> None:
    with pytest.raises(DomainError, match="arrival of request 1"):
        simulate(twin_config(), GivenWorkload([sim_request(0, 2.0, 4, 1), sim_request(1, 1.0, 4, 1)]), constant(1.0))
    with pytest.raises(DomainError, match="arrival of request 1"):
        simulate(twin_config(), GivenWorkload([sim_request(0, 2.0, 4, 1)], {0: sim_request(1, 0.0, 4, 1)}, pause_s=-1.0), constant(1.0))
    with pytest.raises(DomainError, match="cancellation of request 0"):
        simulate(twin_config(), GivenWorkload([sim_request(0, 2.0, 4, 1, cancel_after_s=-1.0)]), constant(1.0))


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(Turn)), max_size=20))
def test_events_happen_by_time_then_turn_then_order_of_scheduling(events: list[tuple[float, Turn]]) -> None:
    clock, seen = Clock(), list[int]()

    def waiter(number: int, time_s: float, turn: Turn) -> Process:
        yield clock.at(time_s, turn, "here")
        assert clock.now_s == time_s  # exactly, whatever the present was
        seen.append(number)

    for number, (time_s, turn) in enumerate(events):
        clock.process(waiter(number, time_s, turn))
    clock.run()
    assert seen == sorted(range(len(events)), key=lambda number: (*events[number], number))


def test_a_time_is_met_exactly_from_any_present() -> None:
    """0.8 + (3.9 - 0.8) is 3.9 less one bit."""
    assert 0.8 + (3.9 - 0.8) != 3.9
    clock, seen = Clock(), list[float]()

    def process() -> Process:
        yield clock.at(0.8, Turn.ARRIVAL, "first")
        yield clock.at(3.9, Turn.ARRIVAL, "second")
        seen.append(clock.now_s)

    clock.process(process())
    clock.run()
    assert seen == [3.9]


def test_who_is_woken_comes_after_everybody_of_that_instant() -> None:
    clock, seen = Clock(), list[str]()
    sleeper = clock.signal()

    def sleeping() -> Process:
        yield sleeper
        seen.append("woken")

    def waking() -> Process:
        yield clock.at(1.0, Turn.ARRIVAL, "waking")
        clock.wake(sleeper)
        clock.call_at(1.0, lambda: seen.append("arrived"), "late")

    clock.process(sleeping())
    clock.process(waking())
    clock.process(iter_step_end(clock, seen))
    clock.run()
    assert seen == ["arrived", "step", "woken"]


def iter_step_end(clock: Clock, seen: list[str]) -> Process:
    yield clock.after(1.0, Turn.STEP_END, "step")
    seen.append("step")
