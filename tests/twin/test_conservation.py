"""Nothing is lost and nothing is seen before its time, whatever the load, the faults of clients and the shortage of memory."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import ConfigError
from engine.core.events import Admitted, Arrived, Event, Finished, Preempted, Resumed, TokensEmitted
from engine.core.metrics import MetricsLog, Slo
from engine.core.plan import StepPlan
from tests.twin.twin_support import Cost, GivenWorkload, Log, constant, sim_request, twin_config
from twin.cluster import Cluster, simulate
from twin.config import TransferCost, TwinConfig
from twin.result import SimResult
from twin.workload.types import SimRequest


def token_seconds(plan: StepPlan) -> float:
    return 0.01 + 0.001 * plan.num_tokens


def crowd(seed: int, count: int = 60, rate: float = 6.0) -> list[SimRequest]:
    """Prompts that share beginnings, answers of any length, clients without patience."""
    draw, now_s, requests = random.Random(seed), 0.0, []
    for index in range(count):
        now_s += draw.expovariate(rate)
        max_tokens = draw.randint(1, 24)
        leaves_s = draw.choice([None, None, None, 0.0, draw.uniform(0.0, 0.4)])
        request = sim_request(index, now_s, draw.randint(1, 40), draw.randint(1, max_tokens), max_tokens, cancel_after_s=leaves_s)
        request.prompt[0] = index % 3 + 2
        requests.append(request)
    return requests


def check_log(events: list[Event]) -> None:
    """One replica's: every request ends once, after all else of it; times do not go back but for arrivals, which are read later."""
    seen: dict[int, list[Event]] = {}
    now_s = 0.0
    for event in events:
        if not isinstance(event, Arrived):
            assert event.now_s >= now_s
        now_s = max(now_s, event.now_s)
        if isinstance(event, (Arrived, Admitted, TokensEmitted, Preempted, Resumed, Finished)):
            seen.setdefault(event.request, []).append(event)
    for story in seen.values():
        assert isinstance(story[0], Arrived)
        assert isinstance(story[-1], Finished)
        assert Counter(type(event) for event in story)[Finished] == 1
        assert [event.now_s for event in story] == sorted(event.now_s for event in story)
        tokens = sum(len(event.tokens) for event in story if isinstance(event, TokensEmitted))
        assert tokens == story[-1].num_output_tokens
        if tokens:
            assert isinstance(story[1], Admitted)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.sampled_from(["round-robin", "least-tokens", "prefix-aware"]),
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(16, 40),
            "max_waiting": st.integers(1, 6),
            "num_ranks": st.integers(1, 2),
            "num_host_blocks": st.sampled_from([0, 20]),
            "draft_tokens": st.sampled_from([0, 3]),
            "door_s": st.sampled_from([0.0, 0.2]),
            "reply_s": st.sampled_from([0.0, 0.1]),
        }
    ),
)
def test_every_request_ends_exactly_once(seed: int, num_replicas: int, routing: str, options: dict[str, Any]) -> None:
    acceptance = (0.5,) * options["draft_tokens"]
    config = twin_config(
        num_replicas=num_replicas, routing=routing, acceptance=acceptance, swap_threshold_tokens=6, context_length=64, **options
    )
    requests, log = crowd(seed), Log()
    following = {request.index: sim_request(100 + request.index, 0.0, 9, 4, 8) for request in requests[::4]}
    cluster = Cluster(config, GivenWorkload(requests, following, pause_s=0.05), Cost(token_seconds), [log])
    cluster.run()
    result = cluster.result(0.0)
    assert result.requests == len(requests) + len(following)
    assert result.finished + result.rejected + result.cancelled == result.requests
    assert len({event.request for event in log.all if isinstance(event, Arrived)}) <= result.requests
    for replica in cluster.replicas:
        check_log(log.by_replica[replica.index])
        assert replica.queued_prompt_tokens == 0
        for rank in replica.core.stats().ranks:
            assert rank.free_blocks + rank.cached_only_blocks == rank.total_blocks
            assert rank.free_host_blocks == rank.total_host_blocks
    assert 0 < result.kv_peak.share <= 1


def outcome(config: TwinConfig, requests: list[SimRequest], cost: Cost | None = None) -> tuple[SimResult, Log]:
    log = Log()
    return simulate(config, GivenWorkload(requests), cost or Cost(token_seconds), observers=[log]), log


def test_the_same_seed_gives_the_same_bytes() -> None:
    config = twin_config(num_replicas=2, draft_tokens=3, acceptance=(0.8, 0.6, 0.4), num_blocks=20)
    logs = [outcome(msgspec.structs.replace(config, seed=seed), crowd(1))[1] for seed in (5, 5, 6)]
    assert logs[0].encoded() == logs[1].encoded()
    assert logs[0].encoded() != logs[2].encoded()  # other drafts were accepted
    assert logs[0].by_replica[0] != logs[0].by_replica[1]


def test_nobody_can_tell_how_long_an_answer_will_be() -> None:
    """Up to the first end the plans are the same, whatever the true lengths."""
    config = twin_config(max_running=3, num_blocks=40)
    short = [sim_request(index, 0.3 * index, 10, 9, 30) for index in range(6)]
    long = [sim_request(index, 0.3 * index, 10, 12 + index, 30) for index in range(6)]
    logs = [outcome(config, requests, constant(0.1))[1] for requests in (short, long)]
    num_same = sum(time_s < next(event.now_s for event in logs[0].all if isinstance(event, Finished)) for time_s in logs[0].planned_s[0])
    assert num_same >= 8
    assert logs[0].plans[0][:num_same] == logs[1].plans[0][:num_same]


def test_answers_end_where_they_should() -> None:
    requests = [sim_request(0, 0.0, 5, 7, 20), sim_request(1, 0.0, 5, 6, 6), sim_request(2, 0.0, 5, 50, 9)]
    _, log = outcome(twin_config(), requests)
    ends = {event.request: (event.reason, event.num_output_tokens) for event in log.all if isinstance(event, Finished)}
    assert ends == {0: ("stop", 7), 1: ("length", 6), 2: ("length", 9)}


@pytest.mark.parametrize("mode", ["exact", "flat"])
def test_metrics_are_those_of_the_log(mode: Any) -> None:
    """Clients wait at the door and for the reply besides: their log begins earlier and ends later."""
    slo = Slo(ttft_s=0.35, tpot_s=0.08)
    config = twin_config(num_replicas=2, door_s=0.05, reply_s=0.03, slo=slo, metrics=mode, num_blocks=20)
    result, log = outcome(config, crowd(4, rate=30.0))
    whole = MetricsLog()
    for event in log.all:
        whole.add(msgspec.structs.replace(event, now_s=event.now_s - 0.08) if isinstance(event, Arrived) else event)
    wanted = whole.summary(slo)
    assert result.exact == (mode == "exact")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        mine, theirs = getattr(result, name), getattr(wanted, name)
        assert mine.count == theirs.count
        assert mine.mean == pytest.approx(theirs.mean)
        assert mine.max == pytest.approx(theirs.max)
        if mode == "exact":
            assert (mine.p50, mine.p90, mine.p99) == pytest.approx((theirs.p50, theirs.p90, theirs.p99))
    assert result.sim_s == pytest.approx(wanted.duration_s)
    assert result.output_tokens_per_s == pytest.approx(wanted.output_tokens_per_s)
    assert result.goodput.per_s == pytest.approx(wanted.goodput_per_s)
    assert wanted.goodput_per_s
    assert result.prefix_hit_rate == pytest.approx(wanted.prefix_hit_rate)
    assert wanted.prefix_hit_rate
    assert wanted.num_finished["abort"]
    assert result.preemptions == wanted.num_preemptions > 0
    assert result.steps == wanted.num_steps
    assert result.output_tokens == wanted.num_output_tokens


def test_clients_wait_at_the_door_and_for_the_reply() -> None:
    result, _ = outcome(twin_config(door_s=0.5, reply_s=0.25), [sim_request(0, 1.0, 4, 3)], constant(1.0))
    assert (result.ttft_s.mean, result.e2e_s.mean, result.tpot_s.mean) == (1.75, 3.75, 1.0)
    assert result.sim_s == 3.75


def test_money_and_energy_are_the_gpus_time_or_unknown() -> None:
    config = twin_config(num_replicas=3, gpus_per_replica=8)
    unknown, _ = outcome(config, [sim_request(0, 0.0, 4, 3)], constant(1.0))
    assert (unknown.gpu_s, unknown.usd, unknown.joules) == (72.0, None, None)
    known, _ = outcome(
        msgspec.structs.replace(config, usd_per_gpu_hour=100.0, watts_per_gpu=500.0), [sim_request(0, 0.0, 4, 3)], constant(1.0)
    )
    assert (known.usd, known.joules) == (2.0, 36_000.0)


def test_who_does_not_fit_is_refused_and_counted() -> None:
    """One slot and two places to wait in: of five at once two are refused; a prompt beyond the context is refused too."""
    requests = [*(sim_request(index, 0.0, 4, 3) for index in range(5)), sim_request(5, 50.0, 200, 3)]
    result, log = outcome(twin_config(max_running=1, max_waiting=2), requests)
    assert (result.finished, result.rejected, result.cancelled) == (3, 3, 0)
    assert len({event.request for event in log.all if isinstance(event, Arrived)}) == 3
    narrow, _ = outcome(twin_config(max_requests=1), requests)
    assert (narrow.finished, narrow.rejected) == (1, 5)


def test_a_client_that_leaves_frees_its_place_at_the_next_turn() -> None:
    """It leaves while step 3 runs; the end of that step sees it, with a step planned already."""
    requests = [sim_request(0, 0.0, 4, 100, 100, cancel_after_s=3.5)]
    result, log = outcome(twin_config(), requests, constant(1.0))
    assert (result.cancelled, result.finished) == (1, 0)
    (end,) = [event for event in log.all if isinstance(event, Finished)]
    assert (end.reason, end.now_s, end.num_output_tokens) == ("abort", 4.0, 4)
    at_the_door, log = outcome(twin_config(door_s=5.0), requests)
    assert (at_the_door.cancelled, log.all) == (1, [])


@pytest.mark.parametrize(("drafts", "first_seen"), [(0, 3), (1, 2)])
def test_a_newcomer_is_in_the_plan_made_at_the_next_commit(drafts: int, first_seen: int) -> None:
    """It comes while step 1 runs. With overlap step 2 is planned by then, so that step 3 is the first with it."""
    requests = [sim_request(0, 0.0, 4, 30), sim_request(1, 1.5, 4, 30)]
    _, log = outcome(twin_config(draft_tokens=drafts, acceptance=(0.0,) * drafts), requests, constant(1.0))
    assert next(plan.step for plan in log.plans[0] if any(item.request == 1 for item in plan.ranks[0].items)) == first_seen
    assert log.planned_s[0][first_seen] == 2.0


def test_swaps_take_the_time_of_their_bytes() -> None:
    transfer = TransferCost(block_bytes=1000, host_bytes_per_s=50_000.0, latency_s=0.001)
    config = twin_config(num_blocks=14, num_host_blocks=64, swap_threshold_tokens=4, transfer=transfer, prefix_caching=False)
    result, log = outcome(config, [sim_request(index, 0.0, 10, 16) for index in range(4)], constant(0.1))
    wanted = 0.0
    for plan in log.plans[0]:
        for orders in (plan.ranks[0].swap_outs, plan.ranks[0].swap_ins):
            blocks = sum(len(order.blocks) for order in orders)
            wanted += blocks * 0.02 + 0.001 * (blocks > 0)
    assert result.step_time.transfer_s == pytest.approx(wanted)
    assert wanted > 0
    assert result.step_time.busy_s == pytest.approx(wanted + 0.1 * result.steps)
    assert result.sim_s == pytest.approx(result.step_time.busy_s)
    assert result.step_time.low_s == pytest.approx(wanted + 0.09 * result.steps)


def test_accepted_drafts_have_their_mean() -> None:
    acceptance = (0.9, 0.5, 0.25)
    config = twin_config(draft_tokens=3, acceptance=acceptance, max_running=8, num_blocks=2000, context_length=1000, max_batched_tokens=512)
    result, _ = outcome(config, [sim_request(index, 0.0, 4, 900) for index in range(8)], constant(0.1))
    assert result.acceptance_length == pytest.approx(1 + 0.9 + 0.45 + 0.1125, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_replicas": 0}, "num_replicas is 0"),
        ({"routing": "nearest"}, "routing is 'nearest'; known: round-robin"),
        ({"door_s": float("nan")}, "door_s is nan"),
        ({"reply_s": -1.0}, "reply_s is -1.0"),
        ({"acceptance": (0.5,)}, "acceptance has 1 positions"),
        ({"draft_tokens": 1, "acceptance": (1.5,)}, "position 0 is 1.5"),
        ({"watts_per_gpu": float("inf")}, "watts_per_gpu is inf"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"transfer": TransferCost(1, 0.0)}, "host_bytes_per_s is 0.0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        outcome(twin_config(**changes), [sim_request(0, 0.0, 4, 1)])


def test_a_request_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="request 0 has 0 output tokens"):
        outcome(twin_config(), [sim_request(0, 0.0, 4, 0, 5)])
    with pytest.raises(ConfigError, match="two requests with the index 0"):
        outcome(twin_config(), [sim_request(0, 0.0, 4, 3), sim_request(0, 0.0, 4, 3)])
