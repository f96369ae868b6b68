"""The state table."""

from __future__ import annotations

import itertools

import pytest

from engine.core.errors import InvariantError
from engine.core.policies import NodeView, QueueView, RankView, VictimView
from engine.core.states import TABLE, State, Transition, next_state


@pytest.mark.parametrize(("state", "transition"), list(itertools.product(State, Transition)))
def test_a_pair_outside_the_table_raises_with_both_names(state: State, transition: Transition) -> None:
    if (state, transition) in TABLE:
        assert next_state(state, transition) is TABLE[state, transition]
        return
    with pytest.raises(InvariantError, match=f"'{state.value}' cannot take '{transition.value}'"):
        next_state(state, transition)


def test_every_life_ends_and_none_ends_twice() -> None:
    assert all((state, transition) not in TABLE for state in (State.FINISHED,) for transition in Transition)
    for state in State:
        if state is not State.FINISHED:
            assert TABLE[state, Transition.ABORT] is TABLE[state, Transition.FAIL] is State.FINISHED
    assert set(TABLE.values()) | {State.WAITING, State.FORKING} == set(State)


def test_policies_cannot_see_an_output_length() -> None:
    """An oracle that knows how long a request will run must not even have a field to come in by."""
    fields = {name for view in (QueueView, VictimView, NodeView, RankView) for name in view._fields}
    assert not [name for name in fields if "max_tokens" in name or "output" in name or "limit" in name or "remaining" in name]
