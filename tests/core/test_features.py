"""Features of hand-made plans, and the closed sums against loops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.features import features, pairs
from engine.core.plan import BlockCopy, PlanItem, RankPlan, StepPlan
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec


@given(st.integers(0, 300), st.integers(0, 200), st.integers(1, 4), st.none() | st.integers(0, 80))
def test_pairs_is_the_sum_it_says(begin: int, count: int, ratio: int, cap: int | None) -> None:
    expected = sum(min((t + 1) // ratio, 10**9 if cap is None else cap) for t in range(begin, begin + count))
    assert pairs(begin, begin + count, ratio, cap) == expected


def test_one_plan_by_hand() -> None:
    items = (PlanItem(0, 1, 200, 4, 3, True), PlanItem(1, 2, 0, 10, 0, False), PlanItem(2, 3, 40_000, 1, 0, True))
    plan = StepPlan(0, (RankPlan(copies=(BlockCopy(1, 2),), items=items), RankPlan()))
    found = features(plan, flash())
    assert found.requests == [3, 0]
    assert found.tokens == [15, 0]
    assert found.prompt_tokens == [10, 0]
    assert found.emitting_rows == [4 + 1, 0]
    assert found.draft_rows == [3, 0]
    assert found.context_tokens == [204 + 10 + 40_001, 0]
    assert found.window_pairs == [4 * 128 + 55 + 128, 0]
    assert found.context_pairs == [201 + 202 + 203 + 204 + 55 + 40_001, 0]
    assert found.selected_pairs[2] == [100 + 101 + 101 + 102 + sum((t + 1) // 2 for t in range(10)) + 512, 0]
    assert found.scanned_pairs[1] == [found.context_pairs[0], 0]
    assert found.candidate_pairs == [810 + 55 + 16_384, 0]
    assert found.copied_blocks == [1, 0]
    assert found.longest_context_tokens == [40_001, 0]
    assert features(plan, dense_spec()).scanned_pairs == {}
