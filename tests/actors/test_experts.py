"""Loads of experts on their way up, orders to move experts on their way down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.actors.gateway import Generation
from engine.actors.supervisor import open_engine
from engine.core.events import Event
from engine.core.expert_map import even_map
from engine.core.plan import StepPlan, StepResult
from engine.core.rank_counters import RankCounters, added
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script
from tests.actors.test_engine import params


class Results:
    def __init__(self) -> None:
        self.seen: list[StepResult] = []

    def planned(self, plan: StepPlan, now_s: float) -> None: ...

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:  # noqa: ARG002 (the protocol's signature)
        self.seen.append(result)

    def events(self, events: Sequence[Event]) -> None: ...


async def test_reports_of_all_ranks_add_up_and_experts_move_once(tmp_path: Path) -> None:
    moved = tmp_path / "moved.jsonl"
    script = Script(expert_choices=((900, 900, 10, 10), (50, 50, 50, 50)), rebalanced_file=str(moved))
    start = even_map(4, 0, 2)
    config = msgspec.structs.replace(engine_config(script, num_ranks=2), expert_maps=(start, start), report_steps=3, rebalance_experts=True)
    results = Results()
    async with open_engine(config, worker_module=MODULE, observers=(results,)) as engine:
        await engine.complete(Generation(prompt=(1, 2, 3), params=params(12)))
        assert engine.num_rebalances == 1
    reports = [result for result in results.seen if result.counters is not None]
    assert [result.step for result in reports] == [step for step in range(len(results.seen)) if step % 3 == 0]
    counters = reports[0].counters
    assert counters is not None
    assert counters.expert_choices == ((1800, 1800, 20, 20), (100, 100, 100, 100))
    assert counters.traffic == (("dispatch", 20, 2),)
    assert counters.engram_hits == 2
    # The layer that was uneven moved, the other did not, and later reports of the same loads have nothing to gain.
    lines = [json.loads(line) for line in moved.read_text().splitlines()]
    assert len(lines) == 2  # both ranks
    assert lines[0] == lines[1]
    assert sorted(lines[0][0]) == [0, 1, 2, 3]
    assert {0, 1} != set(lines[0][0][:2])
    assert tuple(lines[0][1]) == start.logical


def test_counters_of_ranks_are_added_by_kind() -> None:
    first = RankCounters(traffic=(("combine", 5, 1), ("dispatch", 7, 2)), engram_misses=1, engram_wait_s=0.5)
    second = RankCounters(expert_choices=((1, 2),), traffic=(("dispatch", 1, 1),), engram_hits=3)
    assert added([first, second]) == RankCounters(
        expert_choices=((1, 2),),
        traffic=(("combine", 5, 1), ("dispatch", 8, 3)),
        engram_hits=3,
        engram_misses=1,
        engram_wait_s=0.5,
    )
