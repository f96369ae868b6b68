"""Component timers: self time, nesting, whole components, exceptions."""

from __future__ import annotations

import time

import pytest
import torch

from engine.kernels import timing
from engine.kernels.timing import ComponentTimer, component


@component("inner")
def inner(seconds: float) -> None:
    time.sleep(seconds)


@component("outer")
def outer() -> int:
    time.sleep(0.01)
    inner(0.02)
    time.sleep(0.01)
    return 7


@component("draft", whole=True)
def drafting() -> None:
    inner(0.01)


def test_a_caller_is_charged_without_what_its_callees_are_charged() -> None:
    timer = ComponentTimer(torch.device("cpu"))
    begin_s = time.perf_counter()
    with timing.timing(timer):
        assert outer() == 7
        inner(0.01)
        drafting()
    elapsed_s = time.perf_counter() - begin_s
    seconds = dict(timer.take())
    assert set(seconds) == {"inner", "outer", "draft"}
    assert seconds["inner"] >= 0.03
    assert seconds["outer"] >= 0.02
    assert seconds["draft"] >= 0.01
    assert sum(seconds.values()) <= elapsed_s
    assert timer.take() == ()


def test_time_between_marked_calls_is_nobodys() -> None:
    timer = ComponentTimer(torch.device("cpu"))
    with timing.timing(timer):
        inner(0.001)
        time.sleep(0.05)
        inner(0.001)
    assert dict(timer.take())["inner"] < 0.05


def test_an_exception_leaves_the_stack_in_order_and_nothing_runs_without_a_timer() -> None:
    @component("broken")
    def broken() -> None:
        raise ValueError("x")

    timer = ComponentTimer(torch.device("cpu"))
    with timing.timing(timer):
        with pytest.raises(ValueError):
            broken()
        inner(0.001)
    assert [name for name, _ in timer.take()] == ["broken", "inner"]
    inner(0.001)
    assert timer.take() == ()
