"""How long the decision core takes: run by hand, prints a table and, with --json, one JSON object.

    python tests/benchmarks/bench_core.py [--json]

Aims: plan + commit of 256 decoding requests <= 0.4 ms (1,024: linear), match of a 128K-token prompt in a tree of 1M cached tokens <= 3 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array

from engine.core.block_pool import BlockPool
from engine.core.cache_config import CacheConfig
from engine.core.plan import ItemResult, RankResult, StepPlan, StepResult
from engine.core.policies import evict_lru
from engine.core.prefix_tree import PrefixTree
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig

BLOCK_SIZE = 128


def result_of(plan: StepPlan, num_tokens: int = 1) -> StepResult:
    ranks = tuple(
        RankResult(tuple(ItemResult(item.request, (5,) * min(num_tokens, 1 + item.num_draft_tokens)) for item in rank.items if item.emits))
        for rank in plan.ranks
    )
    return StepResult(plan.step, ranks)


def bench_decode(num_requests: int, draft_tokens: int = 0, state: bool = False, steps: int = 300) -> float:
    """Median seconds of plan + commit, all requests decoding with a context of about 300 tokens."""
    cache = CacheConfig(
        num_blocks=num_requests * 40, block_size=BLOCK_SIZE, max_running=num_requests, max_batched_tokens=16384, context_length=8192,
        max_draft_tokens=draft_tokens, num_tails=256 if state else 0,
    )  # fmt: skip
    scheduler = Scheduler(SchedulerConfig(cache=cache, draft_tokens=draft_tokens, has_sequence_state=state, max_waiting=num_requests))
    for request in range(num_requests):
        prompt = tuple((request * 7 + index) % 1000 for index in range(300))
        scheduler.submit(Request(request, prompt, SamplingParams(max_tokens=4096, ignore_eos=True)), 0.0)
    times_s: list[float] = []
    while len(times_s) < steps:
        started_s = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned_s = time.perf_counter()
        assert plan is not None
        result = result_of(plan, 3)
        committing_s = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        done_s = time.perf_counter()
        if len(plan.ranks[0].items) == num_requests and all(item.emits for item in plan.ranks[0].items):
            times_s.append(planned_s - started_s + done_s - committing_s)
    return statistics.median(times_s)


def cached_tree(num_prompts: int, prompt_tokens: int, split_every: int) -> tuple[PrefixTree, list[bytes]]:
    """``num_prompts`` prompts that share their first half, inserted in pieces of ``split_every`` blocks, unlocked."""
    blocks_each = prompt_tokens // BLOCK_SIZE
    pool = BlockPool(num_prompts * blocks_each)
    tree = PrefixTree(pool, BLOCK_SIZE, evict_lru)
    prompts = []
    for prompt in range(num_prompts):
        half = prompt_tokens // 2
        tokens = array("i", [index % 997 for index in range(half)] + [(prompt + index * 3) % 997 for index in range(half)])
        data = tokens.tobytes()
        prompts.append(data)
        found = tree.match((), data, blocks_each)
        node = tree.lock_match(found, 0)
        fresh = pool.allocate(blocks_each - found.num_blocks) or []
        for first in range(0, len(fresh), split_every):
            piece = fresh[first : first + split_every]
            start = (found.num_blocks + first) * BLOCK_SIZE * 4
            deeper = tree.insert(node, data[start : start + len(piece) * BLOCK_SIZE * 4], piece, 0)
            tree.lock(deeper)
            tree.unlock(node)
            node = deeper
        pool.release(fresh)
        tree.unlock(node)
    return tree, prompts


def bench_match(split_every: int) -> tuple[float, float, int]:
    """Median seconds of a match, and of match + lock + unlock, of 128K tokens in about 1M cached tokens."""
    tree, prompts = cached_tree(15, 131072, split_every)
    tokens = array("i")
    tokens.frombytes(prompts[7])
    match_s, lock_s = [], []
    for _ in range(50):
        started_s = time.perf_counter()
        data = tokens.tobytes()
        found = tree.match((), data, 1024)
        found.blocks()
        matched_s = time.perf_counter()
        tree.unlock(tree.lock_match(found, 0))
        locked_s = time.perf_counter()
        assert found.num_blocks == 1024
        match_s.append(matched_s - started_s)
        lock_s.append(locked_s - started_s)
    return statistics.median(match_s), statistics.median(lock_s), tree.num_blocks * BLOCK_SIZE


def bench_evict() -> float:
    """Seconds a block of evicting 2 blocks at a time from a full tree."""
    tree, _ = cached_tree(15, 131072, 64)
    started_s = time.perf_counter()
    for _ in range(1000):
        assert tree.evict(2) == 2
    return (time.perf_counter() - started_s) / 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    as_json = parser.parse_args().json
    gc.freeze()
    rows: dict[str, float] = {
        "plan_commit_256_s": bench_decode(256),
        "plan_commit_1024_s": bench_decode(1024),
        "plan_commit_256_state_s": bench_decode(256, state=True),
        "plan_commit_256_drafts3_s": bench_decode(256, draft_tokens=3, state=True),
    }
    for split in (1024, 16, 1):
        match_s, lock_s, cached = bench_match(split)
        rows[f"match_128k_nodes_of_{split}_blocks_s"] = match_s
        rows[f"match_lock_128k_nodes_of_{split}_blocks_s"] = lock_s
        rows["cached_tokens"] = cached
    rows["evict_block_s"] = bench_evict()
    if as_json:
        print(json.dumps(rows))
    else:
        for name, value in rows.items():
            print(f"{name:45s} {value * 1e3:10.4f} ms" if name.endswith("_s") else f"{name:45s} {value:10.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
