"""A cost model beside a running engine: what is written down when, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from engine.actors.gateway import Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.core.errors import ConfigError
from engine.core.events import Event, StepCommitted, StepMeasured, StepPlanned, StepPriced
from engine.core.plan import StepPlan, StepResult
from engine.core.sampling import SamplingParams
from engine.core.step_cost import ComponentPrice, StepPrice
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script


class FixedCost:
    """10 ms, of which 8 are "other"; the 90 % interval is +- 20 %."""

    def __init__(self) -> None:
        self.priced: list[int] = []

    def price(self, plan: StepPlan) -> StepPrice:
        self.priced.append(plan.step)
        return StepPrice(0.010, 0.008, 0.012, {"other": ComponentPrice(0.008, "measured")})


class Log:
    """All events in order, and the moments at which a result had been read."""

    def __init__(self) -> None:
        self.entries: list[Event] = []
        self.times: dict[int, list[float]] = {}

    def planned(self, plan: StepPlan, now_s: float) -> None:
        self.times[plan.step] = [now_s]

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        assert result.step == plan.step
        self.times[plan.step].append(now_s)

    def events(self, events: Sequence[Event]) -> None:
        self.entries.extend(events)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.entries if isinstance(event, kind)]


async def generate(engine: Gateway, num_tokens: int = 20) -> None:
    prompt = (5, 6, 7)
    await engine.complete(Generation(prompt=prompt, params=SamplingParams(max_tokens=num_tokens, ignore_eos=True)))


async def test_every_plan_is_priced_before_its_result_and_measured_after() -> None:
    log, cost = Log(), FixedCost()
    config = engine_config(Script(components=(), step_s=0.001))
    async with open_engine(config, worker_module=MODULE, observers=(log,), cost=cost) as engine:
        await generate(engine)
        await generate(engine)
        shadow = engine.shadow
    steps = [event.step for event in log.of(StepPlanned)]
    assert cost.priced == steps == [event.step for event in log.of(StepPriced)] == [event.step for event in log.of(StepMeasured)]
    order = [(type(event), event.step) for event in log.entries if isinstance(event, StepPriced | StepCommitted | StepMeasured)]
    for step in steps:
        moments = [order.index((kind, step)) for kind in (StepPriced, StepCommitted, StepMeasured)]
        assert moments == sorted(moments)
    # Commit to commit, from its own plan where the engine was idle: by the observer's clock.
    committed_s = 0.0
    for event in log.of(StepMeasured):
        planned_s, end_s = log.times[event.step]
        assert event.measured_s == pytest.approx(end_s - max(planned_s, committed_s))
        committed_s = end_s
    assert shadow is not None
    state = shadow.state()
    assert state.num_compared == len(steps)
    assert state.num_below == sum(event.measured_s < 0.008 for event in log.of(StepMeasured))


async def test_now_and_then_a_steps_components_are_timed() -> None:
    log = Log()
    script = Script(components=(), timed_components=(("other", 0.016),))
    config = msgspec.structs.replace(engine_config(script), timed_steps=4)
    async with open_engine(config, worker_module=MODULE, observers=(log,), cost=FixedCost()) as engine:
        await generate(engine)
        assert engine.shadow is not None
        ratios = engine.shadow.state().component_ratios
    timed = [event.step for event in log.of(StepMeasured) if event.within is None]
    assert timed == [step for step in range(len(log.of(StepMeasured))) if step % 4 == 3]
    assert ratios["other"] == pytest.approx(2.0)


async def test_without_a_cost_model_nothing_is_priced_and_a_limit_is_refused() -> None:
    log = Log()
    async with open_engine(engine_config(Script()), worker_module=MODULE, observers=(log,)) as engine:
        await generate(engine)
        assert engine.shadow is None
    assert not log.of(StepPriced)
    config = engine_config(Script(), scheduler={"tpot_slo_s": 0.05})
    with pytest.raises(ConfigError, match="no cost model"):
        async with open_engine(config, worker_module=MODULE):
            pass


async def test_corrected_predictions_are_what_the_limit_goes_by() -> None:
    log = Log()
    config = msgspec.structs.replace(engine_config(Script(components=(), step_s=0.002)), corrects_predictions=True)
    async with open_engine(config, worker_module=MODULE, observers=(log,), cost=FixedCost()) as engine:
        await generate(engine, 60)
        assert engine.shadow is not None
        correction = engine.shadow.state().correction
        assert engine._scheduler.core.price_factor == correction
    assert 0.2 < correction < 1.0  # steps take about a fourth of the prediction
    assert log.of(StepPriced)[-1].predicted_s == pytest.approx(0.010 * correction, rel=0.1)


async def test_the_limit_reaches_the_core() -> None:
    """Two tokens of the prompt a step while somebody decodes: 1 + 1 ms a token is all that 3 ms allow beside one decode."""

    class PerToken:
        def price(self, plan: StepPlan) -> StepPrice:
            seconds = 0.001 * plan.num_tokens
            return StepPrice(seconds, seconds, seconds, {})

    log = Log()
    plans: list[StepPlan] = []
    log.planned = lambda plan, now_s: plans.append(plan) or log.times.update({plan.step: [now_s]})  # type: ignore[method-assign,func-returns-value]
    config = engine_config(Script(components=(), step_s=0.002), scheduler={"tpot_slo_s": 0.003, "min_prompt_tokens": 1})
    async with open_engine(config, worker_module=MODULE, observers=(log,), cost=PerToken()) as engine:
        long = Generation(prompt=(5,), params=SamplingParams(max_tokens=60, ignore_eos=True))
        async with engine.generate(long) as stream:
            await anext(aiter(stream))
            await engine.complete(Generation(prompt=(6,) * 30, params=SamplingParams(max_tokens=1)))
    chunks = [item.num_new_tokens for plan in plans for item in plan.ranks[0].items if len(plan.ranks[0].items) > 1 and not item.emits]
    assert chunks == [2] * 14
