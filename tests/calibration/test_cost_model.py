"""The cost model: known machines found again, prices with the properties that physics and the composition rules ask for."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.assemble import HeldOut
from calibration.cost_model import CalibratedCost, CollectiveFit, ModelFit, ProbeFactors, StepFit, message_seconds
from calibration.features import Array, FeatureTable, table_of_plans, uniform_steps
from calibration.fit import column_matrix, conformal_bounds, fit_held_out, fit_non_negative, log_ratio
from calibration.floors import Messages, messages, terms
from calibration.imbalance import BALANCED, ExpertBalance
from calibration.steady import Load, closed_loop
from engine.core.counts import gemm_flops
from engine.core.errors import DomainError
from engine.core.features import features
from engine.core.layout import Layout, parse_layout
from engine.core.plan import PlanItem, RankPlan, StepPeers, StepPlan
from engine.core.sharding import RankPlace
from engine.core.specs import COMPONENTS, AttentionRole, ModelSpec, V41Spec
from engine.core.step_cost import StepCost
from engine.core.traffic import step_traffic
from engine.model.files import read_model_files
from tests.calibration import synthetic

LAYOUTS = ("tp1dp1ep1", "tp2dp1ep1", "tp1dp2ep2")


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return synthetic.tiny()


@pytest.fixture(scope="module")
def fitted(spec: ModelSpec) -> tuple[ModelFit, list[HeldOut]]:
    return synthetic.assembled(spec)


@pytest.fixture(scope="module")
def fit(fitted: tuple[ModelFit, list[HeldOut]]) -> ModelFit:
    return fitted[0]


def cost_of(fit: ModelFit, spec: ModelSpec, layout: str = "tp1dp1ep1", probe: ProbeFactors | None = None) -> CalibratedCost:
    return CalibratedCost(fit, spec, parse_layout(layout).decode.unit, probe=probe)


def loop_table(spec: ModelSpec, layout: str, load: tuple[int, int, int]) -> FeatureTable:
    num_ranks = parse_layout(layout).decode.unit.dp
    return table_of_plans(closed_loop(Load(*load, num_ranks, has_sequence_state=True)).plans, spec)


# --- the fit --------------------------------------------------------------------------------------------------------------------


def test_known_coefficients_come_back_from_noise_and_outliers() -> None:
    random = np.random.default_rng(1)
    rows = np.exp(random.uniform(0, 7, 400))
    columns = np.stack((np.ones(400), rows, np.minimum(rows, 32.0), random.uniform(0, 1e6, 400)), axis=1)
    truth = np.array((3e-4, 2e-6, 1e-5, 5e-10))
    seconds = columns @ truth * random.lognormal(0, 0.03, 400)
    seconds[::25] *= 4.0
    found = fit_non_negative(columns, seconds)
    assert found == pytest.approx(truth, rel=0.06)


def test_a_cost_that_does_not_grow_gets_no_negative_rate() -> None:
    rows = np.arange(1.0, 100.0)
    found = fit_non_negative(np.stack((np.ones(99), rows), axis=1), 1.0 / rows)
    assert (found >= 0).all()


def test_errors_are_of_points_the_fit_had_not_seen() -> None:
    """Pure noise: whatever fits the points in hand says nothing of those held out."""
    random = np.random.default_rng(2)
    columns, seconds = random.uniform(0, 1, (60, 40)), random.lognormal(0, 0.5, 60)
    fitted = fit_held_out(columns, seconds)
    seen = np.abs(log_ratio(seconds, columns @ fitted.coefficients))
    assert np.median(np.abs(fitted.held_out)) > 1.2 * np.median(seen)


def test_conformal_bounds_hold_their_share_of_new_points() -> None:
    random = np.random.default_rng(3)
    shares = []
    for _ in range(200):
        low, high = conformal_bounds(random.normal(0.05, 0.1, 60))
        new = np.exp(random.normal(0.05, 0.1, 500))
        shares.append(((low <= new) & (new <= high)).mean())
    assert 0.88 <= np.mean(shares) <= 0.95


def test_few_residuals_widen_the_bounds() -> None:
    ratios = np.array([-0.05, -0.01, 0.0, 0.02, 0.04])
    low, high = conformal_bounds(ratios)
    assert low < np.exp(-0.05)
    assert high > np.exp(0.04)
    assert conformal_bounds(np.array([])) == (0.5, 2.0)


# --- a known machine ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_known_machine_is_predicted_on_loads_it_was_not_fitted_on(fit: ModelFit, spec: ModelSpec, layout: str) -> None:
    """tp1dp2ep2 has no whole steps behind it."""
    truth = synthetic.true_fit(spec)
    for load in ((5, 100, 20), (10, 300, 16), (20, 80, 1), (28, 30, 12)):
        table = loop_table(spec, layout, load)
        wanted, found = (cost_of(one, spec, layout).price_table(table).step_s for one in (truth, fit))
        assert np.median(found) == pytest.approx(np.median(wanted), rel=0.03)


def test_whole_step_factors_come_back(fit: ModelFit) -> None:
    one, two = fit.steps
    assert one.compute_scale == pytest.approx(synthetic.COMPUTE_SCALE, rel=0.03)
    assert two.collective_scale == pytest.approx(synthetic.COLLECTIVE_SCALE, rel=0.1)
    assert one.gap_s == pytest.approx(synthetic.GAP_S, rel=0.05)
    assert one.gap_per_request_s == pytest.approx(synthetic.GAP_PER_REQUEST_S, rel=0.05)
    assert one.gap_per_start_s == pytest.approx(synthetic.GAP_PER_START_S, rel=0.05)


def test_the_interval_covers_new_runs(fit: ModelFit, spec: ModelSpec) -> None:
    truth, random, inside = synthetic.true_fit(spec), np.random.default_rng(5), list[bool]()
    for batch in (2, 3, 5, 7, 11, 14, 15):
        for context in (40, 90, 210, 450):
            run = synthetic.run_of(truth, spec, "tp1dp1ep1", (batch, context, 8), 0.02, random)
            priced = cost_of(fit, spec).price_table(run.table())
            inside.append(bool(np.median(priced.low_s) <= run.median_s <= np.median(priced.high_s)))
    assert np.mean(inside) >= 0.8


def test_held_out_steps_of_both_layouts_are_kept_for_the_report(fitted: tuple[ModelFit, list[HeldOut]]) -> None:
    steps = [entry for entry in fitted[1] if entry.component == "step"]
    assert {entry.layout for entry in steps} == {"tp1dp1ep1", "tp2dp1ep1"}
    assert np.median([abs(entry.predicted_s / entry.measured_s - 1) for entry in steps]) < 0.05


# --- properties of a price ------------------------------------------------------------------------------------------------------

step_of = st.tuples(st.integers(1, 64), st.integers(1, 3000), st.sampled_from((1, 1, 7, 130)))


def one_step(spec: ModelSpec, batch: int, context: int, new: int, ranks: int = 1) -> FeatureTable:
    ones = np.ones((1, ranks))
    return uniform_steps(spec, batch * ones, max(context, new) * ones, new * ones)


@settings(max_examples=60, deadline=None)
@given(step_of, st.sampled_from(LAYOUTS))
def test_prices_are_positive_and_inside_their_interval(step: tuple[int, int, int], layout: str) -> None:
    spec = synthetic.tiny()
    priced = cost_of(_FIT.get(spec), spec, layout).price_table(one_step(spec, *step, parse_layout(layout).decode.unit.dp))
    assert 0 < priced.low_s[0] <= priced.step_s[0] <= priced.high_s[0]
    assert all((seconds >= 0).all() for seconds in priced.components.values())
    assert set(priced.components) <= set(COMPONENTS)


@settings(max_examples=60, deadline=None)
@given(step_of, st.sampled_from(LAYOUTS), st.sampled_from(("batch", "context", "new")))
def test_prices_grow_with_requests_tokens_and_context(step: tuple[int, int, int], layout: str, grown: str) -> None:
    spec, ranks = synthetic.tiny(), parse_layout(layout).decode.unit.dp
    batch, context, new = step
    context = max(context, new + 1)  # none of the sequences starts with the step
    more = {"batch": (batch + 1, context, new), "context": (batch, context + 40, new), "new": (batch, context + 9, new + 9)}[grown]
    cost = cost_of(_FIT.get(spec), spec, layout)
    before, after = (cost.price_table(one_step(spec, *one, ranks)).step_s[0] for one in ((batch, context, new), more))
    assert after >= before * (1 - 1e-9)


class _Once:
    """A fit made at first use: Hypothesis tests take no fixtures of a module."""

    def __init__(self) -> None:
        self._fit: ModelFit | None = None

    def get(self, spec: ModelSpec) -> ModelFit:
        if self._fit is None:
            self._fit = synthetic.assembled(spec, noise=0.05, seed=4)[0]
        return self._fit


_FIT = _Once()


def test_the_parts_make_the_step_by_the_stated_rules(fit: ModelFit, spec: ModelSpec) -> None:
    """scale x the slowest rank + collectives + gap, written out here once more."""
    cost = cost_of(fit, spec, "tp1dp2ep2")
    table = uniform_steps(spec, np.array([[3.0, 8.0]]), np.array([[200.0, 50.0]]), np.ones((1, 2)))
    priced, step = cost.price_table(table), cost.step_fit
    ranks = np.sum(list(cost.rank_seconds(table).values()), axis=0)[0]
    gap = step.gap_s + step.gap_per_request_s * 11
    parts = {name: float(seconds[0]) for name, seconds in priced.components.items()}
    assert sum(parts.values()) == pytest.approx(priced.step_s[0])
    assert parts["host_gap"] == pytest.approx(gap)
    local = {name: step.compute_scale * float(seconds[0, ranks.argmax()]) for name, seconds in cost.rank_seconds(table).items()}
    wire = {name: parts[name] - seconds for name, seconds in local.items()}
    assert sum(local.values()) == pytest.approx(step.compute_scale * ranks.max())
    assert {name for name, seconds in wire.items() if seconds > 1e-9} == {"dispatch", "combine", "engram.fetch"}
    assert priced.step_s[0] == pytest.approx(step.compute_scale * ranks.max() + sum(wire.values()) + gap)


def test_the_slowest_rank_decides(fit: ModelFit, spec: ModelSpec) -> None:
    cost = cost_of(fit, spec, "tp1dp2ep2")

    def compute(first: float, second: float) -> float:
        table = uniform_steps(spec, np.array([[first, second]]), np.full((1, 2), 100.0), np.ones((1, 2)))
        return float(np.sum(list(cost.rank_seconds(table).values()), axis=0).max())

    assert compute(2, 30) == pytest.approx(compute(30, 2))
    assert compute(2, 30) < compute(30, 30)


def test_a_skewed_step_costs_as_its_slowest_rank_and_the_others_wait(fit: ModelFit, spec: ModelSpec) -> None:
    """Ranks with 1 and 31 requests, with 16 each, and with 31 each."""
    cost = cost_of(fit, spec, "tp1dp2ep2")
    skewed, even, full = (
        cost.price_table(uniform_steps(spec, np.array([pair], dtype=float), np.full((1, 2), 100.0), np.ones((1, 2))))
        for pair in ((1, 31), (16, 16), (31, 31))
    )
    table = uniform_steps(spec, np.array([[1.0, 31.0]]), np.full((1, 2), 100.0), np.ones((1, 2)))
    ranks = np.sum(list(cost.rank_seconds(table).values()), axis=0)[0]
    assert even.step_s[0] < skewed.step_s[0] < full.step_s[0]
    assert even.barrier_wait_s[0] == pytest.approx(0.0)
    assert skewed.barrier_wait_s[0] == pytest.approx(cost.step_fit.compute_scale * (ranks[1] - ranks[0]) / 2)
    assert skewed.barrier_wait_s[0] < skewed.step_s[0]


def test_experts_are_priced_by_their_busiest_rank(fit: ModelFit, spec: ModelSpec) -> None:
    layout = parse_layout("tp1dp2ep2").decode.unit
    table = one_step(spec, 32, 200, 8, 2)

    def experts_s(balance: ExpertBalance | None) -> float:
        cost = CalibratedCost(fit, spec, layout, expert_balance=balance)
        return float(cost.price_table(table).components["expert_gemm"][0])

    mean, balanced, steep = experts_s(None), experts_s(BALANCED), experts_s(ExpertBalance(zipf=2.0))
    assert mean < balanced < 1.1 * mean  # chance alone, over 512 tokens
    assert balanced < steep < 2 * mean
    one = ((9,) + (1,) * 15,) * 8  # all that can be on one rank of the second measurement are there
    assert experts_s(ExpertBalance(counts=one)) > balanced
    assert experts_s(ExpertBalance(counts=((1, 1) + (0,) * 14,) * 8)) < 2 * mean  # twice the rows, of two experts' weights


def test_copies_placed_by_load_make_a_steep_law_cheaper(fit: ModelFit, spec: ModelSpec) -> None:
    layout, table = parse_layout("tp1dp2ep2").decode.unit, one_step(spec, 32, 200, 8, 2)

    def step_s(**options: Any) -> float:
        cost = CalibratedCost(fit, spec, layout, expert_balance=ExpertBalance(zipf=1.5), **options)
        return float(cost.price_table(table).step_s[0])

    assert step_s(redundant_experts=8, expert_rebalancing=True) < step_s(expert_rebalancing=True) < step_s()


def test_one_rank_has_every_expert_whatever_is_popular(fit: ModelFit, spec: ModelSpec) -> None:
    """As many rows, of fewer experts' weights."""
    table = one_step(spec, 4, 200, 1)
    plain, steep = (
        CalibratedCost(fit, spec, Layout(), expert_balance=balance).price_table(table).components["expert_gemm"][0]
        for balance in (BALANCED, ExpertBalance(zipf=3.0))
    )
    assert steep < plain
    assert CalibratedCost(fit, spec, Layout()).loads is None


def test_a_plan_is_priced_as_its_features(fit: ModelFit, spec: ModelSpec) -> None:
    plan = StepPlan(0, (RankPlan(items=(PlanItem(0, 0, 99, 1, 0, True), PlanItem(1, 1, 0, 64, 0, True))),))
    cost: StepCost = cost_of(fit, spec)
    price = cost.price(plan)
    assert price.step_s == pytest.approx(sum(part.seconds for part in price.components.values()))
    assert price.low_s <= price.step_s <= price.high_s
    assert not price.extrapolated
    assert price.components["projection"].provenance == "interpolated"


# --- what it does not know ------------------------------------------------------------------------------------------------------


def test_outside_the_measured_range_says_so_and_widens(fit: ModelFit, spec: ModelSpec) -> None:
    cost = cost_of(fit, spec)
    inside, outside, far = (cost.price_table(one_step(spec, 8, context, 1)) for context in (500, 3000, 4_000_000))
    assert not inside.extrapolated[0]
    assert outside.extrapolated[0]
    widths = [float(np.log(one.high_s[0] / one.low_s[0])) for one in (inside, outside, far)]
    assert widths[0] < widths[1] < widths[2]


def test_a_shape_of_rank_never_measured_is_scaled_and_wider(fit: ModelFit, spec: ModelSpec) -> None:
    without = msgspec.structs.replace(fit, ranks=tuple(rank for rank in fit.ranks if rank.layout != "tp1dp2ep2"))
    table = one_step(spec, 8, 200, 1, 2)
    known, scaled = (cost_of(one, spec, "tp1dp2ep2").price_table(table) for one in (fit, without))
    assert scaled.provenance["projection"] == "scaled"
    assert "by FLOP and bytes" in scaled.note
    assert scaled.high_s[0] / scaled.low_s[0] >= known.high_s[0] / known.low_s[0] * (1 - 1e-9)
    assert 0.2 < scaled.step_s[0] / known.step_s[0] < 5


def test_layouts_nothing_is_known_of_are_refused(fit: ModelFit, spec: ModelSpec) -> None:
    alone = msgspec.structs.replace(fit, ranks=fit.ranks[:1])
    with pytest.raises(DomainError, match="1 cores and 1 busy neighbours"):
        cost_of(alone, spec, "tp2dp1ep1")
    with pytest.raises(DomainError, match="collectives"):
        cost_of(msgspec.structs.replace(fit, collectives=()), spec, "tp2dp1ep1")
    with pytest.raises(DomainError, match="draft tokens"):
        CalibratedCost(fit, spec, Layout(), draft_tokens=3)
    with pytest.raises(DomainError, match="2 data ranks"):
        cost_of(fit, spec, "tp1dp2ep2").price_table(one_step(spec, 1, 10, 1))


def test_a_fit_by_other_terms_is_refused(fit: ModelFit, spec: ModelSpec) -> None:
    rank = fit.ranks[0]
    strange = msgspec.structs.replace(rank.components["projection"], columns=("launch", "magic"), coefficients=(1.0, 1.0))
    ranks = (msgspec.structs.replace(rank, components={**rank.components, "projection": strange}), *fit.ranks[1:])
    with pytest.raises(DomainError, match="calibrate anew"):
        cost_of(msgspec.structs.replace(fit, ranks=ranks), spec).price_table(one_step(spec, 1, 10, 1))


def test_a_slower_machine_scales_each_term_by_its_resource(fit: ModelFit, spec: ModelSpec) -> None:
    table, probe = one_step(spec, 8, 200, 1), ProbeFactors(compute=2.0, memory=1.0, host=1.5)
    then, now = (cost_of(fit, spec, probe=one).price_table(table) for one in (None, probe))
    scale, work = cost_of(fit, spec).step_fit.compute_scale, terms(spec, RankPlace(), table, 4)
    for name in ("projection", "attention.sparse", "norm", "indexer"):
        coefficients, seconds = list(fit.ranks[0].components[name].coefficients), 0.0
        for term in work[name]:
            columns = column_matrix([term])[0, 0]
            mine, coefficients = coefficients[: len(columns)], coefficients[len(columns) :]
            seconds += float(columns @ mine) * probe.of(term.resource)
        assert now.components[name][0] == pytest.approx(scale * seconds), name
        assert then.components[name][0] < now.components[name][0] < 2.0 * then.components[name][0] or name == "attention.sparse", name
    assert now.components["host_gap"][0] == pytest.approx(1.5 * then.components["host_gap"][0])
    assert "compute x2.00" in now.note
    assert not then.note


# --- floors ---------------------------------------------------------------------------------------------------------------------


def test_uniform_steps_are_the_features_of_such_plans(spec: ModelSpec) -> None:
    for batch, context, new, drafts in ((3, 50, 1, 0), (1, 700, 300, 0), (5, 40, 4, 3), (2, 33, 33, 0), (4, 1, 1, 0)):
        items = tuple(PlanItem(index, index, context - new, new, drafts, True) for index in range(batch))
        wanted = features(StepPlan(0, (RankPlan(items=items),)), spec)
        found = uniform_steps(spec, *(np.array([[float(value)]]) for value in (batch, context, new, drafts)))
        for name in (
            "requests",
            "tokens",
            "prompt_tokens",
            "emitting_rows",
            "context_tokens",
            "context_pairs",
            "window_pairs",
            "candidate_pairs",
        ):
            assert getattr(found, name)[0, 0] == getattr(wanted, name)[0], name
        for name in ("selected_pairs", "scanned_pairs"):
            for ratio, values in getattr(wanted, name).items():
                assert getattr(found, name)[ratio][0, 0] == values[0], (name, ratio)


def test_impossible_steps_have_no_features(spec: ModelSpec) -> None:
    one: Array = np.ones((1, 1))
    with pytest.raises(DomainError, match="new_tokens <= context_tokens"):
        uniform_steps(spec, one, one, 2 * one)


def test_gemm_terms_are_the_flops_of_the_spec(spec: ModelSpec) -> None:
    """Projections, router, Engram and experts and what is left out of it, as ``core.counts`` adds them up."""
    assert isinstance(spec, V41Spec)
    work = terms(spec, RankPlace(), uniform_steps(spec, *(np.full((1, 1), value) for value in (64.0, 100.0, 1.0))), 4)
    found = sum(
        float(term.count[0, 0]) * term.unit
        for name in ("projection", "router", "expert_gemm", "engram.gate")
        for term in work[name]
        if term.name == "flops"
    )
    shared = 6 * spec.num_shared_experts * spec.moe_intermediate_size * spec.hidden_size * spec.num_layers
    mhc = 4 * spec.num_layers * (2 + spec.hc_mult) * spec.hc_mult**2 * spec.hidden_size
    selection = 0
    for layer, ratio in enumerate(spec.compress_ratios):
        if spec.role(layer) is AttentionRole.FULL:
            selection += 2 * spec.head_dim * (spec.hidden_size * min(ratio, 2) + spec.index_head_dim)
        if spec.role(layer) in (AttentionRole.FULL, AttentionRole.REINDEX):
            selection += 2 * spec.index_num_heads * (spec.q_lora_rank * spec.index_head_dim + spec.hidden_size)
    assert found / 64 + shared + mhc + selection == pytest.approx(sum(gemm_flops(spec).layers))


def test_a_tensor_rank_has_half_the_work_of_what_is_split(spec: ModelSpec) -> None:
    table = one_step(spec, 8, 100, 1)
    whole, half = (terms(spec, RankPlace(layout=layout), table, 4) for layout in (Layout(), Layout(tp=2)))

    def work(found: dict[str, list], name: str) -> float:  # type: ignore[type-arg]
        return float(next(term.count[0, 0] * term.unit for term in found[name] if term.name == "flops"))

    assert work(half, "lm_head") == pytest.approx(work(whole, "lm_head") / 2)
    assert work(whole, "projection") / 2 < work(half, "projection") < work(whole, "projection")
    assert work(half, "router") == work(whole, "router")


@pytest.mark.parametrize("layout", ["tp2dp1ep1", "tp1dp2ep2", "tp2dp1ep2"])
@pytest.mark.parametrize("model", ["tiny-v41", "qwen3-moe-100m"])
def test_messages_have_the_bytes_of_the_traffic_table(model: str, layout: str) -> None:
    spec = read_model_files(model).spec
    place = RankPlace(layout=parse_layout(layout).decode.unit)
    ranks = place.layout.dp
    found: dict[str, float] = {}
    for message in messages(spec, place, one_step(spec, 6, 80, 1, ranks), 4):
        found[message.component] = found.get(message.component, 0.0) + float((message.calls * message.bytes_each)[0, 0])
    wanted = step_traffic(spec, place, StepPeers((6,) * ranks, (6,) * ranks, (6,) * ranks), 4)
    assert {name: value for name, value in found.items() if value} == pytest.approx(wanted, rel=0.02)


def test_one_rank_sends_nothing(spec: ModelSpec) -> None:
    assert messages(spec, RankPlace(), one_step(spec, 4, 100, 1), 4) == []


def test_a_message_costs_what_the_table_says_and_more_beyond_it() -> None:
    table = CollectiveFit(2, (100.0, 1000.0, 10_000.0), (1e-4, 1e-4, 4e-4))

    def seconds(size: float, ranks: int = 2, calls: float = 3.0) -> float:
        return float(message_seconds(table, Messages("all_reduce", np.full((1, 1), calls), np.full((1, 1), size)), ranks)[0])

    assert seconds(100) == pytest.approx(3e-4)
    assert seconds(1) == pytest.approx(3e-4)
    assert seconds(float(np.sqrt(1000 * 10_000))) == pytest.approx(3 * 2e-4)
    assert seconds(100_000) == pytest.approx(3 * 4e-3)
    assert seconds(100, ranks=4) == pytest.approx(3 * 3e-4)


def test_a_step_fit_of_another_layout_stands_in_where_the_cores_are_alike(fit: ModelFit, spec: ModelSpec) -> None:
    cost = cost_of(fit, spec, "tp1dp2ep2")
    assert cost.step_fit.layout == "tp2dp1ep1"
    assert "whole steps of tp2dp1ep1" in cost.price_table(one_step(spec, 2, 50, 1, 2)).note
    none = CalibratedCost(msgspec.structs.replace(fit, steps=()), spec, Layout())
    assert none.step_fit == StepFit("tp1dp1ep1", 2, 0)
    assert "no whole step measured" in none.price_table(one_step(spec, 2, 50, 1)).note
