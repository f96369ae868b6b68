"""Which physical expert slots hold which logical experts: the placement at start, a balanced one from measured loads, and the moves
from one to the other. Pure functions; the ranks that hold the weights carry the moves out between two steps.

Physical slots of ep ranks 0 .. n-1 lie one rank after the other, as many on each. An expert with several slots is redundant: its tokens
are shared out among them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from engine.core.errors import ConfigError, InvariantError


class ExpertMap(msgspec.Struct, frozen=True):
    """``logical[p]`` is the expert in physical slot p."""

    num_experts: int
    num_ranks: int
    logical: tuple[int, ...]

    @property
    def slots_per_rank(self) -> int:
        return len(self.logical) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Experts of an ep rank by slot."""
        return self.logical[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Physical slots of every expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.logical):
            found[expert].append(slot)
        return tuple(tuple(slots) for slots in found)

    def check(self) -> None:
        """Raise InvariantError where a rank has more slots than another, or an expert none."""
        if self.num_ranks < 1 or len(self.logical) % self.num_ranks:
            raise InvariantError(f"{len(self.logical)} expert slots cannot be shared out evenly among {self.num_ranks} ranks")
        if any(not 0 <= expert < self.num_experts for expert in self.logical):
            raise InvariantError(f"an expert slot names an expert outside 0 to {self.num_experts - 1}")
        missing = [expert for expert, slots in enumerate(self.slots()) if not slots]
        if missing:
            raise InvariantError(f"experts {missing[:8]} have no slot")


class Move(msgspec.Struct, frozen=True, array_like=True):
    """The expert in ``source_slot`` of the old map goes to ``slot`` of the new one; both are physical slots."""

    source_slot: int
    slot: int


def even_map(num_experts: int, num_redundant: int, num_ranks: int) -> ExpertMap:
    """Experts in order, as many on each rank, and behind them ``num_redundant / num_ranks`` copies of experts of *other* ranks, each
    expert at most once more before any gets a third slot. Raises ConfigError where the numbers do not divide."""
    if num_ranks < 1 or num_experts % num_ranks or num_redundant % num_ranks:
        raise ConfigError(f"{num_experts} experts and {num_redundant} redundant ones cannot be shared out evenly among {num_ranks} ranks")
    if num_redundant and num_ranks == 1:
        raise ConfigError(f"redundant experts are {num_redundant}; one rank holds every expert already, use 0")
    own, extra = num_experts // num_ranks, num_redundant // num_ranks
    logical: list[int] = []
    for rank in range(num_ranks):
        logical.extend(range(rank * own, (rank + 1) * own))
        # Copy j comes from the rank 1 + j % (n - 1) further on, which gives away its (j // (n - 1))-th next.
        for copy in range(extra):
            step = 1 + copy % (num_ranks - 1)
            giver = (rank + step) % num_ranks
            logical.append(giver * own + ((copy // (num_ranks - 1)) * (num_ranks - 1) + step - 1) % own)
    return ExpertMap(num_experts, num_ranks, tuple(logical))


def balanced_map(loads: Sequence[float], num_redundant: int, num_ranks: int) -> ExpertMap:
    """A placement for experts that received ``loads`` (tokens in a window of steps).

    Greedy in two stages, the scheme of DeepSeek's EPLB without its node groups: redundant slots go one by one to the expert with the
    highest load a slot; then slots, by descending load, to the least loaded rank that has room and, where possible, not that expert yet.
    Ties go to the lower id, so every process computes the same map.
    """
    num_experts = len(loads)
    total = num_experts + num_redundant
    if num_ranks < 1 or total % num_ranks:
        raise ConfigError(f"{num_experts} experts and {num_redundant} redundant ones cannot be shared out evenly among {num_ranks} ranks")
    counts = [1] * num_experts
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_redundant):
        # More slots than ranks would be of no use.
        waiting = []
        while counts[heap[0][1]] >= num_ranks and len(heap) > 1:
            waiting.append(heapq.heappop(heap))
        _, expert = heap[0]
        counts[expert] += 1
        heapq.heapreplace(heap, (-loads[expert] / counts[expert], expert))
        for entry in waiting:
            heapq.heappush(heap, entry)
    pieces = sorted((-loads[expert] / counts[expert], expert) for expert in range(num_experts) for _ in range(counts[expert]))
    return ExpertMap(num_experts, num_ranks, _packed(pieces, total // num_ranks, num_ranks))


def _packed(pieces: list[tuple[float, int]], room: int, num_ranks: int) -> tuple[int, ...]:
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for negative_load, expert in pieces:
        open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < room]
        fresh = [rank for rank in open_ranks if expert not in ranks[rank]]
        chosen = min(fresh or open_ranks, key=lambda rank: (sums[rank], rank))
        ranks[chosen].append(expert)
        sums[chosen] -= negative_load
    return tuple(expert for experts in ranks for expert in sorted(experts))


def rank_loads(placement: ExpertMap, loads: Sequence[float]) -> list[float]:
    """Tokens an ep rank computes, where each expert's are shared out evenly among its slots."""
    slots = placement.slots()
    return [sum(loads[expert] / len(slots[expert]) for expert in placement.of_rank(rank)) for rank in range(placement.num_ranks)]


def kept_in_place(old: ExpertMap, new: ExpertMap) -> ExpertMap:
    """``new`` with the slots of each rank reordered so that an expert that stays on its rank keeps its slot: the fewest moves."""
    logical: list[int] = []
    for rank in range(new.num_ranks):
        wanted = list(new.of_rank(rank))
        row: list[int | None] = []
        for expert in old.of_rank(rank):
            if expert in wanted:
                wanted.remove(expert)
                row.append(expert)
            else:
                row.append(None)
        logical.extend(wanted.pop(0) if expert is None else expert for expert in row)
    return ExpertMap(new.num_experts, new.num_ranks, tuple(logical))


def moves(old: ExpertMap, new: ExpertMap) -> tuple[Move, ...]:
    """One move for every slot whose expert changes, by slot. A source on the same rank is preferred, else holders take turns.

    Raises InvariantError for maps of different shapes.
    """
    if (old.num_experts, old.num_ranks, len(old.logical)) != (new.num_experts, new.num_ranks, len(new.logical)):
        raise InvariantError("an expert map can only be replaced by one with the same experts, ranks and slots")
    sources, size = old.slots(), old.slots_per_rank
    turns = [0] * old.num_experts
    result = []
    for slot, expert in enumerate(new.logical):
        if old.logical[slot] == expert:
            continue
        near = [source for source in sources[expert] if source // size == slot // size]
        if near:
            source = near[0]
        else:
            source = sources[expert][turns[expert] % len(sources[expert])]
            turns[expert] += 1
        result.append(Move(source, slot))
    return tuple(result)
