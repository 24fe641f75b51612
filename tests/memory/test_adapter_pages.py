"""Adapters and K and V in one pool: whoever needs a block takes the least recently used one."""

import random

import pytest

from quire.core.request import Request, Sequence, ints
from quire.core.sampling import SamplingParams
from quire.memory.paged import PagedMemory, TableDelta


def _sequence(tokens: list[int], adapter: str | None = None) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(), 0, max_len=1000, adapter=adapter)
    return Sequence(request, 0, ints(tokens))


def test_an_idle_adapter_is_evicted_when_k_and_v_need_its_pages_and_the_other_way_round():
    memory = PagedMemory(10, 4)
    pages = memory.adapter_pages
    pages.load("old", 4, "s1")
    pages.load("new", 4, "s2")
    assert memory.num_free == 10  # idle ones cost nothing
    pages.acquire("new")
    assert memory.num_free == 6
    sequence = _sequence(list(range(24)))
    assert memory.allocate(sequence, 24, TableDelta())
    assert pages.take_evicted() == ("old",)
    assert pages.is_resident("new")
    assert not memory.allocate(sequence, 28, TableDelta())  # one in use is never taken
    memory.check_integrity([sequence])
    memory.release(sequence)
    pages.load("third", 6, "s3")
    pages.release("new")
    memory.check_integrity([])
    assert memory.num_free == 10


def test_a_prefix_is_found_only_under_the_content_that_computed_it():
    memory = PagedMemory(20, 4)
    pages = memory.adapter_pages
    pages.load("a@1", 1, "content one")
    pages.load("a@2", 1, "content two")
    pages.load("b@3", 1, "content one")
    first = _sequence(list(range(9)), "a@1")
    memory.allocate(first, 9, TableDelta())
    memory.cache_full_blocks(first, 9)
    assert memory.match_prefix(_sequence(list(range(9)), "a@2")) == 0
    assert memory.match_prefix(_sequence(list(range(9)))) == 0
    assert memory.match_prefix(_sequence(list(range(9)), "b@3")) == 8  # the same content under another name


@pytest.mark.parametrize("seed", range(5))
def test_every_page_is_accounted_for_whatever_happens(seed):
    random_ = random.Random(seed)
    memory = PagedMemory(40, 4)
    pages = memory.adapter_pages
    sequences: list[Sequence] = []
    users: list[str] = []
    for _ in range(2000):
        action = random_.random()
        key = f"a{random_.randrange(12)}"
        if action < 0.3:
            if not pages.is_resident(key):
                size = 1 + int(key[1:]) % 5
                if pages.has_room(size, 0):
                    pages.load(key, size, key)
            if pages.is_resident(key):
                pages.acquire(key)
                users.append(key)
        elif action < 0.5 and users:
            pages.release(users.pop(random_.randrange(len(users))))
        elif action < 0.8:
            sequence = _sequence([random_.randrange(3) for _ in range(random_.randrange(1, 30))])
            memory.match_prefix(sequence)
            if memory.allocate(sequence, len(sequence.token_ids), TableDelta()):
                memory.cache_full_blocks(sequence, len(sequence.token_ids))
                sequences.append(sequence)
            else:
                memory.release(sequence)
        elif sequences:
            memory.release(sequences.pop(random_.randrange(len(sequences))))
        else:
            pages.drop(key)
        memory.check_integrity(sequences)
        pages.take_evicted()
