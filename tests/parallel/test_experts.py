"""What of the spread experts needs no second process: which slot a choice goes to, forced choices, counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.expert_map import even_map
from engine.core.layout import Layout
from engine.core.sharding import RankPlace
from engine.kernels.experts import expert_gemm, expert_gemm_partial
from engine.kernels.timing import ComponentTimer, timing
from engine.parallel.experts import RoutedExperts, forced_ids

IDS = torch.tensor([[0, 3], [0, 2], [5, 0], [0, 1]])


def routed(place: RankPlace, num_experts: int = 8) -> RoutedExperts:
    groups: Any = SimpleNamespace(place=place, tensor=None, world=None)
    placement = place.expert_map(num_experts)
    slots = placement.slots_per_rank
    return RoutedExperts(groups, placement, 2, torch.zeros(slots, 8, 4), torch.zeros(slots, 4, 4), None)


def test_the_slots_of_a_redundant_expert_take_turns() -> None:
    place = RankPlace(layout=Layout(dp=2, ep=2), redundant_experts=2)
    placement = even_map(8, 2, 2)
    assert len(placement.slots()[0]) == 2
    slots_TK = routed(place)._physical(IDS)
    for token, row in enumerate(slots_TK.tolist()):
        for slot, expert in zip(row, IDS[token].tolist(), strict=True):
            assert placement.logical[slot] == expert
    assert set(slots_TK[IDS == 0].tolist()) == set(placement.slots()[0])


def test_counts_are_of_a_tensor_ranks_own_tokens() -> None:
    counts = []
    for rank in range(2):
        experts = routed(RankPlace(layout=Layout(tp=2), rank=rank))
        experts._count(IDS)
        counts.append(experts.take_counts())
        assert sum(experts.take_counts()) == 0
    assert [sum(pair) for pair in zip(*counts, strict=True)] == torch.bincount(IDS.flatten(), minlength=8).tolist()


@pytest.mark.parametrize("tokens", [(6, 2), (0, 8)])
def test_balanced_choices_are_balanced_over_all_ranks_together(tokens: tuple[int, int]) -> None:
    chosen = []
    for rank, count in enumerate(tokens):
        spread = routed(RankPlace(layout=Layout(dp=2, ep=2), rank=rank))
        like = torch.zeros((count, 2), dtype=torch.int64)
        ids = forced_ids("balanced", like, 8, spread, tokens)
        assert all(len(set(row)) == 2 for row in ids.tolist())
        chosen += ids.flatten().tolist()
    assert sorted(chosen) == sorted(list(range(8)) * 2)
    first = forced_ids("imbalanced", torch.zeros((3, 2), dtype=torch.int64), 8, None, ())
    assert first.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("width", [16, 512])  # all experts in one product; grouped
def test_the_parts_of_two_ranks_are_the_whole(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    w13, w2 = (torch.randn(shape, generator=generator) * 0.1 for shape in ((8, 2 * width, 64), (8, width, 64)))
    x, weights = torch.randn(50, 64, generator=generator), torch.rand(50, 2, generator=generator)
    ids = torch.rand(50, 8, generator=generator).topk(2).indices
    whole = expert_gemm(x, weights, ids, w13, w2, 10.0)
    timer = ComponentTimer(torch.device("cpu"))
    with timing(timer):
        parts = []
        for first in (0, 4):
            local = torch.where((ids >= first) & (ids < first + 4), ids - first, 4)
            parts.append(expert_gemm_partial(x, weights, local, w13[first : first + 4], w2[first : first + 4], 10.0))
    assert torch.allclose(parts[0] + parts[1], whole, atol=1e-5)
    assert "expert_gemm" in dict(timer.take())
    nothing = expert_gemm_partial(x, weights, torch.full_like(ids, 4), w13[:4], w2[:4], 10.0)
    assert not nothing.any()
