"""Block tables: shared, copied on write, found again, given back."""

import pytest

from quire.core.request import Request, Sequence, ints
from quire.core.sampling import SamplingParams
from quire.memory.paged import PagedMemory, TableDelta


def make_sequence(token_ids, salt="", adapter=None, **sampling):
    request = Request(
        "r", tuple(token_ids), SamplingParams(**sampling), 0, 64, cache_salt=salt, adapter=adapter
    )
    return Sequence(request, 0, token_ids=ints(token_ids))


def compute(memory, sequence):
    """Runs the whole prompt at once, as a step and its commit would."""
    sequence.num_computed = memory.match_prefix(sequence)
    delta = TableDelta()
    assert memory.allocate(sequence, len(sequence.token_ids), delta)
    sequence.num_computed = len(sequence.token_ids)
    memory.cache_full_blocks(sequence, sequence.num_computed)
    return delta


def fork(memory, parent, child, num_computed):
    """As the scheduler does: memory gives the blocks, the scheduler counts what is computed."""
    memory.fork(parent, child, num_computed)
    child.num_computed = num_computed


def test_a_prompt_computed_before_is_found_block_by_block():
    memory = PagedMemory(16, 4)
    first, second = make_sequence(range(10)), make_sequence([*range(8), 50, 51])
    compute(memory, first)
    assert memory.match_prefix(second) == 8
    assert second.block_ids == first.block_ids[:2]
    memory.check_integrity([first, second])


def test_the_last_token_is_always_computed_because_its_logits_are_wanted():
    memory = PagedMemory(16, 4)
    compute(memory, make_sequence(range(8)))
    assert memory.match_prefix(make_sequence(range(8))) == 4


@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"adapter": "lora"}])
def test_another_salt_or_adapter_never_meets_these_blocks(other):
    memory = PagedMemory(16, 4)
    compute(memory, make_sequence(range(12)))
    assert memory.match_prefix(make_sequence(range(12), **other)) == 0


def test_salt_and_adapter_cannot_be_confused_for_one_another():
    memory = PagedMemory(16, 4)
    compute(memory, make_sequence(range(12), salt="a"))
    assert memory.match_prefix(make_sequence(range(12), adapter="a")) == 0


def test_a_freed_prefix_is_found_until_its_blocks_are_needed():
    memory = PagedMemory(4, 4)
    first = make_sequence(range(9))
    compute(memory, first)
    memory.release(first)
    again = make_sequence(range(9))
    assert memory.match_prefix(again) == 8
    memory.release(again)
    compute(memory, make_sequence(range(30, 46)))  # takes every block
    assert memory.match_prefix(make_sequence(range(9))) == 0


def test_eviction_takes_the_end_of_a_prefix_before_its_beginning():
    memory = PagedMemory(4, 4)
    first = make_sequence(range(16))
    compute(memory, first)
    memory.release(first)
    compute(memory, make_sequence([40, 41, 42]))
    assert memory.match_prefix(make_sequence(range(17))) == 12


def test_a_fork_shares_every_block_and_copies_only_the_one_it_writes():
    memory = PagedMemory(16, 4)
    parent = make_sequence(range(10))
    compute(memory, parent)
    child = make_sequence(range(10))
    fork(memory, parent, child, parent.num_computed)
    assert child.block_ids == parent.block_ids
    delta = TableDelta()
    assert memory.allocate(child, 11, delta)
    assert (delta.copy_sources, delta.copy_targets) == ([parent.block_ids[2]], [child.block_ids[2]])
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.block_ids[2] != parent.block_ids[2]
    delta = TableDelta()
    assert memory.allocate(parent, 11, delta)
    assert not delta.copy_sources
    memory.check_integrity([parent, child])


def test_growth_that_cannot_be_granted_changes_nothing():
    memory = PagedMemory(3, 4)
    sequence = make_sequence(range(8))
    compute(memory, sequence)
    before, delta = list(sequence.block_ids), TableDelta()
    assert not memory.allocate(sequence, 17, delta)
    assert sequence.block_ids == before
    assert not delta.blocks
    assert memory.num_free == 1


def test_blocks_of_one_position_waste_nothing():
    memory = PagedMemory(10, 1)
    sequence = make_sequence(range(7))
    compute(memory, sequence)
    assert len(sequence.block_ids) == 7


def test_prompt_logprobs_ask_for_every_position_so_nothing_is_reused():
    memory = PagedMemory(16, 4)
    compute(memory, make_sequence(range(12)))
    assert memory.match_prefix(make_sequence(range(12), prompt_logprobs=0)) == 0


def test_integrity_check_sees_a_leak():
    memory = PagedMemory(8, 4)
    compute(memory, make_sequence(range(9)))
    with pytest.raises(RuntimeError, match="references but 0 holders"):
        memory.check_integrity([])


def test_resetting_the_index_forgets_content_but_keeps_tables():
    memory = PagedMemory(8, 4)
    sequence = make_sequence(range(9))
    compute(memory, sequence)
    memory.reset_prefix_index()
    assert memory.match_prefix(make_sequence(range(9))) == 0
    memory.check_integrity([sequence])
