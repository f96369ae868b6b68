"""Parts of tensors: what the ranks hold adds up to the whole."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from engine.core.counts import weight_bytes
from engine.core.errors import ConfigError
from engine.core.layout import Layout
from engine.core.memory import held_weight_bytes
from engine.core.plan import PlanItem, RankPlan, StepPeers, StepPlan, step_peers
from engine.core.sharding import RankPlace, held_part, held_tensors, holds
from engine.core.specs import DenseSpec, ModelSpec
from engine.core.tensors import expected_tensors
from engine.core.traffic import all_reduce_bytes, token_shares
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec

LAYOUTS = [Layout(tp=2), Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=4), Layout(tp=2, dp=2, ep=2), Layout(tp=4, ep=2), Layout(dp=4, ep=1)]


def ranks(layout: Layout, **options: int) -> list[RankPlace]:
    return [RankPlace(layout=layout, rank=rank, **options) for rank in range(layout.tp * layout.dp)]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("spec", [flash(), dense_spec()], ids=["flash", "dense"])
def test_the_parts_of_a_tensor_are_the_whole_as_often_as_it_is_replicated(spec: ModelSpec, layout: Layout) -> None:
    if isinstance(spec, DenseSpec):
        layout = msgspec.structs.replace(layout, ep=1)
    places = ranks(layout)
    for name, tensor in expected_tensors(spec).items():
        if ".experts." in name and ".experts.0." not in name:
            continue
        parts = [part for part in (held_part(spec, place, name, tensor) for place in places) if part is not None]
        if not parts:
            continue
        assert len(parts) == len(places), name
        distinct = sorted({(part.start, part.stop) for part in parts})
        assert len({part.dim for part in parts}) == 1
        assert (distinct[0][0], distinct[-1][1]) == (0, tensor.shape[parts[0].dim])
        assert all(before[1] == after[0] for before, after in itertools.pairwise(distinct)), name
        counts = {sum((part.start, part.stop) == each for part in parts) for each in distinct}
        assert len(counts) == 1, name  # each part equally often


def test_one_rank_holds_everything() -> None:
    for spec in (flash(), dense_spec()):
        held = dict(held_tensors(spec, RankPlace()))
        assert held == expected_tensors(spec)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_experts_are_held_once_in_all(layout: Layout) -> None:
    spec = msgspec.structs.replace(flash(), num_experts=16, dspark=None)
    whole = sum(tensor.num_elements for name, tensor in expected_tensors(spec).items() if ".experts." in name)
    for spare in (0, layout.ep if layout.ep > 1 else 0):
        held = [
            sum(tensor.num_elements for name, tensor in held_tensors(spec, place) if ".experts." in name and not name.startswith("mtp."))
            for place in ranks(layout, redundant_experts=spare)
        ]
        assert len(set(held)) == 1
        draft = sum(
            tensor.num_elements for name, tensor in expected_tensors(spec).items() if ".experts." in name and name.startswith("mtp.")
        )
        assert sum(held) * spec.num_experts == (whole - draft) * (spec.num_experts + spare)


def test_a_v41_rank_of_eight_takes_the_published_memory() -> None:
    """The reference counts 36.1 GB of routed experts, 25.3 of Engram, 9.9 replicated and 1.6 of draft in its packed formats."""
    spec = flash()
    place = RankPlace(layout=Layout(dp=8, ep=8))
    names = dict(held_tensors(spec, place))
    experts = sum(tensor.num_elements for name, tensor in names.items() if ".experts." in name and not name.startswith("mtp."))
    assert experts / 35_389_440 * 18_800_640 == pytest.approx(36.1e9, rel=0.002)
    tables = sum(tensor.num_elements for name, tensor in names.items() if "engram.embed" in name)
    assert tables / 256 * 264 == pytest.approx(25.3e9, rel=0.003)
    on_host = msgspec.structs.replace(place, engram="host")
    assert held_weight_bytes(spec, "bfloat16", place) - held_weight_bytes(spec, "bfloat16", on_host) == tables * 2
    assert held_weight_bytes(spec, "bfloat16", place) < weight_bytes(spec, 2) / 6


def test_a_bias_behind_a_sum_is_on_the_first_rank_alone() -> None:
    spec = msgspec.structs.replace(dense_spec(), output_bias=True)
    name = "model.layers.0.self_attn.o_proj.bias"
    assert [holds(spec, place, name) for place in ranks(Layout(tp=2))] == [True, False]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (RankPlace(layout=Layout(dp=2, ep=2), rank=2), "allowed: 0 to 1"),
        (RankPlace(layout=Layout(dp=2, ep=2), redundant_experts=3), "multiple of ep = 2"),
        (RankPlace(redundant_experts=2), "use 0"),
        (RankPlace(layout=Layout(pp=2)), "pipeline"),
    ],
)
def test_impossible_places_are_refused(place: RankPlace, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        place.validate_for(flash())


def test_tokens_are_shared_out_among_tensor_ranks() -> None:
    assert token_shares(Layout(tp=2, dp=2, ep=4), (5, 0)) == (2, 3, 0, 0)
    assert token_shares(Layout(dp=3, ep=3), (5, 0, 1)) == (5, 0, 1)


def test_sums_by_pieces_send_less() -> None:
    assert all_reduce_bytes(1 << 20, 4, 2) == 1 << 20
    assert all_reduce_bytes(1024, 4, 4) == 3 * 1024
    assert all_reduce_bytes(1 << 20, 4, 4) == 2 * 3 * (1 << 18)


def test_peers_are_what_every_rank_may_know() -> None:
    items = (PlanItem(0, 1, 0, 6, 0, False), PlanItem(1, 2, 9, 4, 3, True))
    plan = StepPlan(3, (RankPlan(items=items), RankPlan()))
    assert step_peers(plan) == StepPeers((10, 0), (4, 0), (1, 0))
