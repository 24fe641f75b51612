"""What happens to those who must leave: swapped or computed again, back in order, and who may enter meanwhile."""

import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import ConfigError
from quire.memory.paged import PagedMemory
from quire.scheduler.pacing import PromptSpeed
from quire.scheduler.preemption import Preemption
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import request, step


def make(num_blocks=6, num_swap_blocks=16, **config):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "preemption_mode": "swap", **config}
    memory = PagedMemory(num_blocks, 4, num_swap_blocks=num_swap_blocks, enable_prefix_caching=False)
    return Scheduler(SchedulerConfig(**settings), memory)


def run_until_preempted(scheduler):
    while not scheduler.stats.num_preemptions:
        assert step(scheduler)


def test_a_swapped_request_computes_nothing_twice():
    scheduler = make()
    scheduler.add(request("a", 8, max_tokens=12))
    scheduler.add(request("b", 8, max_tokens=8, first=40))
    computed = {"a": 0, "b": 0}
    while scheduler.has_work:
        for name, count in step(scheduler):
            computed[name] += count
    assert scheduler.stats.num_swaps_out == scheduler.stats.num_swaps_in == 1
    assert computed == {"a": 19, "b": 15}  # the last token's K and V are never needed
    assert scheduler.memory.num_free == 6
    assert scheduler.memory.swap.hosts.num_used == 0


def test_without_room_in_host_memory_it_is_computed_again():
    scheduler = make(num_swap_blocks=1)
    scheduler.add(request("a", 8, max_tokens=12))
    scheduler.add(request("b", 8, max_tokens=8, first=40))
    run_until_preempted(scheduler)
    assert scheduler.stats.num_swaps_out == 0
    assert scheduler.waiting.peek().sequences[0].num_computed == 0


@pytest.mark.parametrize(("admit_after", "enters"), [("resumed", True), ("completed", False)])
def test_new_requests_wait_for_those_that_had_to_leave(admit_after, enters):
    scheduler = make(num_blocks=9, admit_after=admit_after)
    scheduler.add(request("a", 16, max_tokens=12))
    scheduler.add(request("b", 8, max_tokens=16, first=40))
    run_until_preempted(scheduler)
    scheduler.add(request("new", 1, max_tokens=1, first=80))
    seen = []
    while scheduler.has_request("b"):
        seen += [name for name, _ in step(scheduler)]
        group = scheduler.waiting.peek()
        if group is not None and group.request.request_id == "b":
            assert "new" not in seen, "nobody passes the one who waits to come back"
    assert ("new" in seen) == enters
    while scheduler.has_work:
        assert step(scheduler)


def test_of_two_that_left_the_first_to_arrive_comes_back_first():
    scheduler = make(num_blocks=9)
    for i, name in enumerate("abc"):
        scheduler.add(request(name, 8, max_tokens=20, first=1 + 40 * i))
    while scheduler.stats.num_preemptions < 2:
        assert step(scheduler)
    assert scheduler.waiting.peek().request.request_id == "b"
    while scheduler.has_work:
        assert step(scheduler)


def test_auto_weighs_the_link_against_the_prompt_speed():
    memory = PagedMemory(8, 4, num_swap_blocks=8, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    scheduler.add(request("a", 16))
    step(scheduler)
    for block_seconds, swaps in ((1.0, False), (0.01, True)):
        preemption = Preemption("auto", block_seconds)
        preemption.speed.note(10, 1.0)  # a tenth of a second per token, so 0.4 per block
        assert preemption.swaps(scheduler.running, memory) == swaps
    assert not Preemption("recompute").swaps(scheduler.running, memory)


def test_auto_computes_again_what_the_prefix_index_gives_back_for_nothing():
    memory = PagedMemory(16, 4, num_swap_blocks=8)
    scheduler = Scheduler(SchedulerConfig(8, 64), memory)
    for name in "ab":  # both hold the same four blocks
        scheduler.add(request(name, 17, max_tokens=4))
        step(scheduler)
        for sequence in scheduler.running:
            memory.cache_full_blocks(sequence, sequence.num_computed)
    preemption = Preemption("auto", 0.1)
    preemption.speed.note(10, 1.0)
    assert preemption.swaps(scheduler.running, memory), "all of it is lost when both leave"
    assert not preemption.swaps(scheduler.running[1:], memory)


def test_blocks_of_the_second_home_are_fetched_where_that_is_quicker_than_computing():
    memory = PagedMemory(8, 4)
    for seconds, pays in ((0.39, True), (0.41, False)):
        preemption = Preemption("auto", seconds)
        assert preemption.fetching_pays(memory), "nothing is known yet"
        preemption.speed.note(10, 1.0)  # a block of four tokens takes 0.4 s
        assert preemption.fetching_pays(memory) == pays


def test_the_prompt_speed_is_the_slope_where_steps_differ_in_size():
    speed = PromptSpeed()
    assert speed.token_seconds == 0.0
    for tokens in (8, 64, 512, 8, 256):
        speed.note(tokens, 0.02 + 0.001 * tokens)
    assert speed.token_seconds == pytest.approx(0.001)


@pytest.mark.parametrize("settings", [{"preemption_mode": "swop"}, {"admit_after": "never"}])
def test_an_unknown_name_is_refused_with_those_that_are_known(settings):
    with pytest.raises(ConfigError, match="is not known: choose one of"):
        SchedulerConfig(**settings)
