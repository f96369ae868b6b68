"""Many simulations at once: what dies is said, what is no longer wanted is ended, answers keep the order of the questions."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from engine.core.cache_config import CacheConfig
from engine.core.errors import TwinferError
from engine.core.scheduler_config import SchedulerConfig
from engine.model.files import read_model_files
from twin import executors, point
from twin.config import TwinConfig
from twin.given_cost import GivenCost
from twin.workload.spec import WorkloadSpec


def question(name: str, requests: int) -> bytes:
    cache = CacheConfig(num_blocks=64, block_size=64, max_running=4, max_batched_tokens=256, context_length=4096)
    return point.encode(
        point.Question(
            name=name, layout="tp1dp1ep1", request_rate=10.0, concurrency=None, spec=read_model_files("tiny-v41").spec,
            config=TwinConfig(scheduler=SchedulerConfig(cache=cache)), cost=GivenCost(0.01, 1e-5, 0.0),
            workload=WorkloadSpec(request_rate=10.0, requests=requests, isl="30", osl="5"), slo=None,
        )
    )  # fmt: skip


def test_answers_come_in_the_order_of_the_questions() -> None:
    asked = [question("long", 400), question("short", 3), question("middle", 50)]
    found = [point.decode(one)[0] for one in executors.run_all(asked, point.answer, 3)]
    assert [(one["name"], one["finished"]) for one in found] == [("long", 400), ("short", 3), ("middle", 50)]


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(TwinferError, match="exit code 1 and no answer"):
        list(executors.run_all([b"no question", b"no question"], point.answer, 2))


def test_what_nobody_waits_for_any_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr("twin.executors.subprocess.Popen", Recorded)
    answers = executors.run_all([question("short", 3), *(question("long", 5_000_000) for _ in range(3))], point.answer, 2)
    assert point.decode(next(answers))[0]["name"] == "short"
    answers.close()  # type: ignore[attr-defined]  # it is a generator
    assert 2 <= len(started) <= 3
    assert all(process.wait(10) is not None for process in started)
