"""Window tails: bounded stored copies of the per-sequence window rows that end at a block boundary.

A model with per-sequence state can resume only where a tail is stored, so a tail belongs to a boundary of the prefix tree. A tail id is

    free --take--> pending --attach--> attached --drop / evict--> free
                   pending --release--> free

*pending* is owned by the uncommitted plan that saves it: nobody may resume from it before that plan has committed and its blocks are
in the tree. An attached tail that an uncommitted plan loads is *pinned*: it may lose its boundary, but its id is not reused before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.core.errors import InvariantError

if TYPE_CHECKING:
    from engine.core.prefix_tree import Node


class Tail:
    """An attached tail: ``index`` blocks into ``node`` (1 = after its first block)."""

    __slots__ = ("id", "index", "node")

    def __init__(self, tail: int, node: Node, index: int) -> None:
        self.id = tail
        self.node = node
        self.index = index


class TailPool:
    """``num_tails`` ids with their own LRU order, apart from the blocks' eviction policy."""

    def __init__(self, num_tails: int) -> None:
        self.num_tails = num_tails
        self._free = list(range(num_tails - 1, -1, -1))
        self._pending: dict[int, None] = {}
        self._attached: OrderedDict[int, Tail] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}
        self._orphans: dict[int, None] = {}  # pinned, boundary gone

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_attached(self) -> int:
        return len(self._attached)

    def take(self) -> int | None:
        """An id for a TailSave; evicts the least recently used unpinned tail. None where every tail is pending or pinned."""
        if not self._free:
            victim = next((tail for tail in self._attached.values() if tail.id not in self._pins), None)
            if victim is None:
                return None
            self.drop(victim.node, victim.index)
        tail = self._free.pop()
        self._pending[tail] = None
        return tail

    def release(self, tail: int) -> None:
        """A pending id whose save came to nothing."""
        if tail not in self._pending:
            raise InvariantError(f"tail {tail} is not pending")
        del self._pending[tail]
        self._free.append(tail)

    def attach(self, tail: int, node: Node, index: int) -> None:
        """Make a saved tail usable at a boundary. A boundary that has one already keeps it (the contents are the same)."""
        if not 1 <= index <= len(node.blocks):
            raise InvariantError(f"tail {tail}: boundary {index} is outside a node of {len(node.blocks)} blocks")
        if index in node.tails:
            self.release(tail)
            self.touch(node.tails[index])
            return
        if tail not in self._pending:
            raise InvariantError(f"tail {tail} is not pending")
        del self._pending[tail]
        self._attached[tail] = node.tails[index] = Tail(tail, node, index)

    def touch(self, tail: Tail) -> None:
        self._attached.move_to_end(tail.id)

    def drop(self, node: Node, index: int) -> None:
        """The boundary goes (its block is evicted, or the tail itself is)."""
        tail = node.tails.pop(index)
        del self._attached[tail.id]
        if tail.id in self._pins:
            self._orphans[tail.id] = None
        else:
            self._free.append(tail.id)

    def pin(self, tail: int) -> None:
        if tail not in self._attached:
            raise InvariantError(f"tail {tail} is not stored and cannot be pinned")
        self._pins[tail] = self._pins.get(tail, 0) + 1

    def unpin(self, tail: int) -> None:
        count = self._pins.get(tail, 0)
        if count == 0:
            raise InvariantError(f"tail {tail} is not pinned")
        if count > 1:
            self._pins[tail] = count - 1
            return
        del self._pins[tail]
        if tail in self._orphans:
            del self._orphans[tail]
            self._free.append(tail)

    def check(self) -> None:
        """Every id is in exactly one place, and attached tails and their nodes know each other."""
        places = [*self._free, *self._pending, *self._attached, *self._orphans]
        if sorted(places) != list(range(self.num_tails)):
            raise InvariantError(f"tails: {sorted(places)} is not 0..{self.num_tails - 1}, each once")
        for tail in self._attached.values():
            if tail.node.tails.get(tail.index) is not tail:
                raise InvariantError(f"tail {tail.id} and its node disagree about boundary {tail.index}")
        for tail_id in self._pins:
            if tail_id not in self._attached and tail_id not in self._orphans:
                raise InvariantError(f"tail {tail_id} is pinned and neither attached nor orphaned")
