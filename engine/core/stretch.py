"""Steady decode, many steps at once: for a driver that knows the results beforehand, as a simulator does.

While every running request decodes, nobody can be admitted and nobody ends, a step changes nothing but counts: each request gets a token,
and at block boundaries a block and perhaps a window tail. ``find_stretch`` proves that this holds for the next ``num_steps`` steps, and
``Stretch.advance`` takes the scheduler through any number of them, to the very state that the same calls of ``plan`` and ``commit``
would have left: counts, token arrays, block ids, evictions, tails, prefix tree, step numbers.

A *round* is what a driver does at one moment and then waits for: plan, at the time of the last commit, and commit of the oldest plan,
at the end of its step. With overlap one plan is under way at the start, another one at the end:

    one plan at a time     | plan n    commit n   | plan n+1  commit n+1 | ...
    overlap                | plan n+1  commit n   | plan n+2  commit n+1 | ...

Drafts are not handled: how many are accepted differs from step to step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, runtime_checkable

from engine.core.errors import InvariantError
from engine.core.events import DecodeStretch, Event, LogEvent
from engine.core.plan import BlockAppend, PlanItem, RankPlan, StepPlan, TailSave
from engine.core.rank import RankState
from engine.core.request import Sequence
from engine.core.scheduler import Scheduler, Uncommitted
from engine.core.step_cost import Provenance

Saves = list[tuple[Sequence, int, int]]  # sequence, position, tail


class Answer(NamedTuple):
    """What the driver will say of one request: ``token`` in each result, before the last of ``num_left`` more. That one may end it."""

    token: int
    num_left: int


class StretchPrice(NamedTuple):
    """Prices of the steps that a stretch plans: ``StepPrice`` as columns, one number a step. ``components`` of all steps alike."""

    step_s: list[float]
    low_s: list[float]
    high_s: list[float]
    components: dict[str, list[float]]
    provenance: dict[str, Provenance]
    extrapolated: list[bool]
    note: str = ""


@runtime_checkable
class StretchCost(Protocol):
    """A cost model that prices steady decode without plans, to the last bit as ``StepCost.price`` does step by step."""

    def price_stretch(self, contexts: Seq[Seq[int]], num_steps: int, saved_tails: Seq[Seq[int]]) -> StretchPrice:
        """Of ``Stretch.contexts`` and ``saved_tails``."""
        ...


class RankStretch(NamedTuple):
    """``tokens`` are those the running requests get. ``growth`` and ``boundaries`` hold (round, index in running), in the order of
    stepping, of a request that needs a block for its item, and of one whose item fills a block whose tail is to be saved."""

    tokens: list[int]
    growth: list[tuple[int, int]]
    boundaries: list[tuple[int, int]]


class Stretch:
    """The next ``num_steps`` rounds of ``scheduler``. True until anything else is done to it; good for one ``advance``.

    contexts        [rank][request] tokens in cache after the step that the first round plans; one more with each round
    saved_tails     [round][rank] window tails that the planned steps save; empty where the model has none
    held_blocks     [rank] blocks in use after the last plan, once it has advanced; they only grow
    """

    def __init__(self, scheduler: Scheduler, ranks: list[RankStretch], num_steps: int) -> None:
        self.scheduler = scheduler
        self.num_steps = num_steps
        self.contexts = [[sequence.num_planned + 1 for sequence in rank.running] for rank in scheduler.ranks]
        self.saved_tails = _count_saves(scheduler, ranks, num_steps)
        self.held_blocks: list[int] = []
        self._ranks = ranks
        self._first_step = scheduler.next_step

    def advance(self, now_s: float, committed_s: Seq[float], forward_s: Seq[float]) -> tuple[LogEvent, ...]:
        """Go through ``len(committed_s)`` rounds that begin at ``now_s`` and end at those times; ``forward_s`` is what their results say.

        Returns the events that were due and those of the rounds, as one. Raises InvariantError for more rounds than proved, or if the
        scheduler has moved on.
        """
        scheduler, count = self.scheduler, len(committed_s)
        if not 1 <= count <= self.num_steps or len(forward_s) != count:
            raise InvariantError(f"{count} rounds and {len(forward_s)} forward times for a stretch of {self.num_steps}")
        if scheduler.next_step != self._first_step:
            raise InvariantError(f"a stretch from step {self._first_step}, and the scheduler plans step {scheduler.next_step}")
        depth = len(scheduler.uncommitted)
        saves: list[Saves] = scheduler.uncommitted.popleft().tail_saves if depth else [[] for _ in scheduler.ranks]
        plans: list[tuple[RankPlan, Saves]] = []
        for rank, stretch in zip(scheduler.ranks, self._ranks, strict=True):
            rank_plan, pending, held = _advance_rank(rank, stretch, saves[rank.rank], count, depth)
            plans.append((rank_plan, pending))
            self.held_blocks.append(held)
        num_items = sum(len(rank.running) for rank in scheduler.ranks)
        step = scheduler.next_step
        scheduler.build += count
        scheduler.next_step += count
        scheduler.num_output_tokens += count * num_items
        if depth:
            plan = StepPlan(step + count - 1, tuple(rank_plan for rank_plan, _ in plans))
            scheduler.uncommitted.append(
                Uncommitted(
                    plan,
                    num_items,
                    [list(rank.running) for rank in scheduler.ranks],
                    [saves for _, saves in plans],
                    [[] for _ in scheduler.ranks],
                    [len(rank.running) for rank in scheduler.ranks],
                    [None for _ in scheduler.ranks],
                )
            )
        requests = tuple(sequence.id for rank in scheduler.ranks for sequence in rank.running)
        tokens = tuple(token for stretch in self._ranks for token in stretch.tokens)
        due: tuple[Event, ...] = scheduler.take_events()
        return *due, DecodeStretch(now_s, step, depth, tuple(committed_s), tuple(forward_s), requests, tokens, scheduler.num_waiting)


def find_stretch(
    scheduler: Scheduler, answer_of: Callable[[Sequence], Answer], max_steps: int, *, min_steps: int = 1, keeps_cache: bool = False
) -> Stretch | None:
    """The longest stretch from here, at most ``max_steps`` rounds; None where fewer than ``min_steps`` are known to be plain decode.

    To be asked when the driver would plan. ``keeps_cache``: only as long as no cached prefix comes or goes, for a driver that looks at
    prefixes in between. O(running requests).
    """
    depth = len(scheduler.uncommitted)
    if scheduler.config.draft_tokens or depth > 1 or scheduler.num_forking or not _admits_nobody(scheduler):
        return None
    record = scheduler.uncommitted[0] if depth else None
    for rank in scheduler.ranks:
        if rank.running and rank.running[-1].num_computed < rank.running[-1].target:
            return None  # the usual reason, seen at once
    num_steps, num_running = max_steps, 0
    ranks: list[RankStretch] = []
    for rank in scheduler.ranks:
        if rank.fork_sources or (record is not None and record.sequences[rank.rank] != rank.running):
            return None
        if keeps_cache and record is not None and record.tail_saves[rank.rank]:
            return None
        rank.settle()
        tokens: list[int] = []
        num_running += len(rank.running)
        for sequence in rank.running:
            token, num_left = answer_of(sequence)
            known = len(sequence.tokens)
            if sequence.num_computed < sequence.target or sequence.num_expected != known + depth or token in sequence.stop_ids:
                return None
            # The token that ends it, for the driver or by length, is left to ``commit``, and so is a plan that leaves it out.
            num_steps = min(num_steps, num_left - 1, sequence.limit - known - max(1, depth))
            if num_steps < min_steps:
                return None
            tokens.append(token)
        ranks.append(RankStretch(tokens, [], []))
    if num_running == 0:
        return None
    for rank, stretch in zip(scheduler.ranks, ranks, strict=True):
        num_steps = _plan_blocks(rank, stretch, num_steps, keeps_cache)
    return Stretch(scheduler, ranks, num_steps) if num_steps >= min_steps else None


def _admits_nobody(scheduler: Scheduler) -> bool:
    """Nobody waits, or no rank has a slot and a token of budget to spare: neither changes while everybody only decodes."""
    budget = scheduler.config.cache.max_batched_tokens
    return not scheduler.waiting or not any(rank.free_slots and len(rank.running) < budget for rank in scheduler.ranks)


def _plan_blocks(rank: RankState, stretch: RankStretch, num_steps: int, keeps_cache: bool) -> int:
    """Fill in who grows and who ends a block in which round; returns for how many rounds there are blocks without a preemption."""
    size = rank.block_size
    saves_tails = rank.saves_tails
    growth, boundaries = stretch.growth, stretch.boundaries
    num_lockable = 0
    for index, sequence in enumerate(rank.running):
        position = sequence.num_planned
        first = len(sequence.blocks) * size - position
        if first < num_steps:
            growth += [(step, index) for step in range(first, num_steps, size)]
        if saves_tails:
            boundaries += [(step, index) for step in range(-(position + 1) % size, num_steps, size)]
            num_lockable += max(0, (position + num_steps) // size - sequence.num_locked_blocks)
    growth.sort()
    boundaries.sort()
    # Blocks that become part of the tree with a saved tail may be there already, cached for others: then those are no longer evictable.
    available = rank.pool.num_free if keeps_cache else max(rank.pool.num_free, rank.num_allocatable - num_lockable)
    if keeps_cache and boundaries:
        num_steps = min(num_steps, boundaries[0][0])
    return num_steps if len(growth) <= available else min(num_steps, growth[available][0])


def _count_saves(scheduler: Scheduler, ranks: list[RankStretch], num_steps: int) -> list[list[int]]:
    """A save needs an id that no uncommitted save has; all others can be had, for no plan of a stretch pins one."""
    if not any(rank.saves_tails for rank in scheduler.ranks):
        return []
    record = scheduler.uncommitted[0] if scheduler.uncommitted else None
    counts = [[0] * len(ranks) for _ in range(num_steps)]
    for rank, stretch in zip(scheduler.ranks, ranks, strict=True):
        for step, _ in stretch.boundaries:
            if step < num_steps:
                counts[step][rank.rank] += 1
        pending = 0 if record is None else len(record.tail_saves[rank.rank])
        num_tails = scheduler.config.cache.num_tails
        for row in counts:
            row[rank.rank] = min(row[rank.rank], num_tails - pending)
            pending = 0 if record is None else row[rank.rank]
    return counts


def _advance_rank(rank: RankState, stretch: RankStretch, saves: Saves, count: int, depth: int) -> tuple[RankPlan, Saves, int]:
    """Returns the rank's part of the last round's plan, its tail saves, and the blocks in use after it. ``saves`` are those of the plan
    under way at the start."""
    running = rank.running
    computed = [sequence.num_computed for sequence in running]
    planned = [sequence.num_planned for sequence in running]
    for sequence, token in zip(running, stretch.tokens, strict=True):
        sequence.tokens.extend([token] * count)
        sequence.num_computed += count
        sequence.num_planned += count
        sequence.num_expected += count
    grown = _Cursor(stretch.growth)
    filled = _Cursor(stretch.boundaries)
    appends: list[BlockAppend] = []
    places = {sequence.id: index for index, sequence in enumerate(running)} if rank.saves_tails else {}
    held = step = last = 0
    while step < count:
        last = step
        appends = []
        for index in grown.of(step):
            sequence = running[index]
            blocks = rank.allocate(1)
            if blocks is None:
                raise InvariantError(f"rank {rank.rank}: a block was counted as allocatable and is not")
            appends.append(BlockAppend(sequence.slot, len(sequence.blocks), (blocks[0],)))
            sequence.blocks += blocks
        taken = rank.take_tails([(running[index], planned[index] + step + 1) for index in filled.of(step)])
        held = rank.pool.num_blocks - rank.num_allocatable
        settled, saves = (saves, taken) if depth else (taken, [])
        for sequence, position, tail in settled:
            # What is inserted with the tail is what was computed by then.
            final = sequence.num_computed
            sequence.num_computed = computed[places[sequence.id]] + step + 1
            rank.attach_tail(sequence, position, tail)
            sequence.num_computed = final
        if saves:
            step += 1
        else:  # nothing happens before the next round of either list
            step = min(grown.next_step, filled.next_step)
    if last < count - 1:
        appends, held = [], rank.pool.num_blocks - rank.num_allocatable
    if not depth:
        return RankPlan(), [], held
    items = tuple([PlanItem(sequence.slot, sequence.id, sequence.num_planned - 1, 1, 0, True) for sequence in running])
    tails = tuple(TailSave(sequence.slot, position, tail) for sequence, position, tail in saves)
    return RankPlan((), (), (), (), tuple(appends), items, tails), saves, held


class _Cursor:
    """Reads (round, index) pairs round by round."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self._pairs = pairs
        self._place = 0

    @property
    def next_step(self) -> int:
        return self._pairs[self._place][0] if self._place < len(self._pairs) else sys.maxsize

    def of(self, step: int) -> list[int]:
        found = []
        while self._place < len(self._pairs) and self._pairs[self._place][0] == step:
            found.append(self._pairs[self._place][1])
            self._place += 1
        return found
