"""The cache manager's accounts: bounds of the host pool, what is under way, what is done."""

from __future__ import annotations

import pytest
import trio

from engine.actors.cache import BlocksMoved, CacheManager
from engine.actors.gateway import Generation
from engine.actors.supervisor import open_engine
from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.plan import BlockCopy, RankPlan, StepPlan, SwapIn, SwapOut
from engine.core.sampling import SamplingParams
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script

CONFIG = CacheConfig(10, 4, 2, 8, 40, num_host_blocks=6, num_host_states=2)
OUT = SwapOut(0, (1, 2), (4, 5), 1)


def plan(step: int, **orders: object) -> StepPlan:
    return StepPlan(step, (RankPlan(), RankPlan(**orders)))  # type: ignore[arg-type]


def test_moves_are_counted_when_they_are_done() -> None:
    reports: list[BlocksMoved] = []
    cache = CacheManager(CONFIG, reports.append)
    cache.reset(block_bytes=100)
    cache.begin(plan(0, swap_outs=(OUT,), copies=(BlockCopy(1, 2),)))
    cache.begin(plan(1, swap_ins=(SwapIn((4, 5), (7, 8)),)))
    cache.begin(plan(2))
    assert (cache.stats().in_flight_blocks, cache.stats().moved_bytes) == (5, 0)
    cache.complete(0, 1.0)
    cache.complete(1, 2.0)
    cache.complete(2, 3.0)
    stats = cache.stats()
    assert (stats.swapped_out_blocks, stats.swapped_in_blocks, stats.copied_blocks, stats.moved_bytes, stats.in_flight_blocks) == (
        2,
        2,
        1,
        500,
        0,
    )
    assert [(report.kind, report.rank, report.num_bytes) for report in reports] == [
        ("swap_out", 1, 200),
        ("copy", 1, 100),
        ("swap_in", 1, 200),
    ]


@pytest.mark.parametrize(
    "orders",
    [
        {"swap_outs": (SwapOut(0, (1,), (6,), 0),)},
        {"swap_outs": (SwapOut(0, (1,), (-1,), 0),)},
        {"swap_outs": (SwapOut(0, (1,), (0,), 2),)},
        {"swap_ins": (SwapIn((3,), (1,)),)},
        {"copies": (BlockCopy(0, 10),)},
    ],
)
def test_orders_out_of_bounds_are_not_sent(orders: dict[str, object]) -> None:
    cache = CacheManager(CONFIG)
    with pytest.raises(InvariantError):
        cache.begin(plan(0, **orders))


async def test_swaps_of_a_crowded_engine_are_accounted_for() -> None:
    crowded = CacheConfig(24, 4, 6, 64, 80, num_host_blocks=40, num_host_states=8)
    config = engine_config(Script(), cache=crowded, scheduler={"swap_threshold_tokens": 8, "prefix_caching": False})
    async with open_engine(config, worker_module=MODULE) as engine:

        async def one(index: int) -> None:
            completion = await engine.complete(Generation(prompt=(index, 1, 2), params=SamplingParams(max_tokens=50)))
            assert completion.usage.completion_tokens == 50

        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(one, index)
        stats = engine.stats()
        assert stats.core.preemptions_total > 0
        assert stats.cache.swapped_out_blocks > 0
        assert stats.cache.swapped_in_blocks == stats.cache.swapped_out_blocks
        assert stats.cache.in_flight_blocks == 0
