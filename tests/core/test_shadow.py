"""The shadow's statistics against closed forms and scripted steps."""

from __future__ import annotations

import math
import random

import pytest

from engine.core.events import DriftAlarm, StepMeasured, StepPriced, decode_lines, encode_lines
from engine.core.metrics import MetricsLog
from engine.core.plan import RankPlan, StepPlan, StepResult
from engine.core.shadow import ALLOWANCE, BLOCK_STEPS, COMPONENT_STEPS, THRESHOLD, DriftDetector, Shadow, StepClock
from engine.core.step_cost import ComponentPrice, StepPrice

SIGMA = 0.1
PARTS = {"projection": 0.004, "expert_gemm": 0.005, "host_gap": 0.001}


class FixedCost:
    """10 ms in three components, within e^(+-1.6449 sigma)."""

    def price(self, plan: StepPlan) -> StepPrice:
        assert plan.ranks
        step_s, half = sum(PARTS.values()), math.exp(1.6449 * SIGMA)
        components = {name: ComponentPrice(seconds, "measured") for name, seconds in PARTS.items()}
        return StepPrice(step_s, step_s / half, step_s * half, components, note="fixed")


class Run:
    """Steps of given seconds, one plan at a time."""

    def __init__(self, *, corrects: bool = False) -> None:
        self.shadow = Shadow(FixedCost(), corrects=corrects)
        self.now_s = 100.0
        self.num_steps = 0
        self.events: list[object] = []

    def step(self, seconds: float, components: tuple[tuple[str, float], ...] = (), forward_s: float = 0.0) -> None:
        plan = StepPlan(self.num_steps, (RankPlan(),))
        self.num_steps += 1
        self.events.append(self.shadow.price(plan, self.now_s, self.now_s))
        self.now_s += seconds
        self.events += self.shadow.compare(plan, StepResult(plan.step, (), forward_s, components), self.now_s)

    @property
    def alarms(self) -> list[DriftAlarm]:
        return [event for event in self.events if isinstance(event, DriftAlarm)]


def run_length(threshold: float) -> float:
    """Mean blocks until a false alarm of a two-sided CUSUM on standard normal values (Siegmund 1985, equation 2.49)."""
    reach = 2 * ALLOWANCE * (threshold + 1.166)
    return (math.exp(reach) - reach - 1) / (2 * ALLOWANCE**2) / 2


def test_a_step_runs_from_commit_to_commit_and_from_its_plan_after_idleness() -> None:
    clock = StepClock()
    clock.planned(0, 10.0)
    clock.planned(1, 10.5)  # overlap: planned while 0 runs
    assert clock.committed(0, 12.0) == 2.0
    assert clock.committed(1, 13.0) == 1.0
    clock.planned(2, 20.0)
    assert clock.committed(2, 20.25) == 0.25


def test_false_alarms_come_as_seldom_as_siegmund_says() -> None:
    draw, lengths = random.Random(1), []
    for _ in range(1500):
        detector = DriftDetector(threshold=3.0)
        while not detector.add_block(draw.gauss(0.0, 1.0)):
            pass
        lengths.append(detector.num_blocks)
    assert sum(lengths) / len(lengths) == pytest.approx(run_length(3.0), rel=0.12)
    assert run_length(THRESHOLD) > 5e5  # the rate that the module states


@pytest.mark.parametrize(("shift", "blocks"), [(1.0, 25), (-1.0, 25), (3.0, 5), (50.0, 5)])
def test_a_lasting_shift_is_found_in_the_stated_number_of_blocks(shift: float, blocks: int) -> None:
    detector = DriftDetector()
    steps = next(index for index in range(1, 10_000) if detector.add(shift * SIGMA, SIGMA))
    assert steps == blocks * BLOCK_STEPS
    assert detector.alarm == (1 if shift > 0 else -1)


def test_bursts_of_slow_steps_are_no_drift() -> None:
    draw, run = random.Random(2), Run()
    for index in range(200 * BLOCK_STEPS):
        slow = 30.0 if index % 8 == 0 else 1.0
        run.step(0.010 * slow * math.exp(draw.gauss(0.0, SIGMA)))
    assert not run.alarms
    # One step in eight lies above its interval, and of the others one in twenty on either side.
    state = run.shadow.state()
    assert state.coverage == pytest.approx(0.9 * 7 / 8, abs=0.02)
    assert state.num_above > state.num_below


def test_the_alarm_names_the_component_that_moved_and_ends_when_it_is_back() -> None:
    run = Run()

    def steps(blocks: int, experts: float) -> None:
        for index in range(blocks * BLOCK_STEPS):
            # The fit was 30 % off in one component all along: that is no movement.
            parts = (("expert_gemm", 0.005 * experts), ("projection", 0.004 * 1.3))
            seconds = 0.001 + 0.004 + 0.005 * experts
            if index % 16 == 15:
                run.step(seconds * 1.5, parts, forward_s=seconds * 1.5 - 0.001)
            else:
                run.step(seconds, forward_s=seconds - 0.001)

    steps(40, 1.0)
    assert not run.alarms
    assert run.shadow.state().num_compared == 40 * BLOCK_STEPS * 15 // 16  # timed steps count for components alone
    steps(20, 2.0)
    (alarm,) = run.alarms
    assert (alarm.component, alarm.raised) == ("expert_gemm", True)
    assert alarm.ratio == pytest.approx(2.0)
    state = run.shadow.state()
    assert state.drift_ratio == pytest.approx(1.5, rel=0.01)
    assert state.component_ratios["projection"] == pytest.approx(1.3)
    assert "expert_gemm takes 2.00 x" in state.text
    steps(20, 1.0)
    assert [event.raised for event in run.alarms] == [True, False]
    assert run.shadow.state().text == ""


def test_without_timed_steps_the_alarm_is_of_the_whole_step() -> None:
    run = Run()
    for _ in range(6 * BLOCK_STEPS):
        run.step(0.005)
    (alarm,) = run.alarms
    assert alarm.component == "step"
    assert alarm.ratio == pytest.approx(0.5)


def test_few_timed_steps_are_compared_with_the_prediction_itself() -> None:
    run = Run()
    for index in range(6 * BLOCK_STEPS):
        parts = (("expert_gemm", 0.005), ("projection", 0.014)) if index in (5, 50) else ()
        run.step(0.020, parts, forward_s=0.019)
    assert COMPONENT_STEPS > 2
    assert run.alarms[0].component == "projection"


def test_correction_takes_over_what_steps_take_and_leaves_the_models_own_residual_to_the_drift() -> None:
    run = Run(corrects=True)
    for _ in range(40 * BLOCK_STEPS):
        run.step(0.012)
    last = [event for event in run.events if isinstance(event, StepPriced)][-1]
    assert last.predicted_s == pytest.approx(0.012, rel=1e-3)
    assert last.low_s < 0.012 < last.high_s
    assert run.shadow.state().correction == pytest.approx(1.2, rel=1e-3)
    assert run.shadow.state().drift_ratio == pytest.approx(1.2)
    assert run.alarms  # 1.8 of the scale: the calibration is not the machine's any more


def test_a_price_stands_in_the_log_before_what_was_measured_and_both_survive_it() -> None:
    run = Run()
    run.step(0.010)
    run.step(0.013)
    assert [type(event) for event in run.events] == [StepPriced, StepMeasured, StepPriced, StepMeasured]
    measured = [event for event in run.events if isinstance(event, StepMeasured)]
    assert [event.step for event in measured] == [0, 1]
    assert [event.within for event in measured] == [True, False]  # e^0.16 x 10 ms = 11.8 ms
    assert [event.measured_s for event in measured] == pytest.approx([0.010, 0.013])
    assert list(decode_lines(encode_lines(run.events))) == run.events  # type: ignore[arg-type]
    log = MetricsLog()
    log.extend(run.events)  # type: ignore[arg-type]
    assert log.num_steps == 0


def test_plans_of_workers_that_died_are_forgotten() -> None:
    run = Run()
    for step in range(5):
        run.shadow.price(StepPlan(step, (RankPlan(),)), 0.0, 0.0)
    assert run.shadow.compare(StepPlan(0, (RankPlan(),)), StepResult(0, ()), 9.0) == ()
    run.shadow.reset()
    assert run.shadow.state().num_compared == 0
