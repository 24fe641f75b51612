"""Memory reserved up front: contiguous runs, first fit, nothing shared, gaps that nobody can use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import Request, Sequence, ints
from quire.core.sampling import SamplingParams
from quire.memory.paged import TableDelta
from quire_lab.baselines.contiguous_pool import BlockRun, ContiguousPool
from quire_lab.baselines.memory_usage import external_fragmentation
from quire_lab.baselines.reserved_memory import ReservedMemory
from tests.memory.test_paged import fork


def make_sequence(num_prompt_tokens=4, max_tokens=8, **sampling):
    prompt = tuple(range(1, 1 + num_prompt_tokens))
    request = Request(
        "r", prompt, SamplingParams(max_tokens=max_tokens, **sampling), 0, num_prompt_tokens + max_tokens
    )
    return Sequence(request, 0, token_ids=ints(prompt))


def test_runs_are_the_first_that_fit_and_neighbours_join_again():
    pool = ContiguousPool(10)
    a, b, c = pool.take(3), pool.take(3), pool.take(4)
    assert [a, b, c] == [BlockRun(1, 3), BlockRun(4, 3), BlockRun(7, 4)]
    assert pool.take(1) is None
    pool.release(a)
    pool.release(c)
    assert pool.take(5) is None  # 7 are free, and no 5 of them together
    assert pool.take(4) == c
    pool.release(b)
    assert pool.gaps() == [BlockRun(1, 6)]
    with pytest.raises(RuntimeError, match="blocks 4 to 6 were released more often than taken"):
        pool.release(b)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_runs_never_overlap_and_nothing_is_lost(steps):
    pool, held = ContiguousPool(40), []
    for takes, number in steps:
        if takes:
            largest = max((gap.length for gap in pool.gaps()), default=0)
            run = pool.take(number)
            assert (run is None) == (largest < number)
            held += [run] if run else []
        elif held:
            pool.release(held.pop(number % len(held)))
        ids = sorted(i for run in (*held, *pool.gaps()) for i in run.ids())
        assert ids == list(range(1, 41))
        assert pool.num_free == 40 - sum(run.length for run in held)


@pytest.mark.parametrize(("reservation", "length"), [("max", 100), ("pow2", 10 + 32 - 1), ("oracle", 34)])
def test_each_kind_reserves_what_its_name_says(reservation, length):
    memory = ReservedMemory(500, reservation, max_model_len=100)
    leader = make_sequence(10, max_tokens=25)
    assert memory.admit(leader, 1)
    assert memory.num_blocks - memory.num_free == length == memory.blocks_at_most(leader.request)
    assert leader.block_ids == list(range(1, length + 1))  # in one piece
    memory.check_integrity([leader])
    memory.release(leader)
    assert memory.num_free == 500


def test_a_reservation_is_never_longer_than_the_context_or_the_pool():
    assert ReservedMemory(500, "pow2", 100).length(make_sequence(10, max_tokens=70).request) == 100
    assert ReservedMemory(64, "max", 100).length(make_sequence().request) == 64


def test_free_memory_in_pieces_is_external_fragmentation():
    memory = ReservedMemory(40, "oracle", 100)
    sequences = [make_sequence(3, max_tokens=8) for _ in range(4)]
    for sequence in sequences:
        assert memory.admit(sequence, 1)
    memory.release(sequences[0])
    memory.release(sequences[2])
    waiting = make_sequence(8, max_tokens=8)
    assert memory.num_free == 20 > 15
    assert not memory.admit(waiting, 1)
    assert external_fragmentation(memory, waiting.request) == 20
    assert external_fragmentation(memory, make_sequence(20, max_tokens=8).request) == 0  # there is too little
    assert memory.num_free == 20
    memory.check_integrity([sequences[1], sequences[3]])


def test_all_runs_of_a_request_or_none():
    memory = ReservedMemory(30, "oracle", 100)
    leader = make_sequence(4, max_tokens=8, n=3)
    assert memory.blocks_at_most(leader.request) == 33
    assert not memory.admit(leader, 3)
    assert memory.num_free == 30


def test_a_fork_copies_its_parents_positions_into_its_own_run():
    memory = ReservedMemory(40, "oracle", 100)
    leader = make_sequence(4, max_tokens=8, n=2)
    assert memory.admit(leader, 2)
    leader.num_computed, leader.row = 4, 0
    child = Sequence(leader.request, 1, token_ids=leader.token_ids[:], row=1)
    fork(memory, leader, child, 4)
    assert child.block_ids == [1, 2, 3, 4]
    assert not memory.has_room(child)
    memory.release(leader)  # its parent is gone before it could copy
    assert memory.num_free == 40 - 22
    memory.check_integrity([child])
    delta = TableDelta()
    assert memory.allocate(child, 5, delta)
    assert (delta.copy_sources, delta.copy_targets) == ([1, 2, 3, 4], [12, 13, 14, 15])
    assert delta.blocks == child.block_ids == list(range(12, 23))
    assert memory.num_free == 40 - 11
    assert memory.has_room(child)
    memory.check_integrity([child])


def test_a_leader_that_leaves_before_its_forks_takes_their_runs_along():
    memory = ReservedMemory(40, "oracle", 100)
    leader = make_sequence(4, max_tokens=8, n=3)
    assert memory.admit(leader, 3)
    memory.release(leader)
    assert memory.num_free == 40
