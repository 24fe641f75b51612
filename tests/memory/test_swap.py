"""Blocks in host memory: moved once however many share them, all or nothing, given back, recounted."""

import pytest

from quire.memory.paged import PagedMemory, TableDelta
from tests.memory.test_paged import compute, fork, make_sequence


def make(num_blocks=8, num_swap_blocks=8, **settings):
    return PagedMemory(num_blocks, 4, num_swap_blocks=num_swap_blocks, **settings)


def taken(memory):
    moves = memory.transfers.take()
    return [] if moves is None else [list(zip(moves.out_blocks, moves.out_hosts, strict=True)),
                                     list(zip(moves.in_hosts, moves.in_blocks, strict=True))]  # fmt: skip


def test_shared_blocks_leave_once_and_are_shared_again_when_they_are_back():
    memory = make(enable_prefix_caching=False)
    parent, child = make_sequence(range(6), n=2), make_sequence(range(6), n=2)
    compute(memory, parent)
    fork(memory, parent, child, 6)
    assert memory.swap.out([parent, child], {})
    assert memory.num_free == 8
    assert memory.swap.hosts.num_used == 2
    assert parent.host_block_ids == child.host_block_ids
    memory.check_integrity([parent, child])
    outs, _ = taken(memory)
    assert len(outs) == 2
    memory.swap.back([parent, child])
    assert parent.block_ids == child.block_ids
    assert (parent.num_computed, child.num_computed) == (6, 6)
    assert memory.swap.hosts.num_used == 0
    _, ins = taken(memory)
    assert [host for host, _ in ins] == [host for _, host in outs]
    memory.check_integrity([parent, child])
    assert not memory.has_room(child), "the first write still copies"


def test_a_group_that_finds_no_room_in_host_memory_stays_as_it_is():
    memory = make(num_swap_blocks=1)
    sequence = make_sequence(range(6))
    compute(memory, sequence)
    before = list(sequence.block_ids)
    assert not memory.swap.out([sequence], {})
    assert sequence.block_ids == before
    assert memory.transfers.take() is None
    memory.check_integrity([sequence])


def test_blocks_that_the_prefix_index_still_has_come_back_without_a_copy():
    memory = make()
    sequence = make_sequence(range(10))
    compute(memory, sequence)
    before = list(sequence.block_ids)
    assert memory.swap.out([sequence], {})
    assert memory.swap.back([sequence]) == 2
    assert sequence.block_ids[:2] == before[:2]
    _, ins = taken(memory)
    assert len(ins) == 1, "the last block is not full: nobody but the host has it"


def test_a_copy_that_was_only_planned_leaves_as_its_source():
    memory = make(enable_prefix_caching=False)
    parent, child = make_sequence(range(6), n=2), make_sequence(range(6), n=2)
    compute(memory, parent)
    fork(memory, parent, child, 6)
    parent.row, child.row = 0, 1
    delta = TableDelta()
    assert memory.allocate(child, 7, delta)
    assert child.block_ids[1] != parent.block_ids[1]
    origins = delta.take_back([child])
    assert not delta.rows
    assert not delta.copy_targets
    assert memory.swap.out([child], origins)
    outs, _ = taken(memory)
    assert [block for block, _ in outs] == parent.block_ids


def test_a_sequence_that_ends_while_it_is_away_gives_its_host_blocks_back():
    memory = make()
    sequence = make_sequence(range(6))
    compute(memory, sequence)
    assert memory.swap.out([sequence], {})
    memory.release(sequence)
    assert memory.swap.hosts.num_used == 0
    memory.check_integrity([sequence])


def test_a_lost_host_block_is_noticed():
    memory = make()
    sequence = make_sequence(range(6))
    compute(memory, sequence)
    assert memory.swap.out([sequence], {})
    sequence.host_block_ids.pop()
    with pytest.raises(RuntimeError, match="host block 2 has 1 references but 0 holders"):
        memory.check_integrity([sequence])
