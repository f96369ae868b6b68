"""Scheduler rules one by one; the random runs are next door."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.cache_config import CacheConfig
from engine.core.errors import CapacityError, ConfigError, InvariantError, RequestError
from engine.core.events import Admitted, Finished, Preempted, Rejected, Resumed
from engine.core.plan import ItemResult, RankResult, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from tests.core.core_harness import EOS, Replica

P = 4
CACHE = {"num_blocks": 32, "block_size": P, "max_running": 4, "max_batched_tokens": 64, "context_length": 64}


def config(**changes: Any) -> SchedulerConfig:
    cache = {**CACHE, **{name: changes.pop(name) for name in list(changes) if name in CacheConfig.__struct_fields__}}
    return SchedulerConfig(cache=CacheConfig(**cache), **{"eos_token_ids": (EOS,), "watermark_blocks": 0, **changes})


def request(number: int, prompt: list[int], max_tokens: int = 4, **changes: Any) -> Request:
    return Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), **changes)


def of_kind(replica: Replica, kind: type) -> list[Any]:
    return [event for event in replica.log if isinstance(event, kind)]


def step(replica: Replica, accept: int = 0) -> Any:
    plan = replica.plan()
    assert plan is not None
    replica.commit(accept)
    replica.check_memory()
    return plan


# --- prefix hits at block boundaries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("length", [1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 8 * P])
def test_cached_tokens_of_a_repeated_prompt(length: int, draft_tokens: int, state: bool) -> None:
    """The largest multiple of P that leaves one token to compute, the same the second and third time, drafts or not."""
    tails = {"num_tails": 8} if state else {}
    replica = Replica(config(draft_tokens=draft_tokens, max_draft_tokens=draft_tokens, has_sequence_state=state, **tails))
    prompt = [index % 7 + 2 for index in range(length)]
    for number in range(3):
        replica.submit(request(number, prompt))
        plan = replica.plan()
        assert plan is not None
        item = plan.ranks[0].items[0]
        assert item.num_computed_tokens == ((length - 1) // P * P if number else 0)
        assert item.num_new_tokens == length - item.num_computed_tokens >= 1
        replica.commit()
        replica.drain()
        replica.check_memory()
        assert replica.outputs[number] == replica.outputs[0] == replica.expected_output(0)[0]


def test_two_equal_prompts_in_one_step_and_then_a_hit() -> None:
    replica = Replica(config())
    for number in (0, 1):
        replica.submit(request(number, [5] * 9))
    replica.drain()
    replica.submit(request(2, [5] * 9))
    replica.drain()
    assert replica.outputs[0] == replica.outputs[1] == replica.outputs[2]
    assert [event.num_cached_tokens for event in of_kind(replica, Admitted)] == [0, 0, 8]


def test_a_running_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    replica = Replica(config())
    replica.submit(request(0, [5] * 9, 20))
    step(replica)
    replica.submit(request(1, [5] * 8 + [6]))
    step(replica)
    assert of_kind(replica, Admitted)[1].num_cached_tokens == 8


def test_salted_tenants_do_not_share() -> None:
    replica = Replica(config())
    for number, salt in enumerate(["a", "b", None, "a"]):
        replica.submit(request(number, [5] * 9, cache_salt=salt))
        replica.drain()
    assert [event.num_cached_tokens for event in of_kind(replica, Admitted)] == [0, 0, 0, 8]


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    replica = Replica(config(has_sequence_state=True, num_tails=8))
    replica.submit(request(0, [5] * 6, 8))
    replica.drain()
    replica.submit(request(1, [5] * 6 + replica.outputs[0] + [3]))
    replica.drain()
    # 13 tokens of the first turn are computed (the last sampled one is not): 12 are in full blocks, with a tail from decoding.
    assert of_kind(replica, Admitted)[1].num_cached_tokens == 12


def test_a_tail_of_a_request_that_ends_with_its_first_token_is_kept() -> None:
    replica = Replica(config(has_sequence_state=True, num_tails=8))
    for number in (0, 1):
        replica.submit(request(number, [5] * 9, 1))
        replica.drain()
    assert of_kind(replica, Admitted)[1].num_cached_tokens == 8


# --- what is refused ----------------------------------------------------------------------------------------------------------


def test_unservable_requests_are_refused_with_the_numbers() -> None:
    replica = Replica(config(num_blocks=5))
    assert replica.config.clamp_warning is not None
    with pytest.raises(RequestError, match=r"holds 20 tokens \(5 blocks of 4\).* has 20 tokens and max_tokens is 7"):
        replica.submit(request(0, [5] * 20, 7))
    replica.submit(request(1, [5] * 19, 7))
    replica.drain()
    assert replica.reasons[1] == "length"
    with pytest.raises(RequestError, match=r"context length is 64 tokens.* has 64 tokens"):
        Replica(config()).submit(request(0, [5] * 64))
    with pytest.raises(RequestError, match="no tokens"):
        replica.submit(request(2, []))
    with pytest.raises(RequestError, match="from 0 to"):
        replica.submit(request(2, [-1]))
    assert [event.code for event in replica.scheduler.take_events() if isinstance(event, Rejected)] == ["invalid_request"] * 2


def test_a_full_queue_is_a_capacity_error() -> None:
    replica = Replica(config(max_waiting=2))
    replica.submit(request(0, [5], sample_ids=(0, 1)))
    with pytest.raises(CapacityError, match="2 requests are waiting; at most 2"):
        replica.submit(request(2, [5]))
    replica.drain()
    assert sorted(replica.reasons) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay_tokens": 128}, "replay_tokens is 128: bounded replay is not implemented"),
        ({"max_batched_tokens": 3}, "max_batched_tokens 3 is less than max_running 4"),
        ({"draft_tokens": 2}, "built for at most 0"),
        ({"order_policy": "lifo"}, "order_policy is 'lifo'; known: fcfs, priority, longest-prefix"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_configuration_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheduler(config(**changes))


# --- the step ------------------------------------------------------------------------------------------------------------------


def test_a_mixed_step_runs_first_and_then_admits_within_the_budget() -> None:
    replica = Replica(config(max_batched_tokens=10, chunked_prefill_size=6))
    replica.submit(request(0, [5] * 3, 20))
    step(replica)
    replica.submit(request(1, [6] * 20))
    replica.submit(request(2, [7] * 20))
    items = [(item.request, item.num_new_tokens, item.emits) for item in step(replica).ranks[0].items]
    assert items == [(0, 1, True), (1, 6, False), (2, 3, False)]


def test_overlap_does_not_plan_beyond_max_tokens_and_ignores_what_came_too_late() -> None:
    replica = Replica(config())
    replica.submit(request(0, [5] * 3, 2))
    for _ in range(2):
        replica.plan()
    assert [plan.ranks[0].items[0].num_computed_tokens for plan in replica.plans] == [0, 3]
    replica.commit()
    assert replica.plan() is None  # its second and last token is being computed
    replica.commit()
    assert replica.outputs[0] == replica.expected_output(0)[0]
    replica.submit(Request(1, (5, 6), SamplingParams(max_tokens=30, stop_token_ids=tuple(range(60)))))
    replica.plan()
    replica.plan()
    replica.commit()
    assert replica.reasons[1] == "stop"
    assert replica.scheduler.has_work  # the plan made ahead still runs
    replica.commit()
    replica.check_memory()
    assert len(replica.outputs[1]) == 1
    assert not replica.scheduler.has_work


def test_with_drafts_there_is_no_second_plan() -> None:
    replica = Replica(config(draft_tokens=3, max_draft_tokens=3))
    replica.submit(request(0, [5] * 3, 9))
    plan = replica.plan()
    assert plan is not None
    assert replica.plan() is None
    replica.commit()
    second = replica.plan()
    assert second is not None
    item = second.ranks[0].items[0]
    assert (item.num_computed_tokens, item.num_new_tokens, item.num_draft_tokens) == (3, 4, 3)
    replica.commit(accept=2)
    third = replica.plan()
    assert third is not None
    assert third.ranks[0].items[0].num_computed_tokens == 6
    replica.commit(accept=3)  # 1 + 3 + 4 tokens: one is left, so no draft could be of use
    last = replica.plan()
    assert last is not None
    assert last.ranks[0].items[0].num_draft_tokens == 0
    replica.commit()
    assert replica.outputs[0] == replica.expected_output(0)[0]


def test_min_tokens_and_ignore_eos() -> None:
    replica = Replica(config())
    stops = tuple(range(60))
    replica.submit(Request(0, (5,), SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=stops)))
    replica.submit(Request(1, (5,), SamplingParams(max_tokens=9, stop_token_ids=stops)))
    replica.drain()
    assert (len(replica.outputs[0]), len(replica.outputs[1])) == (3, 1)
    assert of_kind(replica, Finished)[0].stop_token is not None


def test_accepted_drafts_before_min_tokens_do_not_end_the_request() -> None:
    replica = Replica(config(draft_tokens=3, max_draft_tokens=3))
    replica.submit(Request(0, (5, 6), SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=tuple(range(60)))))
    replica.drain(accept=3)
    assert replica.outputs[0] == replica.expected_output(0)[0]
    assert len(replica.outputs[0]) == 9


def test_results_that_do_not_fit_the_plan_are_refused() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(request(0, [5]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    for ranks in ((), (RankResult(),)):
        copy = Scheduler(config())
        copy.submit(request(0, [5]), 0.0)
        own = copy.plan(0.0)
        assert own is not None
        with pytest.raises(InvariantError):
            copy.commit(own, StepResult(0, ranks), 0.0)
    with pytest.raises(InvariantError, match="result of request 7"):
        scheduler.commit(plan, StepResult(0, (RankResult((ItemResult(7, (3,)),)),)), 0.0)
    with pytest.raises(InvariantError, match="oldest uncommitted is None"):
        scheduler.commit(plan, StepResult(0, (RankResult((ItemResult(0, (3,)),)),)), 0.0)


# --- fairness, preemption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "priority", "longest-prefix"])
def test_a_huge_request_gets_in_while_small_ones_flow(order: str) -> None:
    replica = Replica(config(num_blocks=12, max_running=8, max_passes=6, order_policy=order, prefix_caching=False))
    number = 1
    for _ in range(6):
        replica.submit(request(number, [number % 9] * 6, 6))
        number += 1
    step(replica)
    replica.submit(request(0, [3] * 40, 6, priority=5))
    passed = 0
    for _ in range(200):
        if any(event.request == 0 for event in of_kind(replica, Admitted)):
            break
        replica.submit(request(number, [number % 9] * 6, 6, priority=0))
        number += 1
        before = len(of_kind(replica, Admitted))
        step(replica)
        passed += len(of_kind(replica, Admitted)) - before
    admitted = [event.request for event in of_kind(replica, Admitted)]
    assert 0 in admitted
    assert 1 <= passed - 1 <= 6 + 1  # small ones passed it, and no more of them than the bound (the first is its own admission)
    replica.drain()
    assert len(replica.reasons) == number


def test_the_queue_head_that_does_not_fit_is_passed_by_one_that_does() -> None:
    replica = Replica(config(num_blocks=6, prefix_caching=False))
    replica.submit(request(0, [5] * 12, 8))
    step(replica)
    replica.submit(request(1, [6] * 16, 4))
    replica.submit(request(2, [7] * 2, 2))
    assert [item.request for item in step(replica).ranks[0].items] == [0, 2]
    replica.drain()


def test_preemption_takes_the_newest_of_the_least_urgent_and_frees_enough() -> None:
    replica = Replica(config(num_blocks=6, prefix_caching=False, order_policy="priority"))
    for number, priority in ((0, 1), (1, 0), (2, 1)):
        replica.submit(request(number, [number + 2] * 7, 9, priority=priority))
    replica.drain()
    preempted = of_kind(replica, Preempted)
    assert preempted[0].request == 2
    assert all(event.request != 1 for event in preempted)
    assert [replica.outputs[number] for number in range(3)] == [replica.expected_output(number)[0] for number in range(3)]


@pytest.mark.parametrize("state", [False, True])
def test_swap_and_back(state: bool) -> None:
    replica = Replica(
        config(num_blocks=6, num_host_blocks=8, num_host_states=2 if state else 0, has_sequence_state=state, swap_threshold_tokens=1)
    )
    for number in range(3):
        replica.submit(request(number, [number + 2] * 7, 9))
    replica.drain()
    assert {event.kind for event in of_kind(replica, Preempted)} == {"swap"}
    assert {event.kind for event in of_kind(replica, Resumed)} == {"swap"}
    assert all(replica.outputs[number] == replica.expected_output(number)[0] for number in range(3))
    swap_ins = [order for plan in replica.plan_log for order in plan.ranks[0].swap_ins]
    assert swap_ins
    assert replica.scheduler.stats().ranks[0].free_host_blocks == 8


def test_without_host_room_a_victim_is_recomputed() -> None:
    replica = Replica(config(num_blocks=6, num_host_blocks=1, swap_threshold_tokens=1))
    for number in range(3):
        replica.submit(request(number, [number + 2] * 7, 9))
    replica.drain()
    assert {event.kind for event in of_kind(replica, Preempted)} == {"recompute"}


def test_a_full_house_finishes_with_bounded_preemptions() -> None:
    replica = Replica(config(num_blocks=16, max_running=32, max_batched_tokens=64, max_waiting=600, prefix_caching=True))
    for number in range(200):
        replica.submit(request(number, [2] * (number % 9) + [number % 40] * 3, 12))
    replica.drain(overlap=True)
    counts: dict[int, int] = {}
    for event in of_kind(replica, Preempted):
        counts[event.request] = counts.get(event.request, 0) + 1
    assert counts
    assert max(counts.values()) <= replica.config.max_preemptions
    assert len(replica.reasons) == 200


def test_a_victim_does_not_start_again_while_a_plan_still_computes_it() -> None:
    replica = Replica(config(num_blocks=4, prefix_caching=False))
    replica.submit(request(0, [2] * 7, 2))
    replica.submit(request(1, [3] * 7, 6))
    replica.plan()
    replica.plan()
    replica.commit()
    # 0 is computing its last token and keeps its blocks; 1 needs one more, so it goes, and waits for the commit of its own token.
    assert [replica.plan(), replica.plan()] == [None, None]
    assert [event.request for event in replica.scheduler.take_events() if isinstance(event, Preempted)] == [1]
    replica.drain()
    assert replica.outputs[1] == replica.expected_output(1)[0]


# --- forks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("length", [1, P, P + 1])
def test_samples_fork_in_the_plan_after_the_prompt(length: int, max_tokens: int, overlap: bool) -> None:
    replica = Replica(config(has_sequence_state=True, num_tails=4))
    replica.submit(request(0, [5] * length, max_tokens, sample_ids=(0, 1, 2, 3)))
    first = replica.plan()
    assert first is not None
    assert len(first.ranks[0].items) == 1
    if not overlap:
        replica.commit()
    second = replica.plan()
    assert second is not None
    starts = second.ranks[0].starts
    assert [(start.request, start.num_computed_tokens, start.fork_of_slot) for start in starts] == [(n, length - 1, 0) for n in (1, 2, 3)]
    assert len(second.ranks[0].copies) == 3
    replica.drain(overlap=overlap)
    replica.check_memory()
    assert all(replica.outputs[number] == replica.expected_output(0)[0] for number in range(4))
    assert [event.origin for event in of_kind(replica, Admitted)] == ["cold", "fork", "fork", "fork"]


def test_samples_without_a_slot_are_admitted_later() -> None:
    replica = Replica(config(max_running=2))
    replica.submit(request(0, [5] * 9, 3, sample_ids=tuple(range(5))))
    replica.drain()
    assert sorted(replica.reasons) == [0, 1, 2, 3, 4]
    assert [event.origin for event in of_kind(replica, Admitted)].count("fork") == 1


def test_aborting_the_parent_or_the_last_fork_loses_nothing() -> None:
    replica = Replica(config())
    replica.submit(request(0, [5] * 9, 3, sample_ids=(0, 1)))
    replica.plan()
    replica.abort(0)
    replica.commit()
    replica.drain()
    assert replica.reasons == {0: "abort", 1: "length"}
    replica.submit(request(2, [6] * 9, 1, sample_ids=(2, 3)))
    step(replica)
    assert replica.scheduler.ranks[0].fork_sources  # ended, and kept for its sample
    replica.abort(3)
    replica.check_memory()
    assert not replica.scheduler.has_work
    assert not replica.scheduler.ranks[0].running
    assert len(replica.scheduler.ranks[0].free_slots) == 4


def test_what_a_fork_reads_is_not_handed_to_a_swap_in_of_the_same_plan() -> None:
    replica = Replica(config(num_blocks=5, max_running=2, prefix_caching=False, num_host_blocks=9, swap_threshold_tokens=1))
    replica.submit(request(0, [2] * 11, 3))
    replica.submit(request(1, [3] * 7, 6))
    step(replica)
    step(replica)
    replica.submit(request(2, [4] * 3, 1, sample_ids=(2, 3)))
    step(replica)  # 0 grows, 1 goes to host memory, 2 gets its slot; then 0 and 2 end
    assert [event.request for event in of_kind(replica, Preempted)] == [1]
    assert sorted(replica.reasons) == [0, 2]
    plan = step(replica)
    assert plan.ranks[0].starts[0].fork_of_slot is not None
    replica.drain()
    assert all(replica.outputs[number] == replica.expected_output(number)[0] for number in range(4))


def test_a_fork_of_an_uncommitted_prompt_publishes_nothing() -> None:
    replica = Replica(config())
    replica.submit(request(0, [5] * 9, 6, sample_ids=(0, 1)))
    replica.plan()
    replica.plan()
    replica.abort(1)  # it runs, on blocks that no committed plan has filled
    replica.check_memory()
    assert replica.scheduler.stats().ranks[0].tree_blocks == 0
    replica.drain()


# --- ranks ---------------------------------------------------------------------------------------------------------------------------


def test_idle_ranks_have_an_empty_plan_and_queues_are_balanced() -> None:
    replica = Replica(config(num_ranks=3))
    replica.submit(request(0, [5] * 9, 9))
    plan = step(replica)
    assert [len(rank.items) for rank in plan.ranks] == [1, 0, 0]
    for number in range(1, 3):
        replica.submit(request(number, [number] * 5, 9))
    assert [len(rank.items) for rank in step(replica).ranks] == [1, 1, 1]
    replica.drain()


def test_prefix_aware_rank_choice() -> None:
    replica = Replica(config(num_ranks=2, rank_policy="prefix-aware"))
    replica.submit(request(0, [5] * 17, 2))
    replica.drain()
    replica.submit(request(1, [6] * 3, 2))
    step(replica)  # on rank 0, by number
    replica.submit(request(2, [5] * 17, 2))
    step(replica)
    assert [event.rank for event in of_kind(replica, Admitted)] == [0, 0, 0]
    assert of_kind(replica, Admitted)[2].num_cached_tokens == 16


def test_round_robin() -> None:
    replica = Replica(config(num_ranks=3, rank_policy="round-robin"))
    for number in range(5):
        replica.submit(request(number, [5] * 3, 2))
    step(replica)
    assert [event.rank for event in of_kind(replica, Admitted)] == [0, 1, 2, 0, 1]
    replica.drain()


# --- ends ---------------------------------------------------------------------------------------------------------------------------


def test_a_dead_worker_ends_everything_and_empties_the_cache() -> None:
    replica = Replica(
        config(has_sequence_state=True, num_tails=4, num_host_blocks=8, num_host_states=2, swap_threshold_tokens=1, num_blocks=8)
    )
    for number in range(6):
        replica.submit(request(2 * number, [number] * 9, 9, sample_ids=(2 * number, 2 * number + 1)))
    for _ in range(4):
        step(replica)
    old = replica.plan()
    assert old is not None
    replica.fail()
    assert set(replica.reasons.values()) == {"error"}
    assert len(replica.reasons) == 12
    assert of_kind(replica, Finished)[-1].message == "worker 0 died"
    assert replica.scheduler.stats().ranks[0].free_blocks == 8
    with pytest.raises(InvariantError, match="oldest uncommitted is None"):
        replica.scheduler.commit(old, StepResult(old.step, ()), 0.0)
    replica.submit(request(50, [1] * 9))
    replica.drain()
    assert of_kind(replica, Admitted)[-1].num_cached_tokens == 0


def test_abort_and_stop_of_strangers_do_nothing() -> None:
    replica = Replica(config())
    replica.abort(5)
    replica.stop(5)
    assert not replica.log
    replica.submit(request(0, [5] * 5, 9))
    step(replica)
    replica.stop(0)
    replica.stop(0)
    assert [event.reason for event in of_kind(replica, Finished)] == ["stop"]
