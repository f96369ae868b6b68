"""The prefix tree: which blocks hold the KV of which token prefixes.

Path-compressed radix tree over whole blocks. A node's key is the *tokens themselves* (4 bytes each), compared in full, so two different
prefixes can never be taken for each other; children are found by the bytes of their first block. Every namespace (tenant salt and whatever
else must never share KV) has a root of its own, found by a tagged tuple.

The tree is one holder of each of its blocks in the pool. A request that uses a path locks its deepest node; a lock counts on every node up
to the root, so a locked node's ancestors are locked, and the blocks of unlocked nodes have the tree as their only holder:
evicting k of them frees exactly k.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from engine.core.block_pool import BlockPool
from engine.core.errors import InvariantError
from engine.core.policies import EvictionPolicy, Key, NodeView
from engine.core.tail_pool import Tail, TailPool

Namespace = tuple[tuple[str, str], ...]
TOKEN_BYTES = 4


class Node:
    """``len(key) == len(blocks) * block bytes``. ``tails`` maps a boundary, in blocks from this node's start, to its tail."""

    __slots__ = (
        "blocks", "children", "creation_tick", "key", "last_use_tick", "locks", "num_uses", "parent", "priority", "queued", "tails",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, blocks: list[int], tick: int, priority: int) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.tails: dict[int, Tail] = {}
        self.locks = 0
        self.num_uses = 0
        self.priority = priority
        self.creation_tick = tick
        self.last_use_tick = tick
        self.queued = False  # has an entry in the eviction heap

    def view(self) -> NodeView:
        return NodeView(self.last_use_tick, self.num_uses, self.priority, self.creation_tick)


class Root(Node):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, tick: int) -> None:
        super().__init__(None, b"", [], tick, 0)
        self.namespace = namespace


class Match(NamedTuple):
    """A hit of ``num_blocks`` blocks: ``path`` holds (node, blocks used of it); ``tail`` is the id stored at the end, if asked for.

    True until the tree changes; a lock may already split the last node, so read ``blocks`` before it.
    """

    namespace: Namespace
    num_blocks: int
    path: list[tuple[Node, int]]
    tail: int | None

    def blocks(self) -> list[int]:
        found: list[int] = []
        for node, count in self.path:
            found += node.blocks if count == len(node.blocks) else node.blocks[:count]
        return found


class PrefixTree:
    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy, tails: TailPool | None = None) -> None:
        self.pool = pool
        self.tails = tails
        self.num_blocks = 0
        self.num_evictable_blocks = 0
        self._block_bytes = block_size * TOKEN_BYTES
        self._policy = policy
        self._roots: dict[Namespace, Root] = {}
        self._tick = 0
        # Leaves that may be evicted, with the key they had when pushed. Keys of a node only grow, so an entry that is out of date is
        # too small, comes up too early, and is pushed again with the current key.
        self._heap: list[tuple[Key, Node]] = []

    def match(self, namespace: Namespace, tokens: bytes, max_blocks: int, need_tail: bool = False) -> Match:
        """The longest cached prefix of ``tokens`` (4 bytes each) of at most ``max_blocks`` blocks; changes nothing.

        With ``need_tail`` the hit ends at the deepest boundary where a window tail is stored.
        """
        size = self._block_bytes
        end = max_blocks * size
        path: list[tuple[Node, int]] = []
        node: Node | None = self._roots.get(namespace)
        position = 0
        while node is not None and position < end:
            child = node.children.get(tokens[position : position + size])
            if child is None:
                break
            if position + len(child.key) <= end and tokens.startswith(child.key, position):
                count = len(child.blocks)
            else:
                count = self._common_blocks(child, tokens, position, end)
            path.append((child, count))
            position += count * size
            if count < len(child.blocks):
                break
            node = child
        if not need_tail:
            return Match(namespace, position // size, path, None)
        return self._cut_at_tail(namespace, path)

    def _common_blocks(self, node: Node, tokens: bytes, position: int, end: int) -> int:
        """Blocks at the start of ``node`` that equal ``tokens`` at ``position``; the first is known to."""
        size, key = self._block_bytes, node.key
        low, high = 1, min(len(node.blocks), (end - position) // size)
        while low < high:  # blocks [0, low) are equal; at most high are
            middle = (low + high + 1) // 2
            if tokens.startswith(key[low * size : middle * size], position + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def _cut_at_tail(namespace: Namespace, path: list[tuple[Node, int]]) -> Match:
        for depth in range(len(path) - 1, -1, -1):
            node, count = path[depth]
            index = max((index for index in node.tails if index <= count), default=0)
            if index:
                kept = [*path[:depth], (node, index)]
                return Match(namespace, sum(count for _, count in kept), kept, node.tails[index].id)
        return Match(namespace, 0, [], None)

    def lock_match(self, match: Match, priority: int) -> Node:
        """Lock what ``match`` found, splitting the last node at the matched boundary, and count it as used. Returns the deepest node."""
        self._tick += 1
        if not match.path:
            root = self._root(match.namespace)
            self.lock(root)
            return root
        last, count = match.path[-1]
        node = self._split(last, count) if count < len(last.blocks) else last
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.last_use_tick = self._tick
            step.num_uses += 1
            step.priority = min(step.priority, priority)
            step = step.parent
        if self.tails is not None and len(node.blocks) in node.tails:
            self.tails.touch(node.tails[len(node.blocks)])
        self.lock(node)
        return node

    def lock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.num_evictable_blocks -= len(step.blocks)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            if step.locks <= 0:
                raise InvariantError("a prefix node is unlocked more often than it was locked")
            step.locks -= 1
            parent = step.parent
            if step.locks == 0:
                self.num_evictable_blocks += len(step.blocks)
                self._offer(step)
            step = parent
        self._drop_empty_root(node)

    def insert(self, node: Node, key: bytes, blocks: list[int], priority: int) -> Node:
        """Make ``blocks`` (tokens ``key``) findable below ``node``, a locked node; returns the deepest node of the path.

        Where the tree already has a block for the same tokens it keeps its own; the caller's duplicate stays the caller's.
        """
        size = self._block_bytes
        if len(key) != len(blocks) * size:
            raise InvariantError(f"{len(key)} key bytes do not name {len(blocks)} blocks")
        if node.locks == 0:
            raise InvariantError("insert below an unlocked node")
        self._tick += 1
        position = 0
        while position < len(key):
            child = node.children.get(key[position : position + size])
            if child is None:
                return self._add_leaf(node, key[position:], blocks[position // size :], priority)
            if key.startswith(child.key, position):
                count = len(child.blocks)
            else:
                count = self._common_blocks(child, key, position, len(key))
            node = self._split(child, count) if count < len(child.blocks) else child
            node.last_use_tick = self._tick
            node.priority = min(node.priority, priority)
            position += count * size
        return node

    def _add_leaf(self, parent: Node, key: bytes, blocks: list[int], priority: int) -> Node:
        self.pool.share(blocks)
        self._tick += 1  # creation ticks are unique: they break the ties of every eviction policy
        leaf = Node(parent, key, blocks, self._tick, priority)
        parent.children[key[: self._block_bytes]] = leaf
        self.num_blocks += len(blocks)
        self.num_evictable_blocks += len(blocks)
        self._offer(leaf)
        return leaf

    def _split(self, node: Node, count: int) -> Node:
        """Cut ``node`` after ``count`` blocks. The object keeps the lower part, so whoever locked it still holds its deepest node;
        the new upper part inherits the locks, for each of them passes through it."""
        size, parent = self._block_bytes, node.parent
        if parent is None or not 0 < count < len(node.blocks):
            raise InvariantError(f"cannot split a node of {len(node.blocks)} blocks after {count}")
        self._tick += 1
        upper = Node(parent, node.key[: count * size], node.blocks[:count], self._tick, node.priority)
        upper.last_use_tick, upper.num_uses, upper.locks = node.last_use_tick, node.num_uses, node.locks
        parent.children[upper.key[:size]] = upper
        node.key, node.blocks, node.parent = node.key[count * size :], node.blocks[count:], upper
        upper.children[node.key[:size]] = node
        below: dict[int, Tail] = {}
        for index, tail in node.tails.items():
            if index <= count:
                tail.node = upper
                upper.tails[index] = tail
            else:
                tail.index = index - count
                below[index - count] = tail
        node.tails = below
        return upper

    def evict(self, num_blocks: int) -> int:
        """Free exactly ``min(num_blocks, evictable)`` blocks, from the ends of the leaves that the policy puts first."""
        freed = 0
        heap = self._heap
        while freed < num_blocks and heap:
            key, node = heap[0]
            if not self._is_free_leaf(node):
                heapq.heappop(heap)
                node.queued = False
                continue
            current = self._policy(node.view())
            if current != key:
                heapq.heapreplace(heap, (current, node))
                continue
            freed += self._trim(node, min(num_blocks - freed, len(node.blocks)))
        return freed

    def _trim(self, leaf: Node, count: int) -> int:
        """Take the last ``count`` blocks off an unlocked leaf."""
        kept = len(leaf.blocks) - count
        if self.pool.release(leaf.blocks[kept:]) != count:
            raise InvariantError("an unlocked prefix node has a block with another holder")
        for index in [index for index in leaf.tails if index > kept]:
            assert self.tails is not None
            self.tails.drop(leaf, index)
        if kept == 0 and leaf.parent is not None:
            parent = leaf.parent
            del parent.children[leaf.key[: self._block_bytes]]
            leaf.parent = None
            self._offer(parent)
            self._drop_empty_root(parent)
        leaf.blocks = leaf.blocks[:kept]
        leaf.key = leaf.key[: kept * self._block_bytes]
        self.num_blocks -= count
        self.num_evictable_blocks -= count
        return count

    @staticmethod
    def _is_free_leaf(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        if not node.queued and self._is_free_leaf(node):
            node.queued = True
            heapq.heappush(self._heap, (self._policy(node.view()), node))

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            self._tick += 1
            root = self._roots[namespace] = Root(namespace, self._tick)
        return root

    def _drop_empty_root(self, node: Node) -> None:
        """Tenants come and go: a root without children or locks is forgotten."""
        while node.parent is not None:
            node = node.parent
        if isinstance(node, Root) and not node.children and node.locks == 0:
            self._roots.pop(node.namespace, None)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Counts, links, locks and the eviction queue agree; raises InvariantError."""
        total = evictable = num_tails = 0
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.key[: self._block_bytes]) is not node:
                raise InvariantError("a prefix node is not its parent's child")
            if not node.blocks or len(node.key) != len(node.blocks) * self._block_bytes:
                raise InvariantError("a prefix node's key and blocks differ in length")
            if parent.locks < sum(child.locks for child in parent.children.values()):
                raise InvariantError("a prefix node has fewer locks than its children together")
            total += len(node.blocks)
            num_tails += len(node.tails)
            if node.locks == 0:
                evictable += len(node.blocks)
                if any(self.pool.refcount(block) != 1 for block in node.blocks):
                    raise InvariantError("an unlocked prefix node has a block with another holder")
                if not node.children and not node.queued:
                    raise InvariantError("an evictable leaf is not in the eviction queue")
        if (total, evictable) != (self.num_blocks, self.num_evictable_blocks):
            raise InvariantError(f"prefix tree counts {self.num_blocks}/{self.num_evictable_blocks} blocks and holds {total}/{evictable}")
        if any(not root.children and root.locks == 0 for root in self._roots.values()):
            raise InvariantError("an empty prefix root was kept")
        if self.tails is not None:
            self.tails.check()
            if num_tails != self.tails.num_attached:
                raise InvariantError(f"{num_tails} boundaries have tails and {self.tails.num_attached} tails are attached")
