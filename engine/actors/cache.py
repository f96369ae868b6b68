"""The cache manager: carries out the moves of KV blocks that the core decided on, and accounts for them.

The core owns the block accounting and writes its orders (copies for forks, swaps to the host pool, stored tails) into each
RankPlan; the KV tensors belong to the worker, which executes the orders in the plan's order. What is left for the parent is
kept here, by one owner: the orders under way, the bounds of the host pool, the bytes moved, and the report of completion.
Transfers between replicas and slower tiers will be tasks of this manager, with the same begin, complete and abandon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.plan import RankPlan, StepPlan

MoveKind = Literal["copy", "swap_out", "swap_in"]


class BlocksMoved(msgspec.Struct, frozen=True, tag="moved"):
    """Orders of one kind in one step of one rank are done. ``num_bytes`` is 0 where the size of a block is not known."""

    now_s: float
    step: int
    rank: int
    kind: MoveKind
    num_blocks: int
    num_bytes: int


class CacheStats(msgspec.Struct, frozen=True):
    """Totals since the workers started; ``in_flight`` counts blocks that a worker has been told to move and has not yet."""

    copied_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    moved_bytes: int
    in_flight_blocks: int


class CacheManager:
    """One per replica; used by the scheduler's task alone."""

    def __init__(self, config: CacheConfig, report: Callable[[BlocksMoved], None] | None = None) -> None:
        self._config = config
        self._report = report
        self.reset(block_bytes=0)

    def reset(self, block_bytes: int) -> None:
        """New workers, empty memory."""
        self._block_bytes = block_bytes
        self._in_flight: dict[int, tuple[tuple[int, MoveKind, int], ...]] = {}
        self._written_host_blocks: set[tuple[int, int]] = set()
        self._moved_blocks: dict[MoveKind, int] = {"copy": 0, "swap_out": 0, "swap_in": 0}

    def begin(self, plan: StepPlan) -> None:
        """Take up the orders of a plan that is about to be sent. Raises InvariantError for one that leaves the bounds."""
        moves = tuple(move for rank, rank_plan in enumerate(plan.ranks) for move in self._moves(rank, rank_plan))
        if moves:
            self._in_flight[plan.step] = moves

    def complete(self, step: int, now_s: float) -> None:
        """The workers have executed the step, and with it its moves."""
        for rank, kind, num_blocks in self._in_flight.pop(step, ()):
            self._moved_blocks[kind] += num_blocks
            if self._report is not None:
                self._report(BlocksMoved(now_s, step, rank, kind, num_blocks, num_blocks * self._block_bytes))

    def stats(self) -> CacheStats:
        moved = self._moved_blocks
        in_flight = sum(num_blocks for moves in self._in_flight.values() for _, _, num_blocks in moves)
        return CacheStats(moved["copy"], moved["swap_out"], moved["swap_in"], sum(moved.values()) * self._block_bytes, in_flight)

    def _moves(self, rank: int, plan: RankPlan) -> Sequence[tuple[int, MoveKind, int]]:
        if not (plan.copies or plan.swap_outs or plan.swap_ins):
            return ()
        moves: list[tuple[int, MoveKind, int]] = []
        for out in plan.swap_outs:
            self._check_bound("host block", out.host_blocks, self._config.num_host_blocks)
            self._check_bound("host state", (out.host_state,), self._config.num_host_states)
            self._written_host_blocks.update((rank, block) for block in out.host_blocks)
        for swap_in in plan.swap_ins:
            unwritten = [block for block in swap_in.host_blocks if (rank, block) not in self._written_host_blocks]
            if unwritten:
                raise InvariantError(f"rank {rank}: swap-in of host blocks {unwritten} that hold nothing")
        for copy in plan.copies:
            self._check_bound("block", (copy.src, copy.dst), self._config.num_blocks)
        totals: tuple[tuple[MoveKind, int], ...] = (
            ("swap_out", sum(len(out.blocks) for out in plan.swap_outs)),
            ("swap_in", sum(len(swap_in.blocks) for swap_in in plan.swap_ins)),
            ("copy", len(plan.copies)),
        )
        moves += [(rank, kind, num_blocks) for kind, num_blocks in totals if num_blocks]
        return moves

    @staticmethod
    def _check_bound(what: str, indices: Sequence[int], count: int) -> None:
        for index in indices:
            if not 0 <= index < count:
                raise InvariantError(f"{what} {index} is ordered; there are {count}")
