"""Prices of plans one by one, against prices of tables: the same to the last bit, whatever the model, the layout and the options."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from calibration.contention import HostMemory
from calibration.cost_model import CalibratedCost, CollectiveFit, ComponentFit, ModelFit, ProbeFactors, RankFit, StepFit
from calibration.features import table_of_plans, uniform_steps
from calibration.fit import column_names
from calibration.floors import terms
from calibration.imbalance import BALANCED, ExpertBalance
from calibration.single_price import MAX_RANKS, SinglePrice, interpolate
from engine.core.errors import ConfigError, DomainError
from engine.core.layout import Layout, parse_layout
from engine.core.plan import PlanItem, RankPlan, SequenceStart, StepPlan, TailSave
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec, V41Spec
from engine.core.step_cost import StepPrice
from engine.model.files import read_model_files
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec

NUM_CORES = 4
SPECS: dict[str, ModelSpec] = {
    "flash": flash(),
    "dense": dense_spec(),
    **{name: read_model_files(name).spec for name in ("tiny-v41", "qwen3-moe-100m")},
}
LAYOUTS = ("tp1dp1ep1", "tp2dp1ep1", "tp2dp1ep2", "tp1dp2ep2", "tp1dp3ep1", "tp2dp2ep4", "tp1dp8ep8", "tp2dp4ep2", "tp1dp16ep16")


def random_fit(spec: ModelSpec, layout: Layout, draft_tokens: int, rng: random.Random) -> ModelFit:
    """Any rates over any columns, some of them 0: what is right for these is right for every fit."""
    cores, busy = max(1, NUM_CORES // layout.num_gpus), min(layout.num_gpus, NUM_CORES) - 1
    fitted = layout if rng.random() < 0.7 else Layout(tp=layout.num_gpus)
    one = np.ones((1, fitted.dp))
    components = {}
    for name, work in terms(spec, RankPlace(layout=fitted), uniform_steps(spec, one, one, one), 4, draft_tokens).items():
        columns = column_names(work)
        units = [term.unit for term in work for _ in range(1 + 2 * len(term.knots))]
        rates = tuple(rng.random() * 1e-4 / unit if rng.random() < 0.6 else 0.0 for unit in units)
        components[name] = ComponentFit(columns, rates, 0.0, 0.0, 0.0)
    hull = {"tokens": 40.0, "requests": 7.0, "context_tokens": 900.0, "longest_context_tokens": 500.0} if rng.random() < 0.8 else {}
    rank = RankFit(str(fitted), cores, busy, components, dict.fromkeys(hull, 2.0), hull, 9, rng.random() < 0.2 and fitted == layout)
    sizes = (1e2, 1e3, 1e5, 1e6)
    collective = CollectiveFit(2, sizes, tuple(sorted(rng.random() * 1e-3 + 1e-5 for _ in sizes)))
    step = StepFit(str(layout), cores, busy, 1.1, 1.3, 3e-4, 2e-5, 1e-4, 0.8, 1.3, rng.randint(0, 1))
    memory = HostMemory(1e6, 3e6, 2) if rng.random() < 0.3 else None
    return ModelFit("m", "h", "float32", 4, draft_tokens, NUM_CORES, (rank,), (collective,), (step,) if rng.random() < 0.8 else (), memory)


def random_cost(spec: ModelSpec, layout: Layout, rng: random.Random) -> CalibratedCost:
    draft_tokens = 3 if isinstance(spec, V41Spec) and rng.random() < 0.4 else 0
    num_experts = spec.num_experts if isinstance(spec, V41Spec) else spec.moe.num_experts if spec.moe else 0
    options: dict[str, Any] = {"expert_balance": rng.choice([None, BALANCED, ExpertBalance(zipf=1.3)])}
    if num_experts and num_experts < 100:
        options["redundant_experts"] = rng.choice([0, layout.ep])
    elif options["expert_balance"] != BALANCED:  # tables for many experts and layers take long to make
        options["expert_balance"] = None
    if isinstance(spec, V41Spec) and spec.engram is not None:
        options["engram"] = rng.choice(["gpu", "host", "replicated"])
        options["host_memory"] = rng.choice([None, HostMemory(2e6, 5e6)])
        options["ranks_per_host"] = rng.choice([None, 1, 2, 3, 20])
    if rng.random() < 0.5:
        options["probe"] = ProbeFactors(1.3, 0.9, 1.7)
    return CalibratedCost(random_fit(spec, layout, draft_tokens, rng), spec, layout, draft_tokens=draft_tokens, **options)


def random_rank(rng: random.Random, draft_tokens: int) -> RankPlan:
    """Idle, decoding, with prompts whole and in part, or all of it; contexts on either side of every limit."""
    items = []
    longest, chunk, count = rng.choice([30, 600, 90_000]), rng.choice([1, 1, 40, 3000]), rng.choice([0, 1, 3, 20])
    for slot in range(count):
        drafts = rng.randint(0, draft_tokens)
        new = rng.randint(1, chunk) + drafts
        emits = drafts > 0 or rng.random() < 0.8
        items.append(PlanItem(slot, slot, rng.choice([0, rng.randint(0, longest)]), new, drafts, emits))
    starts = tuple(SequenceStart(slot, slot, 0, ()) for slot in range(rng.randint(0, count)))
    return RankPlan(items=tuple(items), starts=starts, tail_saves=(TailSave(0, 0, 0),) * rng.randint(0, count))


def check_same(cost: CalibratedCost, plans: list[StepPlan]) -> None:
    """Every plan alone has the price of its row, among others and as the only one."""
    together = cost.price_table(table_of_plans(plans, cost.spec))
    for row, plan in enumerate(plans):
        found = cost.price(plan)
        for table, index in ((together, row), (cost.price_table(table_of_plans([plan], cost.spec)), 0)):
            assert (found.step_s, found.low_s, found.high_s) == (table.step_s[index], table.low_s[index], table.high_s[index])
            wanted = {name: (seconds[index], table.provenance[name]) for name, seconds in table.components.items() if seconds[index] > 0}
            assert {name: (part.seconds, part.provenance) for name, part in found.components.items()} == wanted
            assert list(found.components) == list(wanted)
            assert found.extrapolated == table.extrapolated[index]
            assert found.note == table.note


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SPECS)), st.sampled_from(LAYOUTS), st.integers(0, 10**9))
def test_same_as_tables(model: str, layout: str, seed: int) -> None:
    rng, unit, spec = random.Random(seed), parse_layout(layout).decode.unit, SPECS[model]
    try:
        cost = random_cost(spec, unit, rng)
    except ConfigError:  # a layout that this model cannot be cut by
        assume(False)
    drafts = cost.draft_tokens
    plans = [StepPlan(step, tuple(random_rank(rng, drafts) for _ in range(unit.dp))) for step in range(5)]
    check_same(cost, [*plans, StepPlan(5, (RankPlan(),) * unit.dp)])


def test_every_kind_of_cost_is_reached() -> None:
    """Else the property above would say little: each of these decides other formulas."""
    rng, seen = random.Random(5), set[str]()
    for name, spec in SPECS.items():
        for text in LAYOUTS:
            layout = parse_layout(text).decode.unit
            for _ in range(6):
                try:
                    cost = random_cost(spec, layout, rng)
                except ConfigError:
                    continue
                seen |= {name, text, f"engram {cost.place.engram}", f"loads {cost.loads is not None}", f"drafts {cost.draft_tokens}"}
                seen |= {f"memory {cost.host_memory is not None}", f"collectives {cost.collective is not None}"}
    assert seen >= {*SPECS, *LAYOUTS, "engram gpu", "engram host", "engram replicated", "loads True", "loads False", "drafts 3", "drafts 0"}
    assert seen >= {"memory True", "memory False", "collectives True", "collectives False"}


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5, unique=True), st.floats(-12, 12), st.integers(0, 99))
def test_interpolated_as_numpy_does(points: list[float], x: float, seed: int) -> None:
    rng, xs = random.Random(seed), sorted(points)
    ys = [rng.random() for _ in xs]
    for one in (x, *xs):
        assert interpolate(one, xs, ys) == np.interp(one, xs, ys)


def test_many_ranks_are_priced_as_tables() -> None:
    layout = Layout(dp=MAX_RANKS + 1, ep=1)
    cost = CalibratedCost(random_fit(SPECS["dense"], layout, 0, random.Random(1)), SPECS["dense"], layout)
    check_same(cost, [StepPlan(0, (RankPlan(items=(PlanItem(0, 0, 9, 1, 0, True),)),) * layout.dp)])


def test_plans_of_other_ranks_are_refused() -> None:
    spec = SPECS["tiny-v41"]
    cost = CalibratedCost(random_fit(spec, Layout(), 0, random.Random(1)), spec, Layout())
    with pytest.raises(DomainError, match="1 data ranks; the steps have 2"):
        cost.price(StepPlan(0, (RankPlan(), RankPlan())))


def test_fits_by_other_terms_are_refused() -> None:
    spec = SPECS["dense"]
    fit = random_fit(spec, Layout(), 0, random.Random(1))
    rank = msgspec.structs.replace(fit.ranks[0], components={"other": ComponentFit(("launch",), (1.0,), 0.0, 0.0, 0.0)})
    cost = CalibratedCost(msgspec.structs.replace(fit, ranks=(rank,)), spec, Layout())
    with pytest.raises(DomainError, match="calibrate anew"):
        cost.price(StepPlan(0, (RankPlan(),)))


def test_operations_that_nobody_wrote_down_are_refused() -> None:
    """Rather than priced as something else."""
    with pytest.raises(TypeError):
        SinglePrice(lambda table: np.sin(table.tokens), SPECS["dense"], 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError):
        SinglePrice(lambda table: np.median(table.tokens), SPECS["dense"], 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="no array of numbers"):
        SinglePrice(lambda table: np.asarray(table.tokens), SPECS["dense"], 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="branch"):
        SinglePrice(lambda table: table if table.tokens else None, SPECS["dense"], 1)  # type: ignore[arg-type, return-value]


def test_an_idle_step_is_a_price() -> None:
    spec = SPECS["dense"]
    cost = CalibratedCost(random_fit(spec, Layout(), 0, random.Random(1)), spec, Layout())
    assert cost.price(StepPlan(0, (RankPlan(),))) == StepPrice(0.0, 0.0, 0.0, {}, False, "")
