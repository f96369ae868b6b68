"""A rank that stops inside a collective: the other ends within the time limit and says what it waited for. (Through the actors:
``test_faults``.)"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from engine.core.layout import Layout
from engine.core.sharding import RankPlace
from tests.model.engine_harness import small_v41_spec
from tests.parallel.lockstep import EXIT_PEER, Case, Fault, Job
from tests.parallel.processes import run_ranks


@pytest.mark.parametrize(
    ("sent", "kind", "call"),
    [
        (signal.SIGKILL, "engram.fetch", 3),  # the ids of the second step
        (signal.SIGSTOP, "combine", 12),  # in the first draft round: eight backbone layers, then two of the draft
    ],
    ids=["killed", "stopped"],
)
def test_the_other_rank_ends_in_bounded_time(tmp_path: Path, sent: signal.Signals, kind: str, call: int) -> None:
    place = RankPlace(layout=Layout(dp=2, ep=2))
    fault = Fault(1, kind, call, sent)
    case = Case("fault", place, small_v41_spec(), (Job(9, 1, 8), Job(5, 2, 8)), draft_tokens=2, fault=fault, timeout_s=1.5)
    codes, errors = run_ranks(tmp_path, [case], 2)
    assert codes == [EXIT_PEER, -signal.SIGKILL], errors
    assert f"rank 0: {kind} with ranks 0, 1 failed" in errors
    assert "a peer has died, hangs or is too slow" in errors
