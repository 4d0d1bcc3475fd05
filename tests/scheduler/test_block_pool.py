"""Order and states of the block pool."""

from __future__ import annotations

import pytest

from framework.scheduler import BlockPool, BlockState


def published(pool, count, key="k"):
    """`count` blocks of one holder, published as (key, 0), (key, 1), ..."""
    blocks = pool.allocate(count)
    pool.write(blocks)
    for index, block in enumerate(blocks):
        pool.commit(block)
        assert pool.publish(block, (key, index))
    return blocks


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4] and pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free of 5"):
        pool.allocate(1)


def test_blocks_are_consecutive_when_the_free_ones_are():
    pool = BlockPool(9)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(6) == [1, 2, 3, 4, 5, 6]


def test_blocks_without_content_go_before_published_ones():
    pool = BlockPool(6)
    kept = published(pool, 2)
    pool.free(kept)
    assert not set(pool.allocate(3)) & set(kept)
    assert pool.find(("k", 0)) == kept[0] and pool.find(("k", 1)) == kept[1]


def test_tail_of_the_least_recently_freed_request_is_reused_first():
    pool = BlockPool(7)
    old, new = published(pool, 3, "old"), published(pool, 3, "new")
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [old[2]]
    assert pool.allocate(2) == old[:2]
    assert pool.allocate(1) == [new[2]]
    assert pool.find(("new", 1)) == new[1] and pool.find(("old", 0)) is None


def test_block_used_again_counts_as_recent():
    pool = BlockPool(5)
    a, b = published(pool, 2, "a"), published(pool, 2, "b")
    pool.free(a)
    pool.free(b)
    pool.acquire(a)
    pool.free(a)
    assert pool.allocate(2) == b


def test_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(4)
    blocks = published(pool, 3)
    pool.acquire(blocks[:1])
    pool.free(blocks)
    assert pool.num_free == 2 and pool.ref_count(blocks[0]) == 1
    pool.free(blocks[:1])
    assert pool.num_free == 3


def test_reused_block_is_no_longer_found_under_its_old_key():
    pool = BlockPool(2)
    pool.free(published(pool, 1, "old"))
    (block,) = published(pool, 1, "new")
    assert pool.find(("old", 0)) is None and pool.find(("new", 0)) == block


def test_second_block_of_a_key_stays_private():
    pool = BlockPool(4)
    (first,) = published(pool, 1)
    (second,) = pool.allocate(1)
    pool.write([second])
    pool.commit(second)
    assert not pool.publish(second, ("k", 0))
    pool.free([second])
    assert pool.find(("k", 0)) == first and pool.state(second) is BlockState.FREE


def test_state_advances_only_in_order():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="committed in state ALLOCATED"):
        pool.commit(block)
    pool.write([block])
    with pytest.raises(AssertionError, match="published in state IN_FLIGHT"):
        pool.publish(block, "k")
    with pytest.raises(AssertionError, match="shared in state IN_FLIGHT"):
        pool.acquire([block])
    pool.commit(block)
    with pytest.raises(AssertionError, match="written in state COMMITTED"):
        pool.write([block])


def test_committed_block_is_shared_without_being_published():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.write([block])
    pool.commit(block)
    pool.acquire([block])
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.state(block), pool.num_free) == (BlockState.FREE, 2)


def test_block_that_is_only_read_stays_until_its_reader_lets_go():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.write([block])
    pool.hold(block)
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="is nobody's"):
        pool.hold(block)


def test_block_cannot_be_freed_twice():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed with reference count 0"):
        pool.free(blocks)
