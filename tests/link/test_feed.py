"""The engine's feed: what a page builds from its records is what a recount of the engine finds."""

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.link import feed as feeds
from quire.link.feed import EngineFeed, recount
from quire.memory.paged import PagedMemory
from tests.engine.page_runner import END, VOCABULARY, PageRunner
from tests.engine.test_engine_machine import EngineMachine
from tests.link.feed_mirror import FeedMirror


class FeedMachine(EngineMachine):
    """The engine under random arrivals, forks, beams, drafts, aborts and exhaustion, with a page that listens."""

    def build(self, *arguments, **options):
        super().build(*arguments, **options)
        self.mirror = FeedMirror()
        self.feed = EngineFeed(self.engine, self.mirror.take)
        self.feed.start()

    @rule()
    def forget_prefixes(self):
        self.memory.reset_prefix_index()
        self.feed.restart()

    @invariant()
    def the_map_is_true(self):
        if not hasattr(self, "feed"):
            return
        data = self.feed.record(0.0)
        if data is not None:
            self.mirror.take(data)
        assert self.mirror.counts == recount(self.engine)
        tables = {
            (s.request.request_id, s.index): s.block_ids
            for s in self.engine.scheduler.sequences()
            if s.block_ids
        }
        shown = {(s["id"], s["index"]): s["table"] for s in self.mirror.sequences.values() if s["table"]}
        assert shown == tables


TestFeedMachine = FeedMachine.TestCase
TestFeedMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def make_engine(num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 16) -> Engine:
    memory = PagedMemory(num_blocks, block_size)
    runner = PageRunner(num_blocks, block_size)
    limits = Limits(VOCABULARY, 256, max_num_seqs, (END,))
    return Engine(SchedulerConfig(max_num_seqs, 64), limits, memory, runner)


def sampling(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched():
    engine, mirror, clock = make_engine(), FeedMirror(), Clock()
    feed = EngineFeed(engine, mirror.take, clock)
    feed.start()
    return engine, feed, mirror, clock


def run(engine: Engine, feed: EngineFeed, clock: Clock, steps: int = 1000) -> None:
    while engine.has_work and steps:
        engine.step()
        clock.now += 1.0
        feed.publish()
        steps -= 1


def test_answers_to_one_prompt_share_its_blocks_until_they_write(watched):
    engine, feed, mirror, clock = watched
    engine.add(Request("four", [7] * 10, sampling(n=4)))
    run(engine, feed, clock, 4)
    assert len(mirror.sequences) == 4
    assert mirror.counts["shared"] == 2  # two full blocks of the prompt; of the third each has its own
    assert mirror.references(mirror.sequences[0]["table"][0]) == 4
    assert mirror.events["copied"] == 3
    assert mirror.counters["copies"] == 3
    run(engine, feed, clock)
    assert mirror.sequences == {}
    assert mirror.counts == recount(engine)


def test_a_repeated_prompt_shows_its_hit_and_a_full_pool_its_evictions(watched):
    engine, feed, mirror, clock = watched
    engine.add(Request("first", [7] * 17, sampling(4)))
    run(engine, feed, clock)
    assert mirror.counts["cached"] == 5
    engine.add(Request("second", [7] * 17, sampling(4)))
    run(engine, feed, clock)
    assert mirror.events["hits"] == 4
    for number in range(8):
        engine.add(Request(f"other {number}", [number + 1] * 30, sampling(8)))
    run(engine, feed, clock)
    assert mirror.events["evicted"] > 0
    assert mirror.counters["evictions"] == mirror.events["evicted"]
    assert mirror.counts == recount(engine)


def test_steps_are_listed_with_their_rows_by_phase(watched):
    engine, feed, mirror, clock = watched
    engine.add(Request("a", [7] * 10, sampling(3)))
    engine.add(Request("b", [5] * 6, sampling(3)))
    run(engine, feed, clock)
    _step, _ms, prefill_rows, prefill_tokens, decodes, verified, _tokens = mirror.steps[0]
    assert (prefill_rows, prefill_tokens, decodes, verified) == (2, 16, 0, 0)
    assert mirror.steps[1][2:5] == [0, 0, 2]
    assert mirror.record["queue"] == [0, 0]


def test_at_most_ten_records_a_second_and_the_last_one_comes_late(watched):
    engine, feed, mirror, clock = watched
    engine.add(Request("a", [7] * 10, sampling(24)))
    before = mirror.num_records
    while engine.has_work:
        engine.step()
        clock.now += 0.01
        feed.publish()
    assert mirror.num_records - before <= 3  # in 0.25 seconds
    assert mirror.counts != recount(engine)
    clock.now += feed.due_in()
    feed.publish()
    assert feed.due_in() is None
    assert mirror.counts == recount(engine)
    feed.publish()
    clock.now += 1
    assert feed.record(clock.now) is None  # nothing is said twice


def test_a_long_record_delays_the_next(monkeypatch):
    monkeypatch.setattr(feeds, "BYTES_PER_SECOND", 500)
    engine, clock, sizes = make_engine(), Clock(), []
    feed = EngineFeed(engine, lambda data: sizes.append(len(data)), clock)
    feed.start()
    for number in range(16):
        engine.add(Request(f"request {number}", [number] * 12, sampling(200)))
    while clock.now < 20:
        engine.step()
        clock.now += 0.01
        feed.publish()
    assert sum(sizes[:-1]) / 20 < 510


def test_a_table_that_is_too_long_for_one_record_is_sent_in_parts(monkeypatch):
    monkeypatch.setattr(feeds, "MAX_TABLE_ENTRIES", 5)
    engine, mirror, clock = make_engine(), FeedMirror(), Clock()
    engine.add(Request("long", [7] * 60, sampling(100)))
    engine.step()
    engine.step()
    feed = EngineFeed(engine, mirror.take, clock)
    feed.start()
    assert len(mirror.sequences[0]["table"]) == 5
    for _ in range(4):
        clock.now += 1
        feed.publish()
    assert mirror.sequences[0]["table"] == next(engine.scheduler.sequences()).block_ids


def test_nothing_is_noted_when_nothing_listens(watched):
    engine, feed, mirror, clock = watched
    feed.stop()
    engine.add(Request("a", [7] * 10, sampling(30)))
    before = mirror.num_records
    run(engine, feed, clock)
    assert engine.memory.pool.changed is None
    assert feed.due_in() is None
    assert mirror.num_records == before
    feed.start()
    assert mirror.counts == recount(engine)


def test_a_pool_of_fifty_thousand_blocks_fits_a_short_record():
    engine, sizes = make_engine(50_000, 16), []
    feed = EngineFeed(engine, lambda data: sizes.append(len(data)))
    feed.start()
    assert sizes[0] < 1000
    assert json.loads(feed.record(0.0) or b"null") is None
