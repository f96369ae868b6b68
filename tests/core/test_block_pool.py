"""The block pool against a dict of counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool
from engine.core.errors import InvariantError


@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 13)), max_size=60))
def test_counts_like_a_naive_pool(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    pool, holders = BlockPool(num_blocks), dict.fromkeys(range(num_blocks), 0)
    for action, number in actions:
        held = [block for block, count in holders.items() if count]
        if action == "allocate":
            blocks = pool.allocate(number)
            if number > num_blocks - len(held):
                assert blocks is None
            else:
                assert blocks is not None
                assert len(set(blocks)) == number
                for block in blocks:
                    assert holders[block] == 0
                    holders[block] = 1
        elif held:
            block = held[number % len(held)]
            if action == "share":
                pool.share([block])
                holders[block] += 1
            else:
                freed = pool.release([block])
                holders[block] -= 1
                assert freed == (holders[block] == 0)
        pool.check(holders)
        assert pool.num_free + pool.num_held == num_blocks
        assert pool.num_held == sum(count > 0 for count in holders.values())


def test_a_double_free_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.release(blocks)
    with pytest.raises(InvariantError, match="is free"):
        pool.share(blocks)


def test_check_sees_a_forgotten_holder() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(InvariantError, match="1 and 0 holders"):
        pool.check({})
