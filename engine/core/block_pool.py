"""Reference-counted block ids of one memory (a rank's device blocks, or its host blocks). Pure bookkeeping; moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.errors import InvariantError


class BlockPool:
    """``num_blocks`` ids, each free or held by one or more holders. Ids are handed out in a fixed order: runs are repeatable."""

    __slots__ = ("_free", "_refcounts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed block is the first reused
        self._refcounts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one holder each, or None and nothing taken."""
        free = self._free
        if count > len(free):
            return None
        if count == 0:
            return []
        taken = free[: -count - 1 : -1]
        del free[-count:]
        for block in taken:
            self._refcounts[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One holder more for each. Raises InvariantError for a block that nobody holds."""
        refcounts = self._refcounts
        for block in blocks:
            if refcounts[block] <= 0:
                raise InvariantError(f"block {block} is free and cannot be shared")
            refcounts[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """One holder less for each; returns how many became free. Raises InvariantError on a double free."""
        refcounts, free = self._refcounts, self._free
        before = len(free)
        for block in reversed(blocks):
            count = refcounts[block]
            if count <= 0:
                raise InvariantError(f"block {block} is freed twice")
            refcounts[block] = count - 1
            if count == 1:
                free.append(block)
        return len(free) - before

    def check(self, holders: Mapping[int, int]) -> None:
        """free + held == total, and each count equals the number of ``holders`` of that block (absent means 0)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is twice in the free list")
        for block, count in enumerate(self._refcounts):
            expected = holders.get(block, 0)
            if count != expected:
                raise InvariantError(f"block {block} has refcount {count} and {expected} holders")
            if (count == 0) != (block in free):
                raise InvariantError(f"block {block} has refcount {count} and {'is' if block in free else 'is not'} in the free list")
