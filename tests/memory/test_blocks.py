"""BlockPool: first freed, first taken, and no block twice."""

import pytest

from quire.memory.blocks import BlockPool


def test_blocks_are_taken_in_the_order_they_were_freed_and_never_block_zero():
    pool = BlockPool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    assert pool.num_free == 0
    for block in (2, 3, 1):
        pool.release(block)
    assert [pool.take() for _ in range(3)] == [2, 3, 1]


def test_a_block_with_nothing_worth_keeping_is_the_next_to_be_taken():
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.release(first)
    pool.release(second, keep=False)
    assert pool.free_blocks() == [second, 3, first]


def test_an_empty_pool_says_so():
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(RuntimeError, match="empty block pool"):
        pool.take()


def test_sharing_revives_a_free_block_out_of_the_middle_of_the_line():
    pool = BlockPool(3)
    pool.share(2)
    assert pool.free_blocks() == [1, 3]
    assert pool.ref_counts[2] == 1


def test_a_block_released_too_often_is_an_error():
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(block)
