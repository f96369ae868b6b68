"""A request's life as a table: (state, event) -> state. A pair that is not in the table is a bug of ours, and says so.

WAITING --admit--> RUNNING --finish/stop/abort/fail--> FINISHED
FORKING --fork--> RUNNING      a sample of n > 1 that starts from its parent's state
FORKING --unfork--> WAITING    the parent's state is gone, or there was no slot: an ordinary request from now on
RUNNING --preempt--> PREEMPTED --admit--> RUNNING     recompute: nothing is kept but what the prefix tree keeps
RUNNING --swap_out--> SWAPPED --swap_in--> RUNNING    blocks and state wait in host memory
"""

from __future__ import annotations

import enum

from engine.core.errors import InvariantError


class State(enum.Enum):
    WAITING = "waiting"
    FORKING = "forking"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Transition(enum.Enum):
    ADMIT = "admit"
    FORK = "fork"
    UNFORK = "unfork"
    PREEMPT = "preempt"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    FINISH = "finish"  # end token, length
    STOP = "stop"  # the gateway found a stop string
    ABORT = "abort"  # the client left
    FAIL = "fail"  # a worker died, or could not sample it


_END = {Transition.STOP: State.FINISHED, Transition.ABORT: State.FINISHED, Transition.FAIL: State.FINISHED}

TABLE: dict[tuple[State, Transition], State] = {
    (State.WAITING, Transition.ADMIT): State.RUNNING,
    (State.FORKING, Transition.FORK): State.RUNNING,
    (State.FORKING, Transition.UNFORK): State.WAITING,
    (State.RUNNING, Transition.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Transition.SWAP_OUT): State.SWAPPED,
    (State.PREEMPTED, Transition.ADMIT): State.RUNNING,
    (State.SWAPPED, Transition.SWAP_IN): State.RUNNING,
    (State.RUNNING, Transition.FINISH): State.FINISHED,
    # Overlap: a request preempted in plan N+1 may turn out, when plan N commits, to have just emitted its last token.
    (State.PREEMPTED, Transition.FINISH): State.FINISHED,
    (State.SWAPPED, Transition.FINISH): State.FINISHED,
    **{
        (state, transition): end
        for state in (State.WAITING, State.FORKING, State.RUNNING, State.PREEMPTED, State.SWAPPED)
        for transition, end in _END.items()
    },
}


def next_state(state: State, transition: Transition) -> State:
    """Raise InvariantError naming both where the table has no such pair."""
    after = TABLE.get((state, transition))
    if after is None:
        raise InvariantError(f"a request in state {state.value!r} cannot take {transition.value!r}")
    return after
