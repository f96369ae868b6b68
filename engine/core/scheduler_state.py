"""Looking at a scheduler from outside: its conservation laws as code, and its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.core.errors import InvariantError
from engine.core.request import Sequence
from engine.core.states import State

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler


class RankStats(msgspec.Struct, frozen=True):
    """Blocks: free + cached_only + held == total, where cached_only are evictable and held are in use by requests."""

    num_running: int
    total_blocks: int
    free_blocks: int
    cached_only_blocks: int
    tree_blocks: int
    total_host_blocks: int
    free_host_blocks: int
    total_tails: int
    stored_tails: int


class Stats(msgspec.Struct, frozen=True):
    """Gauges of this moment and counters since the start (``*_total``: rates and ratios are the reader's business)."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_uncommitted: int
    ranks: tuple[RankStats, ...]
    steps_total: int
    requests_total: int
    preemptions_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    output_tokens_total: int
    block_size: int  # the granularity of a prefix hit: shorter shared prefixes cannot hit


def stats(scheduler: Scheduler) -> Stats:
    ranks = tuple(
        RankStats(
            num_running=len(rank.running),
            total_blocks=rank.pool.num_blocks,
            free_blocks=rank.pool.num_free,
            cached_only_blocks=rank.tree.num_evictable_blocks,
            tree_blocks=rank.tree.num_blocks,
            total_host_blocks=rank.host_pool.num_blocks,
            free_host_blocks=rank.host_pool.num_free,
            total_tails=rank.tails.num_tails if rank.tails else 0,
            stored_tails=rank.tails.num_attached if rank.tails else 0,
        )
        for rank in scheduler.ranks
    )
    return Stats(
        num_running=sum(rank.num_running for rank in ranks),
        num_waiting=scheduler.num_waiting,
        num_swapped=sum(sequence.state is State.SWAPPED for sequence in scheduler.waiting.in_order()),
        num_uncommitted=scheduler.num_uncommitted,
        ranks=ranks,
        steps_total=scheduler.next_step,
        requests_total=scheduler.next_sequence_number,
        preemptions_total=scheduler.num_preemptions,
        prefix_query_tokens_total=scheduler.prefix_query_tokens,
        prefix_hit_tokens_total=scheduler.prefix_hit_tokens,
        output_tokens_total=scheduler.num_output_tokens,
        block_size=scheduler.config.cache.block_size,
    )


def check(scheduler: Scheduler) -> None:
    """Raise InvariantError where a request is lost, or memory has an owner it does not know."""
    queued = scheduler.waiting.in_order()
    running = [sequence for rank in scheduler.ranks for sequence in rank.running]
    forking = [sequence for sequence in scheduler.sequences.values() if sequence.state is State.FORKING]
    if len(forking) != scheduler.num_forking:
        raise InvariantError(f"{len(forking)} requests wait for a fork and {scheduler.num_forking} are counted")
    ids = sorted(sequence.id for sequence in [*queued, *running, *forking])
    if ids != sorted(scheduler.sequences):
        raise InvariantError(f"live requests {sorted(scheduler.sequences)} are not those queued, running or forking: {ids}")
    _check_forks(scheduler, forking)
    for sequence in queued:
        if sequence.state not in (State.WAITING, State.PREEMPTED, State.SWAPPED) or sequence.blocks:
            raise InvariantError(f"request {sequence.id} is queued in state {sequence.state.value} with {len(sequence.blocks)} blocks")
    for rank in scheduler.ranks:
        if any(sequence.state is not State.RUNNING for sequence in rank.running):
            raise InvariantError(f"rank {rank.rank} runs a request that is not in state running")
        rank.check([sequence for sequence in queued if sequence.state is State.SWAPPED and sequence.rank == rank.rank])
    if scheduler.num_uncommitted == 0:
        for sequence in running:
            if sequence.num_computed != sequence.num_planned or sequence.num_expected != len(sequence.tokens):
                raise InvariantError(f"request {sequence.id} waits for a plan that does not exist")


def _check_forks(scheduler: Scheduler, forking: list[Sequence]) -> None:
    sources = [source for rank in scheduler.ranks for source in rank.fork_sources]
    for child in forking:
        parent = scheduler.sequences.get(child.parent) if child.parent is not None else None
        if not any(child in source.children for source in [*sources, *([parent] if parent else [])]):
            raise InvariantError(f"request {child.id} waits for a fork that nobody will make")
