"""The shadow of a live engine: the price of each plan, written down before its result is read, and what the step then took.

    residual   log(measured / predicted), of the model's own prediction; measured as ``StepClock`` has it, commit to commit
    scale      a residual's standard deviation as the price's 90 % interval claims it: log(high / low) / (2 x 1.645)

Drift: residuals, divided by their scale, go in blocks of BLOCK_STEPS, and the block's median, cut at +-CLIP, into a two-sided CUSUM
(Page 1954) with allowance ALLOWANCE and threshold THRESHOLD. A burst of slow steps moves no median, a lasting shift of one scale raises the
alarm after 25 blocks, one of three or more after 5. Were the residuals of a block all alike, which is the worst case, and as wide as the
interval claims, a false alarm would come once in 5e5 blocks (Siegmund 1985, equation 2.49); the more they differ, the seldomer.

Components: on every step whose components were timed, measured and predicted seconds of each. The alarm names the component whose time
grew (or shrank) most against what it was when the first such steps were compared. Timing slows a step, which is why these steps count for
nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import msgspec

from engine.core.events import DriftAlarm, Event, StepMeasured, StepPriced
from engine.core.plan import StepPlan, StepResult
from engine.core.step_cost import StepCost, StepPrice

BLOCK_STEPS = 32
ALLOWANCE, THRESHOLD, CLIP = 0.5, 12.0, 3.0
RECOVERED_BLOCKS = 8  # in a row within one scale: the alarm is over
COMPONENT_STEPS = 9  # timed steps that make the reference, and the present
WHOLE_STEP = "step"
_Z_90 = 1.6449  # a normal variable is within so many standard deviations nine times in ten
_MIN_SCALE = 0.01
_LEVEL_GAIN = 0.2  # of a block, in the smoothed level that is shown
_CORRECTION_GAIN = 1 / 64  # of a step
_MAX_CORRECTION = math.log(8.0)
_MAX_PLANS = 2  # uncommitted ones


class StepClock:
    """Seconds of a step: from the commit before it, or from its own plan where that came later (the engine was idle)."""

    def __init__(self) -> None:
        self._planned_s: dict[int, float] = {}
        self._committed_s = -math.inf

    def planned(self, step: int, now_s: float) -> None:
        self._planned_s[step] = now_s
        while len(self._planned_s) > _MAX_PLANS:  # of workers that died
            del self._planned_s[next(iter(self._planned_s))]

    def committed(self, step: int, now_s: float) -> float:
        begin_s = max(self._planned_s.pop(step, now_s), self._committed_s)
        self._committed_s = now_s
        return now_s - begin_s


class DriftDetector:
    """Two-sided CUSUM on medians of blocks. ``alarm`` is 0, or the direction (+1 slower, -1 faster) while it lasts."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self._threshold = threshold
        self.alarm = 0
        self.level: float | None = None  # smoothed median of the log residual itself
        self.num_blocks = 0
        self._block: list[tuple[float, float]] = []
        self._up = self._down = 0.0
        self._calm_blocks = 0

    def add(self, residual: float, scale: float) -> bool:
        """Take in one step; true where the alarm came or went."""
        self._block.append((residual, residual / scale))
        if len(self._block) < BLOCK_STEPS:
            return False
        middle = median(plain for plain, _ in self._block)
        self.level = middle if self.level is None else self.level + _LEVEL_GAIN * (middle - self.level)
        scaled = median(value for _, value in self._block)
        self._block.clear()
        return self.add_block(scaled)

    def add_block(self, value: float) -> bool:
        """One block's median, in units of the scale."""
        self.num_blocks += 1
        value = min(max(value, -CLIP), CLIP)
        if self.alarm:
            self._calm_blocks = self._calm_blocks + 1 if abs(value) <= 1.0 else 0
            if self._calm_blocks < RECOVERED_BLOCKS:
                return False
            self.alarm, self._calm_blocks = 0, 0
            return True
        self._up = max(0.0, self._up + value - ALLOWANCE)
        self._down = max(0.0, self._down - value - ALLOWANCE)
        if max(self._up, self._down) <= self._threshold:
            return False
        self.alarm = 1 if self._up > self._down else -1
        self._up = self._down = 0.0
        return True


class ComponentRatios:
    """Measured and predicted seconds of each component over timed steps."""

    def __init__(self) -> None:
        self.reference: dict[str, float] = {}  # measured / predicted over the first COMPONENT_STEPS
        self._recent: deque[dict[str, tuple[float, float]]] = deque(maxlen=COMPONENT_STEPS)

    def add(self, measured_s: dict[str, float], predicted_s: dict[str, float]) -> None:
        self._recent.append({name: (measured_s.get(name, 0.0), predicted_s.get(name, 0.0)) for name in measured_s | predicted_s})
        if not self.reference and len(self._recent) == COMPONENT_STEPS:
            self.reference = self.ratios()

    def ratios(self) -> dict[str, float]:
        """Measured / predicted now, in order of name; components that are not predicted, or take nothing, have none."""
        totals = self._totals()
        return {name: measured / predicted for name, (measured, predicted) in totals.items() if measured > 0 and predicted > 0}

    def moved(self, direction: int) -> tuple[str, float] | None:
        """The component that explains most of a step that became slower (+1) or faster (-1), and its ratio to what it was; None where no
        step was timed, or none moved that way."""
        excess: dict[str, tuple[float, float]] = {}
        for name, (measured, predicted) in self._totals().items():
            expected = predicted * self.reference.get(name, 1.0)
            if expected > 0 and measured > 0:
                excess[name] = ((measured - expected) * direction, measured / expected)
        if not excess:
            return None
        name = max(sorted(excess), key=lambda name: excess[name][0])
        return (name, excess[name][1]) if excess[name][0] > 0 else None

    def _totals(self) -> dict[str, tuple[float, float]]:
        """(measured, predicted): medians over the recent steps, so that one slow step is no drift."""
        names = sorted(dict.fromkeys(name for step in self._recent for name in step))
        steps = [[step.get(name, (0.0, 0.0)) for step in self._recent] for name in names]
        return {name: (median(m for m, _ in pairs), median(p for _, p in pairs)) for name, pairs in zip(names, steps, strict=True)}


def drift_text(alarm: DriftAlarm) -> str:
    """For people."""
    subject = "steps take" if alarm.component == WHOLE_STEP else f"{alarm.component} takes"
    if not alarm.raised:
        return f"drift is over: {subject} what the calibration says again"
    than = "what was predicted" if alarm.component == WHOLE_STEP else "what it did, most of what whole steps have moved by"
    return f"drift: {subject} {alarm.ratio:.2f} x {than}; calibrate anew if it stays"


class ShadowState(msgspec.Struct, frozen=True):
    """What is known so far, for metrics, log and /server_info. ``alarm`` names a component, or the whole step where none was timed."""

    num_compared: int
    num_below: int  # measured under the interval
    num_above: int
    drift_ratio: float | None  # measured / predicted of late, of the model's own prediction
    component_ratios: dict[str, float]
    alarm: str | None
    alarm_ratio: float | None
    correction: float
    note: str

    @property
    def text(self) -> str:
        """The alarm, for people; empty without one."""
        return drift_text(DriftAlarm(0.0, self.alarm, self.alarm_ratio or 1.0, True)) if self.alarm is not None else ""

    @property
    def coverage(self) -> float | None:
        """Of the compared steps, the share within their 90 % interval."""
        return 1.0 - (self.num_below + self.num_above) / self.num_compared if self.num_compared else None


class Shadow:
    """``price`` each plan in order, ``compare`` it at its commit; both return events for the log. Nothing here reads a clock."""

    def __init__(self, cost: StepCost, *, corrects: bool = False) -> None:
        """``corrects``: predictions are multiplied by what the last steps took beside the model's own (their note says so)."""
        self.cost = cost
        self.corrects = corrects
        self.reset()

    @property
    def correction(self) -> float:
        """What predictions are multiplied by."""
        return math.exp(self._correction) if self.corrects else 1.0

    def reset(self) -> None:
        """Forget every step, of a warm-up or of workers that are gone."""
        self._clock = StepClock()
        self._detector = DriftDetector()
        self._components = ComponentRatios()
        self._priced: dict[int, tuple[StepPrice, float]] = {}
        self._num_compared = self._num_below = self._num_above = 0
        self._correction = 0.0  # log
        self._alarm: tuple[str, float] | None = None
        self._note = ""

    def price(self, plan: StepPlan, planned_s: float, now_s: float) -> StepPriced:
        """Before the plan's result is read. ``planned_s`` is when it was made."""
        self._clock.planned(plan.step, planned_s)
        own = self.cost.price(plan)
        factor = self.correction
        self._priced[plan.step] = (own, factor)
        while len(self._priced) > _MAX_PLANS:
            del self._priced[next(iter(self._priced))]
        self._note = own.note
        return StepPriced(now_s, plan.step, own.step_s * factor, own.low_s * factor, own.high_s * factor, own.extrapolated)

    def compare(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        """At the commit. Nothing for a plan that was not priced."""
        measured_s = self._clock.committed(plan.step, now_s)
        entry = self._priced.pop(plan.step, None)
        if entry is None or measured_s <= 0 or entry[0].step_s <= 0:
            return ()
        own, factor = entry
        if result.components:
            self._add_components(own, result, measured_s)
            return (StepMeasured(now_s, plan.step, measured_s, own.step_s * factor, None),)
        below, above = measured_s < own.low_s * factor, measured_s > own.high_s * factor
        self._num_compared += 1
        self._num_below += below
        self._num_above += above
        residual = math.log(measured_s / own.step_s)
        scale = max(math.log(own.high_s / own.low_s) / (2 * _Z_90) if own.low_s > 0 else 1.0, _MIN_SCALE)
        cut = min(max(residual - self._correction, -CLIP * scale), CLIP * scale)
        self._correction = min(max(self._correction + _CORRECTION_GAIN * cut, -_MAX_CORRECTION), _MAX_CORRECTION)
        event = StepMeasured(now_s, plan.step, measured_s, own.step_s * factor, not (below or above))
        return (event, self._alarmed(now_s)) if self._detector.add(residual, scale) else (event,)

    def _add_components(self, own: StepPrice, result: StepResult, measured_s: float) -> None:
        seconds = dict(result.components)
        # The workers' timers end with the forward; what lies between two of them is the host's.
        seconds["host_gap"] = max(0.0, measured_s - result.forward_s)
        self._components.add(seconds, {name: price.seconds for name, price in own.components.items()})

    def _alarmed(self, now_s: float) -> DriftAlarm:
        direction = self._detector.alarm
        if not direction:
            name, ratio = self._alarm or (WHOLE_STEP, 1.0)
            self._alarm = None
            return DriftAlarm(now_s, name, ratio, raised=False)
        whole = (WHOLE_STEP, math.exp(self._detector.level or 0.0))
        self._alarm = self._components.moved(direction) or whole
        return DriftAlarm(now_s, *self._alarm, raised=True)

    def state(self) -> ShadowState:
        level = self._detector.level
        return ShadowState(
            num_compared=self._num_compared,
            num_below=self._num_below,
            num_above=self._num_above,
            drift_ratio=None if level is None else math.exp(level),
            component_ratios=self._components.ratios(),
            alarm=None if self._alarm is None else self._alarm[0],
            alarm_ratio=None if self._alarm is None else self._alarm[1],
            correction=self.correction,
            note=self._note,
        )
