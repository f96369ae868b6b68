"""The chunk and admission policy against a naive one, and whole runs of the scheduler under it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.slo_policy import RankLoad, SloPolicy
from engine.core.step_cost import StepPrice
from tests.core.core_harness import Replica

CACHE = CacheConfig(num_blocks=400, block_size=4, max_running=8, max_batched_tokens=64, context_length=300)


class LinearCost:
    """Seconds of the busiest rank: 1 + a token's + a request's + a thousandth of each token in cache."""

    def __init__(self, token_s: float = 0.05, request_s: float = 0.2) -> None:
        self.token_s, self.request_s = token_s, request_s
        self.num_prices = 0

    def price(self, plan: StepPlan) -> StepPrice:
        self.num_prices += 1
        step_s = max(
            1.0
            + sum(self.token_s * item.num_new_tokens + 0.001 * (item.num_computed_tokens + item.num_new_tokens) for item in rank.items)
            + self.request_s * sum(item.emits for item in rank.items)
            for rank in plan.ranks
        )
        return StepPrice(step_s, step_s, step_s, {})


def config(slo_s: float | None, **changes: object) -> SchedulerConfig:
    return SchedulerConfig(cache=CACHE, tpot_slo_s=slo_s, min_prompt_tokens=4, **changes)  # type: ignore[arg-type]


def replica(slo_s: float | None, cost: LinearCost | None = None, **changes: object) -> Replica:
    return Replica(config(slo_s, **changes), cost=cost or LinearCost())


def run(made: Replica, lengths: list[int], every: int = 3) -> list[StepPlan]:
    """A request each ``every`` steps, to the end of all; two plans under way where the scheduler makes them."""
    pending = [
        Request(number, tuple(2 + (number + step * step) % 40 for step in range(length)), SamplingParams(max_tokens=20, ignore_eos=True))
        for number, length in enumerate(lengths)
    ]
    for step in range(5000):
        if pending and step % every == 0:
            made.submit(pending.pop(0))
        while made.plan() is not None:
            pass
        if made.plans:
            made.commit()
        elif not pending:
            break
    assert len(made.reasons) == len(lengths)
    assert set(made.reasons.values()) == {"length"}
    return made.plan_log


def load(num_decodes: int, context_each: int, prompt_position: int | None) -> RankLoad:
    return RankLoad(num_decodes, num_decodes * context_each, prompt_position)


loads = st.builds(load, st.integers(0, 8), st.integers(1, 290), st.one_of(st.none(), st.integers(0, 290)))


@given(ranks=st.lists(loads, min_size=1, max_size=3), slo_s=st.floats(1.0, 8.0))
@settings(max_examples=150, deadline=None)
def test_the_chunk_is_the_largest_that_fits(ranks: list[RankLoad], slo_s: float) -> None:
    policy = SloPolicy(LinearCost(), config(slo_s, num_ranks=len(ranks)))
    limits = policy.limits(ranks)
    num_decodes = max(load.num_decodes for load in ranks)
    context = max((load.context_tokens / load.num_decodes for load in ranks if load.num_decodes), default=1.0)
    position = max(load.prompt_position or 0 for load in ranks)

    def seconds(decodes: int, chunk: int, slack: float) -> float:
        """By hand; contexts are rounded up by at most ``slack``."""
        held = decodes * max(context, 1) * slack + (position * slack + chunk if chunk else 0)
        return 1.0 + 0.05 * (decodes + chunk) + 0.2 * (decodes + (chunk > 0)) + 0.001 * held

    if num_decodes == 0 or seconds(1, 0, 1.0) > slo_s:
        assert limits.prompt_tokens == 64
    elif seconds(1, 0, 1.34) <= slo_s:
        assert limits.prompt_tokens == 4 or seconds(num_decodes, limits.prompt_tokens, 1.0) <= slo_s
        larger = int(limits.prompt_tokens * 1.19) + 2
        assert limits.prompt_tokens == 64 or seconds(num_decodes, larger, 1.34) > slo_s
        assert seconds(limits.max_running, 0, 1.0) <= slo_s
        assert limits.max_running == 8 or seconds(limits.max_running + 1, 0, 1.34) > slo_s


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_with_running_requests_keep_the_limit_and_everybody_finishes(num_ranks: int) -> None:
    cost = LinearCost()
    made = replica(4.0, cost, num_ranks=num_ranks)
    plans = run(made, [200, 30, 250, 100, 7, 220, 180, 240] * 2)
    num_chunks = 0
    for plan in plans:
        chunks = [sum(item.num_new_tokens for item in rank.items if item.num_new_tokens > 1) for rank in plan.ranks]
        decodes = [sum(item.num_new_tokens == 1 for item in rank.items) for rank in plan.ranks]
        if max(decodes) and max(chunks):
            num_chunks += 1
            prompts = max(sum(item.num_new_tokens > 1 for item in rank.items) for rank in plan.ranks)
            # It is asked for one prompt; the ends and contexts of several in one step are a little more.
            assert max(chunks) <= 4 or cost.price(plan).step_s <= 4.0 + 0.3 * (prompts - 1)
    assert num_chunks > 20
    unlimited = run(replica(None, num_ranks=num_ranks), [200, 30, 250, 100, 7, 220, 180, 240] * 2)
    assert max(cost.price(plan).step_s for plan in unlimited) > 4.0  # without the policy the limit is broken


def test_no_more_requests_run_than_decode_together_within_the_limit() -> None:
    # 1 + n (0.05 + 0.2) + at most 0.001 * 8 * 300: five fit within 3 s whatever their length, seven never do.
    plans = run(replica(3.0), [20] * 12, every=1)
    most = max(sum(item.emits for item in plan.ranks[0].items) for plan in plans)
    assert 5 <= most < 8
    assert max(len(plan.ranks[0].items) for plan in run(replica(None), [20] * 12, every=1)) == 8


@pytest.mark.parametrize("slo_s", [None, 1e6, 0.5], ids=["none", "loose", "impossible"])
def test_a_limit_that_cannot_bind_or_cannot_be_kept_changes_no_plan(slo_s: float | None) -> None:
    lengths = [200, 30, 250, 100, 7, 220, 180, 240]
    assert run(replica(slo_s), lengths) == run(replica(None), lengths)


def test_decisions_are_repeated_and_prices_are_kept() -> None:
    first, second = LinearCost(), LinearCost()
    lengths = [200, 30, 250, 100] * 12
    plans = run(replica(4.0, first), lengths)
    assert plans == run(replica(4.0, second), lengths)
    assert first.num_prices == second.num_prices < 1.5 * len(plans)


def test_a_factor_on_prices_is_a_smaller_limit() -> None:
    loads = [RankLoad(3, 300, 40)]
    doubled = SloPolicy(LinearCost(), config(8.0)).limits(loads, 2.0)
    assert doubled == SloPolicy(LinearCost(), config(4.0)).limits(loads)
    assert doubled.prompt_tokens < SloPolicy(LinearCost(), config(8.0)).limits(loads).prompt_tokens


def test_a_limit_needs_a_cost_model_and_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="no cost model"):
        Scheduler(config(4.0))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="tpot_slo_s"):
            Scheduler(config(value), LinearCost())
