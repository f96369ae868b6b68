"""Long seeded runs of the scheduler on the shadow worker, denser than the state machine: tight memory, overlap, forks, swaps, drafts."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.core.cache_config import CacheConfig
from engine.core.errors import CapacityError
from engine.core.events import Admitted, Finished, Preempted, Resumed
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig
from tests.core.core_harness import EOS, FAILURE, Replica

KINDS = ("dense", "state", "drafts", "swap", "ranks")
SEEDS = range(12)


def random_config(rng: random.Random, kind: str) -> SchedulerConfig:
    state = kind != "dense" and rng.random() < 0.8
    drafts = rng.choice([1, 3, 5]) if kind == "drafts" else 0
    max_running = rng.randint(2, 8)
    cache = CacheConfig(
        num_blocks=rng.choice([6, 10, 20, 30]),
        block_size=rng.choice([2, 4, 8]),
        max_running=max_running,
        max_batched_tokens=max_running + rng.choice([0, 4, 30]),
        context_length=rng.choice([24, 40, 80]),
        max_draft_tokens=drafts,
        num_tails=rng.choice([1, 4, 20]) if state else 0,
        num_host_blocks=rng.choice([5, 30]) if kind == "swap" else 0,
        num_host_states=rng.choice([1, 6]) if kind == "swap" and state else 0,
    )
    return SchedulerConfig(
        cache=cache,
        num_ranks=rng.choice([2, 3]) if kind == "ranks" else 1,
        eos_token_ids=(EOS,),
        chunked_prefill_size=rng.choice([None, 3, 8]),
        draft_tokens=drafts,
        has_sequence_state=state,
        prefix_caching=rng.random() < 0.9,
        order_policy=rng.choice(["fcfs", "fcfs", "priority", "longest-prefix"]),
        eviction_policy=rng.choice(["lru", "lfu", "slru", "priority"]),
        rank_policy=rng.choice(["shortest-queue", "round-robin", "prefix-aware"]),
        max_waiting=200,
        max_passes=rng.choice([1, 5, 64]),
        watermark_blocks=rng.choice([0, 0, 1]),
        max_preemptions=rng.choice([1, 2, 3]),
        swap_threshold_tokens=1 if kind == "swap" else None,
    )


def random_request(rng: random.Random, first_id: int, limit: int) -> Request:
    prefixes = [[(index * step + step) % 40 for index in range(limit)] for step in (3, 5, 7)]
    prompt = rng.choice(prefixes)[: rng.randint(0, limit // 2)] + [rng.randint(0, 4) for _ in range(rng.randint(1, 4))]
    samples = rng.choice([1, 1, 1, 1, 2, 4])
    ids = tuple(range(first_id, first_id + samples))
    params = SamplingParams(max_tokens=rng.choice([1, 2, 4, 10, 40]), ignore_eos=rng.random() < 0.4)
    salt = rng.choice([None, None, "a"])
    return Request(ids[0], tuple(prompt[: limit - 1]), params, rng.randint(0, 2), ids if samples > 1 else (), salt)


def run(seed: int, kind: str, actions: int = 250) -> Replica:
    rng = random.Random(f"{kind}{seed}")
    replica = Replica(random_config(rng, kind))
    depth = 1 if replica.config.draft_tokens else 2
    cut: set[int] = set()
    next_id = 0
    for _ in range(actions):
        dice = rng.random()
        if dice < 0.2:
            request = random_request(rng, next_id, replica.config.context_tokens)
            next_id += 4
            try:
                replica.submit(request)
            except CapacityError:
                assert replica.scheduler.num_waiting > 190
        elif dice < 0.6 and len(replica.plans) < depth:
            replica.plan()
        elif dice < 0.96 and replica.plans:
            replica.commit(rng.randint(0, 5))
        elif dice < 0.97 and replica.scheduler.sequences:
            cut |= replica.doom(rng.choice(sorted(replica.scheduler.sequences)))
        elif dice < 0.99 and replica.scheduler.sequences:
            chosen = rng.choice(sorted(replica.scheduler.sequences))
            cut.add(chosen)
            (replica.stop if rng.random() < 0.5 else replica.abort)(chosen)
        elif dice > 0.998:
            cut.update(replica.scheduler.sequences)
            replica.fail()
        replica.check_memory()
    replica.drain(accept=1, overlap=depth == 2)
    replica.check_memory()
    assert set(replica.reasons) == set(replica.requests)
    for rank in replica.scheduler.ranks:
        assert rank.pool.num_held == rank.tree.num_blocks == rank.tree.num_evictable_blocks
        assert rank.host_pool.num_held == 0
    for sample, output in replica.outputs.items():
        tokens, reason = replica.expected_output(sample)
        assert output == tokens[: len(output)]
        assert sample in cut or (output, replica.reasons[sample]) == (tokens, reason)
    return replica


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs(kind: str) -> None:
    """Output of every request is what it would be alone and cold, whatever happened around it; and the runs reach the hard places."""
    seen: dict[str, int] = {}
    for seed in SEEDS:
        replica = run(seed, kind)
        bound = replica.config.max_preemptions
        preemptions: dict[int, int] = {}
        for event in replica.log:
            name = type(event).__name__
            if isinstance(event, Admitted):
                name = event.origin
            if isinstance(event, (Preempted, Resumed)):
                name += event.kind
            if isinstance(event, Finished) and event.message == FAILURE:
                name = "failed item"
            if isinstance(event, Preempted):
                preemptions[event.request] = preemptions.get(event.request, 0) + 1
            seen[name] = seen.get(name, 0) + 1
        assert max(preemptions.values(), default=0) <= bound
    wanted = ["prefix", "cold", "fork", "failed item", "Preemptedrecompute"] + (
        ["Preemptedswap", "Resumedswap"] if kind == "swap" else ["Resumedrecompute"]
    )
    assert all(seen.get(name, 0) > 3 for name in wanted), seen


@pytest.mark.parametrize("kind", KINDS)
def test_same_arrivals_and_results_give_identical_plans(kind: str) -> None:
    first, second = run(5, kind, 120), run(5, kind, 120)
    assert msgspec.msgpack.encode(first.plan_log) == msgspec.msgpack.encode(second.plan_log)
    assert msgspec.msgpack.encode(first.log) == msgspec.msgpack.encode(second.log)
