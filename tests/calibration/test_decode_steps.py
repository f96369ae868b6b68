"""Features of steps in a row, against the plans themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.decode_steps import decode_steps
from calibration.features import table_of_plans
from engine.core.errors import DomainError
from engine.core.plan import PlanItem, RankPlan, StepPlan, TailSave
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec

CONTEXTS = st.integers(1, 400) | st.integers(1, 70_000)


@given(
    st.sampled_from([flash(), dense_spec()]),
    st.lists(st.lists(CONTEXTS, max_size=6), min_size=1, max_size=3),
    st.integers(1, 300),
    st.booleans(),
)
def test_as_of_the_plans(spec: object, contexts: list[list[int]], num_steps: int, tails: bool) -> None:
    saves = [[(step + rank) % 2 for rank in range(len(contexts))] for step in range(num_steps)] if tails else []
    plans = [
        StepPlan(
            step,
            tuple(
                RankPlan(
                    items=tuple(PlanItem(slot, slot, context - 1 + step, 1, 0, True) for slot, context in enumerate(rank)),
                    tail_saves=(TailSave(0, 0, 0),) * (saves[step][number] if tails else 0),
                )
                for number, rank in enumerate(contexts)
            ),
        )
        for step in range(num_steps)
    ]
    expected, found = table_of_plans(plans, spec), decode_steps(spec, contexts, num_steps, saves)  # type: ignore[arg-type]
    for field in dataclasses.fields(expected):
        one, two = getattr(expected, field.name), getattr(found, field.name)
        if not isinstance(one, dict):
            one, two = {0: one}, {0: two}
        assert one.keys() == two.keys()
        for key, values in one.items():
            np.testing.assert_array_equal(values, two[key], err_msg=f"{field.name} {key}")


def test_no_steps() -> None:
    with pytest.raises(DomainError, match="0 steps"):
        decode_steps(dense_spec(), [[1]], 0)
