"""Parity of the twin's driver with the engine's actors: scripted workers, real gateway and scheduler, real time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio

from engine.actors.supervisor import open_engine
from engine.cli.workload_run import EngineSession
from engine.core.cache_config import CacheConfig
from engine.core.driver_log import Arrival, Departure, DriverLog, Place
from engine.core.events import Arrived, Finished, Preempted
from engine.core.plan import RequestId, StepResult
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script
from twin.parity import check_parity
from twin.workload.types import SimRequest

SMALL = CacheConfig(num_blocks=24, block_size=4, max_running=6, max_batched_tokens=24, context_length=64)


class Mixed:
    """A burst, a trickle and followers; a few clients leave. Some prompts begin alike."""

    def __init__(self, seed: int, count: int = 40) -> None:
        self._draw = random.Random(seed)
        self._count = count
        self.num_requests = 2 * count

    def arrivals(self) -> Iterator[SimRequest]:
        draw, now_s = self._draw, 0.0
        for index in range(self._count):
            now_s += 0.0 if index < 8 else draw.choice((0.0, 0.0, 0.002, 0.02))
            yield self._request(index, now_s)

    def _request(self, index: int, now_s: float) -> SimRequest:
        draw = self._draw
        prompt = array("q", [*range(draw.choice((0, 8, 12))), *(draw.randrange(20, 900) for _ in range(draw.randint(1, 20)))])
        leaves = draw.choice((None, None, None, None, 0.03))
        # Those of the burst hold more than there is memory for, and who leaves would have taken longer than that.
        output = 40 if index < 8 or leaves else draw.randint(1, 24)
        return SimRequest(index, now_s, prompt, output, output, priority=draw.randint(0, 2), cancel_after_s=leaves)

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        return self._request(request.index + 1000, end_s) if request.index < self._count // 2 else None


Recorded = tuple[SchedulerConfig, DriverLog, dict[RequestId, Request]]


def record(seed: int, *, num_ranks: int = 1, **scheduler: Any) -> Recorded:
    cache = msgspec.structs.replace(SMALL, max_draft_tokens=scheduler.get("draft_tokens", 0))

    async def main() -> Recorded:
        config = engine_config(
            Script(tokens=(7, 8, 9), step_s=0.001, accepted=(0, 2, 1)), num_ranks=num_ranks, cache=cache, scheduler=scheduler
        )
        log, requests = DriverLog(), dict[RequestId, Request]()
        with trio.fail_after(60):
            async with open_engine(config, None, observers=(log,), worker_module=MODULE) as engine:
                session = EngineSession(engine, log, requests)
                await session.warm_up(num_ranks)
                await session.run(Mixed(seed))
        return msgspec.structs.replace(config.scheduler, max_waiting=config.max_requests), log, requests

    return trio.run(main)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(3)


@pytest.mark.parametrize(
    ("seed", "num_ranks", "scheduler"),
    [
        (1, 1, {}),
        (2, 2, {}),
        (4, 1, {"chunked_prefill_size": 5, "order_policy": "priority"}),
        (5, 2, {"prefix_caching": False}),
        (6, 2, {"draft_tokens": 2}),
    ],
)
def test_the_twin_makes_the_plans_of_the_engine(seed: int, num_ranks: int, scheduler: dict[str, Any]) -> None:
    config, log, requests = record(seed, num_ranks=num_ranks, **scheduler)
    parity = check_parity(config, log, requests)
    assert parity.difference == ""
    assert parity.num_equal == parity.num_plans == len(log.plans) == len(log.committed_s) > 20
    # A client may be gone before the scheduler has looked.
    assert 30 < parity.num_requests == sum(isinstance(event, Arrived) for event in log.log) <= len(requests)
    assert any(isinstance(event, Finished) and event.reason == "length" for event in log.log)
    assert any(isinstance(call, Departure) for call in log.calls)
    assert any(isinstance(event, Preempted) for event in log.log)


def test_a_plan_that_is_another_one_is_found(recorded: Recorded) -> None:
    config, log, requests = recorded
    assert check_parity(config, log, requests).difference == ""
    number = len(log.plans) // 2
    plan = log.plans[number]
    rank = plan.ranks[0]
    item = msgspec.structs.replace(rank.items[0], num_new_tokens=rank.items[0].num_new_tokens + 1)
    changed = msgspec.structs.replace(plan, ranks=(msgspec.structs.replace(rank, items=(item, *rank.items[1:])), *plan.ranks[1:]))
    parity = check_parity(config, _copy(log, plans=[*log.plans[:number], changed, *log.plans[number + 1 :]]), requests)
    assert parity.num_equal == number
    assert parity.difference.startswith(f"plan {number} differs after")


def test_another_rule_another_place_and_another_result_are_found(recorded: Recorded) -> None:
    config, log, requests = recorded
    other = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, max_batched_tokens=23))
    assert check_parity(other, log, requests).difference

    first = next(index for index, call in enumerate(log.calls) if isinstance(call, Arrival) and call.place.num_committed > 10)
    calls = list(log.calls)
    place = calls[first].place
    calls[first] = msgspec.structs.replace(calls[first], place=Place(place.num_committed - 1, place.num_planned - 1))
    assert check_parity(config, _copy(log, calls=calls), requests).difference

    # One token fewer in a result and the request goes on: the next plans hold it.
    number = next(index for index, event in enumerate(log.results) if event.ranks[0].items)
    result = log.results[number]
    item = result.ranks[0].items[0]
    broken = StepResult(result.step, (msgspec.structs.replace(result.ranks[0], items=(msgspec.structs.replace(item, tokens=()),)),))
    assert (
        "refuses"
        in check_parity(config, _copy(log, results=[*log.results[:number], broken, *log.results[number + 1 :]]), requests).difference
    )


def test_a_log_with_less_or_more_than_the_twin_does_is_found(recorded: Recorded) -> None:
    config, log, requests = recorded
    shorter = check_parity(config, _copy(log, plans=log.plans[:-1]), requests)
    assert "makes another one" in shorter.difference
    longer = check_parity(config, _copy(log, plans=[*log.plans, log.plans[-1]]), requests)
    assert "nothing to do" in longer.difference
    fewer = check_parity(config, _copy(log, results=log.results[:-1]), requests)
    assert "log ends" in fewer.difference
    events = check_parity(config, _copy(log, log=[*log.log, log.log[-1]]), requests)
    assert events.difference.startswith("the engine's log has")


def _copy(recorded: DriverLog, **changes: Any) -> DriverLog:
    found = DriverLog()
    for name in ("plans", "planned_s", "results", "committed_s", "calls", "log"):
        setattr(found, name, changes.get(name, list(getattr(recorded, name))))
    return found
