"""Who runs when: order of arrival, budgets, preemption, forks."""

from dataclasses import replace

import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import QueueFull
from quire.core.request import FinishReason, Phase, Request
from quire.core.sampling import SamplingParams
from quire.memory.paged import PagedMemory
from quire.scheduler.running import AdmissionPolicy
from quire.scheduler.scheduler import Scheduler


def make(num_blocks=64, block_size=4, **config):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
    return Scheduler(SchedulerConfig(**settings), PagedMemory(num_blocks, block_size))


def request(name, length=8, max_tokens=8, first=1, **sampling):
    tokens = tuple(range(first, first + length))
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, **sampling), 0, length + max_tokens)


def step(scheduler, token=99):
    """Schedules and commits one step at once; returns who advanced by how much."""
    planned = scheduler.schedule()
    if planned is None:
        return []
    scheduler.committed(planned)
    for sequence in planned.receivers:
        sequence.token_ids.append(token)
        if len(sequence.token_ids) >= sequence.request.max_len:
            scheduler.finish(sequence, FinishReason.LENGTH)
    return [
        (s.request.request_id, n) for s, n in zip(planned.sequences, planned.step.num_tokens, strict=True)
    ]


def test_prompts_are_cut_to_the_token_budget_and_decodes_come_first():
    scheduler = make(max_num_batched_tokens=10)
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 20, first=40))
    assert step(scheduler) == [("a", 6), ("b", 4)]
    assert step(scheduler) == [("a", 1), ("b", 9)]
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 1)]


def test_rows_bound_how_many_run_and_the_rest_wait_in_order():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 4, max_tokens=2))
    assert [name for name, _ in step(scheduler)] == ["a", "b"]
    assert [name for name, _ in step(scheduler)] == ["a", "b"]
    assert [name for name, _ in step(scheduler)] == ["c"]


def test_a_prompt_that_does_not_fit_holds_back_those_behind_it():
    scheduler = make(num_blocks=8)
    scheduler.add(request("a", 16, max_tokens=4))
    scheduler.add(request("big", 20, max_tokens=4, first=40))
    scheduler.add(request("small", 2, max_tokens=4, first=90))
    assert step(scheduler) == [("a", 16)]
    assert step(scheduler) == [("a", 1)]


def test_the_last_to_arrive_is_preempted_and_returns_before_newcomers():
    scheduler = make(num_blocks=6, max_num_batched_tokens=64)
    scheduler.add(request("a", 8, max_tokens=12))
    scheduler.add(request("b", 8, max_tokens=8, first=40))
    for _ in range(9):
        step(scheduler)
    assert scheduler.stats.num_preemptions == 1
    scheduler.add(request("c", 1, first=80))
    group = scheduler.waiting.peek()
    assert group.request.request_id == "b"
    assert group.sequences[0].phase is Phase.WAITING
    while scheduler.has_work:
        assert step(scheduler)
    assert scheduler.memory.num_free == 6


def test_a_full_queue_refuses_with_the_number_and_the_setting():
    scheduler = make(max_queue_requests=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(QueueFull, match=r"2 requests are waiting already.*max_queue_requests"):
        scheduler.add(request("c"))


def test_a_queue_bounded_by_tokens_refuses_too():
    scheduler = make(max_queue_tokens=10)
    scheduler.add(request("a", 8))
    with pytest.raises(QueueFull, match="8 prompt tokens are waiting and 8 more would pass 10"):
        scheduler.add(request("b", 8))


@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_moment_gives_everything_back(steps):
    scheduler = make(num_blocks=8, max_num_batched_tokens=5)
    scheduler.add(request("a", 12, n=2))
    scheduler.add(request("b", 4, first=50))
    for _ in range(steps):
        step(scheduler)
    assert scheduler.abort("a")
    assert scheduler.abort("b")
    assert not scheduler.has_work
    assert not len(scheduler.waiting)
    assert scheduler.memory.num_free == 8


def test_samples_of_one_request_share_the_prompt_and_start_from_one_pass():
    scheduler = make()
    scheduler.add(request("a", 8, n=3))
    planned = scheduler.schedule()
    assert list(planned.step.num_tokens) == [8]
    assert list(planned.step.sample_sources) == [0, 0, 0]
    assert len(set(planned.step.sample_rows)) == 3
    assert scheduler.memory.num_blocks - scheduler.memory.num_free == 2


def test_rows_for_forks_are_kept_free_while_the_prompt_is_chunked():
    scheduler = make(max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(request("a", 12, n=3))
    scheduler.add(request("b", 1, first=40))
    scheduler.add(request("c", 1, first=50))
    assert step(scheduler) == [("a", 6)]
    assert step(scheduler) == [("a", 6)]
    assert [name for name, _ in step(scheduler)] == ["a", "a", "a", "b"]


def test_one_stopped_sample_leaves_its_siblings_running():
    scheduler = make()
    scheduler.add(request("a", 8, n=3))
    step(scheduler)
    assert scheduler.stop("a", 1)
    assert not scheduler.stop("a", 1)
    assert [name for name, _ in step(scheduler)] == ["a", "a"]


def test_a_committed_step_is_no_longer_pending_and_its_full_blocks_are_cached():
    scheduler = make()
    scheduler.add(request("a", 9))
    planned = scheduler.schedule()
    (sequence,) = planned.receivers
    assert (sequence.num_computed, sequence.num_pending) == (9, 1)
    scheduler.committed(planned)
    assert sequence.num_pending == 0
    assert sequence.num_indexed == 2  # of three blocks the last is not full
    scheduler.add(request("b", 9))
    assert scheduler.schedule().step.num_computed[-1] == 8


def test_blocks_of_a_step_with_invalid_results_are_not_cached():
    scheduler = make()
    scheduler.add(request("a", 9))
    planned = scheduler.schedule()
    scheduler.committed(planned, is_valid=False)
    assert planned.receivers[0].num_pending == 0
    assert planned.receivers[0].num_indexed == 0


def test_only_a_running_sequence_is_rewound():
    scheduler = make()
    scheduler.add(request("a", 9))
    (sequence,) = scheduler.schedule().receivers
    scheduler.rewind(sequence, 7)
    assert sequence.num_computed == 7
    scheduler.abort("a")
    scheduler.rewind(sequence, 5)
    assert sequence.num_computed == 0


class OnePerStep(AdmissionPolicy):
    """A policy of a few lines: one group per step, and nothing else changes."""

    def room(self, waiting, running):
        return min(1, len(waiting))


def test_an_admission_policy_says_how_many_groups_join():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    scheduler = Scheduler(config, PagedMemory(64, 4), policy=OnePerStep())
    for i, name in enumerate("abc"):
        scheduler.add(request(name, 4, first=1 + 10 * i))
    assert [len(step(scheduler)) for _ in range(4)] == [1, 2, 3, 3]


@pytest.mark.parametrize("num_stops", [0, 1, 3, 4, 1000])
def test_beams_ask_for_candidates_by_their_number_and_not_by_their_stop_tokens(num_stops):
    scheduler = make()
    stops = frozenset(range(100, 100 + num_stops))
    asked = request("a", n=4, best_of=8, use_beam_search=True)
    scheduler.add(replace(asked, stop_token_ids=stops))
    (beams,) = scheduler.schedule().step.beams
    assert beams.num_candidates == {0: 16, 1: 16, 3: 32}.get(num_stops, 16)
    assert beams.stop_token_ids == (stops if num_stops > 3 else frozenset())


def test_stages_of_a_pipeline_get_equal_shares_of_the_decodes_and_no_sequence_twice():
    scheduler = make(max_num_seqs=8, steps_in_flight=3, max_num_batched_tokens=64)
    for i, name in enumerate("abcdefg"):
        scheduler.add(request(name, 4, first=1 + 10 * i))
    in_flight = [scheduler.schedule()]  # all prompts
    assert scheduler.schedule() is None  # their tokens are on the way
    seen = []
    for _ in range(6):
        done = in_flight.pop(0)
        scheduler.committed(done)
        for sequence in done.receivers:
            sequence.token_ids.append(99)
        while len(in_flight) < 3 and (planned := scheduler.schedule()) is not None:
            in_flight.append(planned)
        seen.append([len(planned.sequences) for planned in in_flight])
        names = [s.request.request_id for planned in in_flight for s in planned.sequences]
        assert len(names) == len(set(names)) == 7
    assert seen == [[3, 3, 1], [3, 1, 3], [1, 3, 3], [3, 3, 1], [3, 1, 3], [1, 3, 3]]


def test_a_long_prompt_of_a_pipeline_may_be_in_several_steps():
    scheduler = make(steps_in_flight=3, max_num_batched_tokens=8)
    scheduler.add(request("long", 24))
    chunks = [scheduler.schedule() for _ in range(3)]
    assert [(c.step.num_computed[0], c.step.num_tokens[0]) for c in chunks] == [(0, 8), (8, 8), (16, 8)]
    assert scheduler.schedule() is None
