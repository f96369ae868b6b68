"""Admission: who of the waiting starts, and on which rank, with what is left of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.errors import InvariantError
from engine.core.events import Admitted, Resumed
from engine.core.policies import RANK_POLICIES, RankView, rank_prefix_aware
from engine.core.rank_build import RankBuild
from engine.core.request import Sequence
from engine.core.states import State

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler


def admit(scheduler: Scheduler, builds: list[RankBuild], now_s: float) -> None:
    """Start waiting requests in the order of the policy. One that does not fit is passed, until it is aged: then it keeps a rank."""
    if not any(build.can_start() for build in builds):
        return
    waiting, config = scheduler.waiting, scheduler.config
    # Also ranks kept by requests behind the first few that are looked at: a promise made once is kept.
    reserved: dict[int, Sequence] = {}

    def cached_tokens(sequence: Sequence) -> int:
        return max(build.rank.match(sequence).num_blocks for build in builds) * config.cache.block_size

    for sequence in waiting.first(config.max_scanned, cached_tokens):
        if scheduler.may_still_be_computed(sequence) or not (sequence.started or any(build.may_begin() for build in builds)):
            continue
        if _start_somewhere(scheduler, builds, sequence, reserved, now_s):
            if waiting.admitted(sequence):
                return  # somebody was passed once too often: the next plan begins with it
            if not any(build.can_start() for build in builds):
                return
        elif waiting.is_aged(sequence):
            _reserve(builds, sequence, reserved)
            if len(reserved) == len(builds):
                return


def _reserve(builds: list[RankBuild], sequence: Sequence, reserved: dict[int, Sequence]) -> None:
    """Keep one rank free for an aged request: its own if it has one, else that with most room; the choice stays."""
    if sequence.reserved_rank is None:
        open_ranks = [build.rank for build in builds if build.rank.rank not in reserved]
        best = min(open_ranks, key=lambda rank: (-rank.num_allocatable, rank.rank))
        sequence.reserved_rank = best.rank if sequence.rank is None else sequence.rank
    reserved.setdefault(sequence.reserved_rank, sequence)


def _start_somewhere(
    scheduler: Scheduler, builds: list[RankBuild], sequence: Sequence, reserved: dict[int, Sequence], now_s: float
) -> bool:
    # A request that has run stays on its rank: the worker there knows its tokens, its swapped blocks are there.
    candidates = builds if sequence.rank is None else [builds[sequence.rank]]
    candidates = [
        build for build in candidates if build.can_start() and (sequence.started or build.may_begin()) and build.rank.rank not in reserved
    ]
    if len(candidates) > 1:
        candidates = _in_policy_order(scheduler, candidates, sequence)
    return any(_start(scheduler, build, sequence, now_s) for build in candidates)


def _in_policy_order(scheduler: Scheduler, builds: list[RankBuild], sequence: Sequence) -> list[RankBuild]:
    policy = RANK_POLICIES[scheduler.config.rank_policy]
    num_ranks, block_size = scheduler.config.num_ranks, scheduler.config.cache.block_size

    def key(build: RankBuild) -> tuple[int, ...]:
        rank = build.rank
        cached = rank.match(sequence).num_blocks * block_size if policy is rank_prefix_aware else 0
        turn = (rank.rank - scheduler.last_rank - 1) % num_ranks
        return policy(RankView(rank.rank, build.held_tokens, cached, turn))

    return sorted(builds, key=key)


def _start(scheduler: Scheduler, build: RankBuild, sequence: Sequence, now_s: float) -> bool:
    if sequence.num_expected != len(sequence.tokens):
        raise InvariantError(f"request {sequence.id} is admitted while a plan still computes a token of it")
    rank = build.rank.rank
    if sequence.state is State.SWAPPED:
        if not build.resume(sequence):
            return False
        scheduler.events.append(Resumed(now_s, sequence.id, rank, "swap", sequence.num_computed))
        return True
    match = build.start(sequence)
    if match is None:
        return False
    scheduler.last_rank = rank
    cached = match.num_blocks * scheduler.config.cache.block_size
    if sequence.started:
        scheduler.events.append(Resumed(now_s, sequence.id, rank, "recompute", cached))
        return True
    sequence.started = True
    sequence.cached_tokens_first = cached
    scheduler.prefix_query_tokens += sequence.num_prompt
    scheduler.prefix_hit_tokens += cached
    scheduler.events.append(Admitted(now_s, sequence.id, rank, sequence.num_prompt, cached, "prefix" if cached else "cold"))
    return True
