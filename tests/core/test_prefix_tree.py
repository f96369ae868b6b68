"""The prefix tree against a literal table of prefixes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool
from engine.core.errors import InvariantError
from engine.core.policies import EVICTION_POLICIES
from engine.core.prefix_tree import Match, Namespace, Node, PrefixTree
from engine.core.request import Request
from engine.core.tail_pool import TailPool

P = 2


def data(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class User:
    """Holds a path as the scheduler does: blocks in the pool, a lock in the tree."""

    def __init__(self, tree: PrefixTree, namespace: Namespace, tokens: list[int], priority: int = 0, need_tail: bool = False) -> None:
        self.tree, self.tokens = tree, tokens
        count = len(tokens) // P
        self.match: Match = tree.match(namespace, data(tokens), count, need_tail)
        hit = self.match.blocks()
        tree.pool.share(hit)
        self.node: Node = tree.lock_match(self.match, priority)
        fresh = count - len(hit)
        if fresh > tree.pool.num_free:
            tree.evict(fresh - tree.pool.num_free)
        blocks = tree.pool.allocate(fresh)
        if blocks is None:
            tree.pool.release(hit)
            tree.unlock(self.node)
            raise MemoryError
        self.blocks = hit + blocks

    def publish(self, priority: int = 0) -> None:
        first = self.match.num_blocks
        node = self.tree.insert(self.node, data(self.tokens[first * P : len(self.blocks) * P]), self.blocks[first:], priority)
        self.tree.lock(node)
        self.tree.unlock(self.node)
        self.node = node

    def leave(self) -> None:
        self.tree.unlock(self.node)
        self.tree.pool.release(self.blocks)


def table(tree: PrefixTree) -> dict[tuple[Namespace, bytes], int]:
    """Every cached prefix and the block that ends it."""
    found: dict[tuple[Namespace, bytes], int] = {}
    for namespace, root in tree._roots.items():
        stack: list[tuple[Node, bytes]] = [(root, b"")]
        while stack:
            node, prefix = stack.pop()
            for index, block in enumerate(node.blocks):
                found[namespace, prefix + node.key[: (index + 1) * P * 4]] = block
            stack += [(child, prefix + node.key) for child in node.children.values()]
    return found


TOKENS = st.lists(st.integers(0, 1), max_size=14)
NAMESPACES = st.sampled_from([(), (("salt", "a"),), (("adapter", "a"),)])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(EVICTION_POLICIES)),
    st.lists(st.tuples(st.sampled_from(["use", "use", "leave", "evict"]), TOKENS, NAMESPACES, st.integers(0, 9)), max_size=40),
)
def test_like_a_table_of_prefixes(policy: str, actions: list[tuple[str, list[int], Namespace, int]]) -> None:
    pool = BlockPool(24)
    tree = PrefixTree(pool, P, EVICTION_POLICIES[policy])
    users: list[User] = []
    for action, tokens, namespace, number in actions:
        before = table(tree)
        if action == "use":
            expected = 0
            while (expected + 1) * P <= len(tokens) and (namespace, data(tokens[: (expected + 1) * P])) in before:
                expected += 1
            try:
                user = User(tree, namespace, tokens, number)
            except MemoryError:
                continue
            assert user.match.num_blocks == expected
            assert user.blocks[:expected] == [before[namespace, data(tokens[: (index + 1) * P])] for index in range(expected)]
            user.publish()
            users.append(user)
            after = table(tree)
            assert all((namespace, data(tokens[: (index + 1) * P])) in after for index in range(len(tokens) // P))
        elif action == "leave" and users:
            users.pop(number % len(users)).leave()
            assert table(tree) == before
        elif action == "evict":
            evictable = tree.num_evictable_blocks
            free = pool.num_free
            assert tree.evict(number) == min(number, evictable) == pool.num_free - free
            assert set(table(tree)) <= set(before)
        tree.check()
        holders: dict[int, int] = {}
        for blocks in [*(user.blocks for user in users), *(node.blocks for node in tree.nodes())]:
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        pool.check(holders)
    for user in users:
        user.leave()
    tree.check()
    assert tree.num_evictable_blocks == tree.num_blocks
    assert tree.evict(1000) == 24 - pool.num_free or pool.num_free == 24
    assert not tree._roots


def make(num_blocks: int = 20, policy: str = "lru", num_tails: int = 0) -> PrefixTree:
    return PrefixTree(BlockPool(num_blocks), P, EVICTION_POLICIES[policy], TailPool(num_tails) if num_tails else None)


def cache(tree: PrefixTree, tokens: list[int], namespace: Namespace = (), priority: int = 0) -> None:
    user = User(tree, namespace, tokens, priority)
    user.publish(priority)
    user.leave()


def hit(tree: PrefixTree, tokens: list[int], namespace: Namespace = ()) -> int:
    return tree.match(namespace, data(tokens), len(tokens) // P).num_blocks


def test_a_partial_match_locks_only_what_matched() -> None:
    tree = make()
    cache(tree, [1, 1, 2, 2, 3, 3])
    user = User(tree, (), [1, 1, 2, 2, 9, 9])
    assert tree.num_evictable_blocks == 1  # the block of [3, 3] is not held by a match that ends before it
    user.publish()
    user.leave()
    tree.check()
    assert tree.num_evictable_blocks == tree.num_blocks == 4


def test_namespaces_never_share() -> None:
    tree = make()
    cache(tree, [1, 1], (("salt", "x"),))
    assert hit(tree, [1, 1], (("salt", "x"),)) == 1
    assert hit(tree, [1, 1], (("adapter", "x"),)) == hit(tree, [1, 1], ()) == hit(tree, [1, 1], (("salt", "y"),)) == 0
    assert Request(1, (1,), cache_salt="x").namespace != Request(1, (1,), adapter="x").namespace
    assert Request(1, (1,), cache_salt="").namespace != Request(1, (1,)).namespace


def test_same_block_under_another_prefix_is_no_hit() -> None:
    tree = make()
    cache(tree, [1, 1, 5, 5])
    assert hit(tree, [2, 2, 5, 5]) == 0
    assert hit(tree, [5, 5]) == 0


def test_block_boundaries() -> None:
    tree = make()
    cache(tree, [1, 2, 3])  # P + 1 tokens: one full block
    assert [hit(tree, tokens) for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 3], [1, 2, 3, 4])] == [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [("lru", [3, 3]), ("lfu", [1, 1]), ("slru", [1, 1]), ("priority", [2, 2])],
)
def test_eviction_policies_differ(policy: str, survivor: list[int]) -> None:
    tree = make(policy=policy)
    cache(tree, [1, 1], priority=5)
    cache(tree, [1, 1], priority=5)
    cache(tree, [1, 1], priority=5)
    cache(tree, [2, 2], priority=0)
    cache(tree, [3, 3], priority=9)
    assert tree.evict(2) == 2
    assert [tokens for tokens in ([1, 1], [2, 2], [3, 3]) if hit(tree, tokens)] == [survivor]


def test_eviction_trims_a_long_leaf() -> None:
    tree = make()
    cache(tree, [1, 1, 2, 2, 3, 3, 4, 4])
    assert tree.evict(3) == 3
    assert hit(tree, [1, 1, 2, 2]) == 1


def test_unlock_too_often_raises() -> None:
    tree = make()
    user = User(tree, (), [1, 1])
    user.publish()
    tree.unlock(user.node)
    with pytest.raises(InvariantError, match="unlocked more often"):
        tree.unlock(user.node)


def test_reinsert_after_eviction_does_not_free_live_blocks() -> None:
    tree = make(4)
    for round_ in range(200):
        user = User(tree, (), [1, 1, round_ % 3, 2, 5, round_ % 5])
        user.publish()
        tree.evict(round_ % 3)
        tree.check()
        user.leave()
        tree.check()


def test_a_hit_ends_at_the_deepest_tail() -> None:
    tree = make(num_tails=2)
    assert tree.tails is not None
    user = User(tree, (), [1, 1, 2, 2, 3, 3])
    user.publish()
    user.leave()
    tokens = data([1, 1, 2, 2, 3, 3])
    assert tree.match((), tokens, 3, need_tail=True).num_blocks == 0
    tail = tree.tails.take()
    assert tail is not None
    assert tree.match((), tokens, 3, need_tail=True).num_blocks == 0  # taken is not stored
    node = tree.match((), tokens, 3).path[-1][0]
    tree.tails.attach(tail, node, 2)
    found = tree.match((), tokens, 3, need_tail=True)
    assert (found.num_blocks, found.tail) == (2, tail)
    other = User(tree, (), [1, 1, 9, 9])  # splits the node: the tail goes with its boundary
    tree.check()
    assert tree.match((), tokens, 3, need_tail=True).tail == tail
    other.leave()
    tree.evict(2)
    assert tree.match((), tokens, 3, need_tail=True).num_blocks == 0
    assert tree.tails.num_attached == 0
    tree.check()


def test_tails_are_evicted_by_use_and_never_while_pinned() -> None:
    tree = make(num_tails=2)
    tails = tree.tails
    assert tails is not None
    cache(tree, [1, 1, 2, 2, 3, 3])
    node = next(tree.nodes())
    first, second = tails.take(), tails.take()
    assert first is not None
    assert second is not None
    tails.attach(first, node, 1)
    tails.attach(second, node, 2)
    tails.touch(node.tails[1])
    assert tails.take() == second  # the least recently used
    tails.pin(first)
    assert tails.take() is None
    tree.evict(3)  # the boundary goes, the pinned id stays taken
    tails.check()
    assert tails.take() is None
    tails.unpin(first)
    assert tails.take() == first
    with pytest.raises(InvariantError, match="not pending"):
        tails.release(7)
