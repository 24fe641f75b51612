"""Who is admitted first and preempted first: fcfs, priority, shortest, fair."""

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import SchedulerConfig, SpeculativeConfig
from quire.core.errors import ConfigError
from quire.core.request import FinishReason, Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.speculation import Speculation
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire.scheduler import ordering
from quire.scheduler.ordering import AGEING, OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from quire.scheduler.queue import SequenceGroup
from quire.scheduler.scheduler import Scheduler
from tests.engine.page_runner import VOCABULARY, PageRunner
from tests.engine.random_proposer import RandomProposer


def make(schedule, num_blocks=256, block_size=4, **config):
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "schedule": schedule, **config}
    return Scheduler(SchedulerConfig(**settings), PagedMemory(num_blocks, block_size))


def request(name, length=4, max_tokens=4, tenant="", priority=0, first=1):
    tokens = tuple(range(first, first + length))
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(name, tokens, sampling, 0, length + max_tokens, tenant=tenant, priority=priority)


def step(scheduler):
    """Plans and commits one step; returns who ended."""
    planned = scheduler.schedule()
    if planned is None:
        return []
    scheduler.committed(planned)
    ended = []
    for sequence in planned.receivers:
        if scheduler.charge is not None:
            scheduler.charge(sequence)
        sequence.token_ids.append(99)
        if len(sequence.token_ids) >= sequence.request.max_len:
            scheduler.finish(sequence, FinishReason.LENGTH)
            ended.append(sequence.request.request_id)
    return ended


def order_of_ends(scheduler):
    ends = []
    for _ in range(2000):
        if not scheduler.has_work:
            return ends
        ends += step(scheduler)
    raise AssertionError("some request starves")


def test_lower_priorities_go_first_and_equals_in_order_of_arrival():
    scheduler = make("priority", max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0), ("c", -1), ("d", 0)):
        scheduler.add(request(name, priority=priority))
    assert order_of_ends(scheduler) == ["c", "b", "d", "a"]


def test_whoever_is_last_in_the_schedule_is_preempted_though_it_came_first():
    scheduler = make("priority", num_blocks=6)
    scheduler.add(request("later", 8, max_tokens=12, priority=5))
    step(scheduler)
    scheduler.add(request("sooner", 8, max_tokens=8, priority=1, first=40))
    for _ in range(6):
        step(scheduler)
    assert scheduler.stats.num_preemptions == 1
    assert [s.request.request_id for s in scheduler.running] == ["sooner"]
    assert order_of_ends(scheduler) == ["sooner", "later"]


def test_the_shortest_goes_first_and_nobody_is_overtaken_for_ever():
    scheduler = make("shortest", max_num_seqs=1)
    scheduler.add(request("long", 4, max_tokens=60))
    num_short = 12
    for number in range(num_short):
        scheduler.add(request(f"short {number}", 2, max_tokens=2))
    ends = order_of_ends(scheduler)
    assert ends.index("long") == pytest.approx((64 - 4) / AGEING, abs=1)
    assert ends.index("long") < num_short - 1


def test_fair_shares_a_flood_does_not_hold_up_another_tenant():
    scheduler = make("fair")
    for number in range(30):
        scheduler.add(request(f"flood {number}", tenant="a"))
    scheduler.add(request("single", tenant="b"))
    assert "single" in order_of_ends(scheduler)[:4]
    scheduler = make("fcfs")
    for number in range(30):
        scheduler.add(request(f"flood {number}", tenant="a"))
    scheduler.add(request("single", tenant="b"))
    assert order_of_ends(scheduler)[-1] == "single"


def test_fair_shares_are_of_tokens_not_of_requests():
    scheduler = make("fair", max_num_seqs=1)
    for number in range(8):
        scheduler.add(request(f"long {number}", 4, max_tokens=18, tenant="a"))  # 40 each
        scheduler.add(request(f"short {number}", 2, max_tokens=4, tenant="b"))  # 10 each
    ends = order_of_ends(scheduler)
    until = ends.index("short 7") + 1
    assert sum(name.startswith("long") for name in ends[:until]) in (2, 3)


def test_who_comes_back_after_a_pause_has_saved_nothing_up():
    scheduler = make("fair", max_num_seqs=1)
    for number in range(10):
        scheduler.add(request(f"a{number}", tenant="a"))
    for _ in range(12):
        step(scheduler)
    for number in range(10):
        scheduler.add(request(f"b{number}", tenant="b"))
    ends = order_of_ends(scheduler)
    assert abs(sum(name[0] == "b" for name in ends[:6]) - 3) <= 1


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 10)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals, num_rows=st.integers(1, 4), num_blocks=st.integers(8, 40))
def test_shares_with_requests_waiting_are_served_alike_and_all_finish(arrivals, num_rows, num_blocks):
    scheduler = make("fair", num_blocks=num_blocks, max_num_seqs=num_rows)
    queue = scheduler.waiting
    # what two shares can differ by: a prompt that is charged at once, and all that runs of one of them
    bound = 2 * max(12.0, OUTPUT_WEIGHT * num_rows * 10) + 12.0
    together: dict[tuple[str, str], float] = {}
    for number, (pause, tenant, length, max_tokens) in enumerate(arrivals):
        scheduler.add(request(str(number), length, max_tokens, tenant=tenant, first=number + 1))
        for _ in range(pause):
            step(scheduler)
            waiting = {group.request.tenant for group in queue}
            for pair in combinations("abc", 2):
                if waiting.issuperset(pair):
                    difference = queue.served(pair[0]) - queue.served(pair[1])
                    since = together.setdefault(pair, difference)
                    assert abs(difference - since) <= bound
                else:
                    together.pop(pair, None)
    assert len(order_of_ends(scheduler)) <= len(arrivals)
    assert not scheduler.has_work
    assert not len(queue)
    assert queue.num_tokens == 0


@pytest.mark.parametrize("schedule", ["fcfs", "priority", "shortest", "fair"])
def test_those_who_leave_a_queue_leave_nothing_behind(schedule):
    scheduler = make(schedule, max_num_seqs=1)
    for number in range(6):
        scheduler.add(request(f"r{number}", tenant=str(number % 2), priority=-number))
    step(scheduler)
    for number in range(6):
        scheduler.abort(f"r{number}")
    assert scheduler.waiting.peek() is None
    assert list(scheduler.waiting) == []
    assert (len(scheduler.waiting), scheduler.waiting.num_tokens) == (0, 0)


def test_accounts_of_tenants_who_left_are_closed(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_SHARES", 8)
    queue = FairQueue(100, None)
    for number in range(50):
        group = SequenceGroup(request(f"r{number}", tenant=f"t{number}"), number)
        queue.add(group)
        assert queue.pop() is group
    assert len(queue._shares) <= 9


def test_shares_may_be_of_anything_a_request_has():
    queue = FairQueue(100, None, share_of=lambda one: one.adapter or "")
    for number in range(4):
        group = SequenceGroup(request(f"r{number}", tenant="same"), number)
        queue.add(group)
    assert [queue.pop().order for _ in range(4)] == [0, 1, 2, 3]


def test_an_unknown_schedule_is_one_clear_line():
    with pytest.raises(ConfigError, match="schedule='lifo' is not known: choose one of fcfs, priority"):
        SchedulerConfig(schedule="lifo")


@pytest.mark.parametrize("acceptance_rate", [0.0, 0.9])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_share_pays_for_the_tokens_that_it_got_and_not_for_rejected_drafts(acceptance_rate, in_flight):
    class DraftsOfOneTenant(RandomProposer):
        def can_draft(self, sequence):
            return sequence.request.tenant == "drafts"

    speculative = SpeculativeConfig("ngram", 4, adaptive=False)
    engine = Engine(
        SchedulerConfig(4, 64, schedule="fair", steps_in_flight=in_flight),
        Limits(VOCABULARY, 64, 4, ()),
        PagedMemory(60, 4, "test"),
        PageRunner(60, 4),
        make_speculation=partial(Speculation, speculative, DraftsOfOneTenant(acceptance_rate), 4),
    )
    for tenant in ("drafts", "plain"):
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.add(Request(tenant, [1, 2, 3], sampling, tenant=tenant))
    while engine.has_work:
        engine.step()
    assert engine.draft_stats.num_draft_tokens > engine.draft_stats.num_accepted_tokens
    expected = 3 * PROMPT_WEIGHT + 40 * OUTPUT_WEIGHT
    assert [engine.scheduler.waiting.served(name) for name in ("drafts", "plain")] == [expected] * 2
