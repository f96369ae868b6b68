"""Items that cannot be sampled: one request ends, with its reason, and nothing else changes."""

from __future__ import annotations

import msgspec
import pytest

from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.events import Admitted, Finished, StepCommitted
from engine.core.plan import ItemResult, RankResult, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig
from tests.core.core_harness import FAILURE, Replica


def replica_of(draft_tokens: int = 0) -> Replica:
    cache = CacheConfig(num_blocks=40, block_size=4, max_running=6, max_batched_tokens=64, context_length=60, max_draft_tokens=draft_tokens)
    return Replica(SchedulerConfig(cache=cache, draft_tokens=draft_tokens))


def request(number: int, length: int = 9, **values: object) -> Request:
    return Request(number, tuple(range(10 * number, 10 * number + length)), SamplingParams(max_tokens=8), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_one_of_three_fails(draft_tokens: int) -> None:
    replica = replica_of(draft_tokens)
    for number in range(3):
        replica.submit(request(number))
    replica.plan()
    replica.commit()
    replica.doom(1)
    replica.drain(accept=2, overlap=draft_tokens == 0)
    assert replica.reasons == {0: "length", 1: "error", 2: "length"}
    assert [len(replica.outputs[number]) for number in range(3)] == [8, 1, 8]
    end = next(event for event in replica.log if isinstance(event, Finished) and event.request == 1)
    assert (end.message, end.num_output_tokens) == (FAILURE, 1)
    assert all(event.num_accepted_tokens >= 0 for event in replica.log if isinstance(event, StepCommitted))
    replica.check_memory()


def test_the_same_prompt_finds_nothing_of_it() -> None:
    replica = replica_of()
    replica.submit(request(1, 20))
    replica.doom(1)
    replica.drain()
    replica.failing.clear()
    again = Request(2, replica.requests[1].prompt, SamplingParams(max_tokens=4))
    replica.submit(again)
    replica.drain()
    assert replica.reasons == {1: "error", 2: "length"}
    assert [event.num_cached_tokens for event in replica.log if isinstance(event, Admitted)] == [0, 0]


def test_samples_wait_for_no_fork_of_a_failed_prompt() -> None:
    replica = replica_of()
    replica.submit(request(1, sample_ids=(1, 2, 3)))
    replica.failing.add(1)
    replica.plan()
    replica.commit()
    assert replica.reasons == {1: "error"}
    replica.scheduler.check()
    replica.drain(overlap=True)
    assert replica.reasons == {1: "error", 2: "length", 3: "length"}
    assert replica.outputs[2] == replica.expected_output(2)[0]


def test_an_error_has_no_tokens_and_tokens_no_error() -> None:
    for result in (ItemResult(1, (4,), (), "both"), ItemResult(1, ())):
        replica = replica_of()
        replica.submit(request(1))
        plan = replica.plan()
        assert plan is not None
        with pytest.raises(InvariantError, match="tokens for an item"):
            replica.scheduler.commit(plan, StepResult(plan.step, (RankResult((result,)),)), 1.0)


def test_results_without_the_field_are_read() -> None:
    """Recorded results from before it existed."""
    old = msgspec.msgpack.encode([7, [1, 2], []])
    assert msgspec.msgpack.decode(old, type=ItemResult) == ItemResult(7, (1, 2))
    new = ItemResult(7, (), (), "why")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=ItemResult) == new
