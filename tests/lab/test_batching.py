"""When requests start and what becomes of their rows: continuous, static and dynamic batching."""

from collections import deque

import pytest

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.core.request import Request, ints
from quire.core.sampling import SamplingParams
from quire.core.step import StepResult
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire_lab.baselines.timeline import Timeline
from quire_lab.simulate.clock import VirtualClock

END = 0
# name: tokens of the prompt, and where its END stands; as in the drawing that everybody knows
CLASSIC = {"S1": (4, 6), "S2": (3, 8), "S3": (4, 5), "S4": (5, 7), "S5": (2, 9), "S6": (3, 9), "S7": (2, 9)}


class LengthRunner:
    """Answers with tokens of no meaning, and with END where a request's END stands. Its rows know only positions."""

    def __init__(self, lengths):
        self.lengths = lengths  # by the first token of the prompt
        self.rows = {}
        self.launched = deque()

    def launch(self, step):
        for start in step.starts:
            self.rows[start.row] = self.lengths[start.token_ids[0]]
        tokens = []
        for source, row in zip(step.sample_sources, step.sample_rows, strict=True):
            length = step.num_computed[source] + step.num_tokens[source] + 1
            tokens.append(END if length >= self.rows[row] else 7)
        self.launched.append(StepResult(step.step_id, ints(tokens)))

    def collect(self):
        return self.launched.popleft()

    def close(self):
        self.launched.clear()


def make(requests=CLASSIC, num_rows=4, clock=None, **settings):
    """An engine whose steps compute a token of each row, and its time line."""
    config = SchedulerConfig(num_rows, 64, max_prompt_chunk=1, **settings)
    lengths = {10 + i: length for i, (_, length) in enumerate(requests.values())}
    memory = PagedMemory(64, 4, enable_prefix_caching=False)
    clock = clock or VirtualClock()
    engine = Engine(config, Limits(99, 32, num_rows, (END,)), memory, LengthRunner(lengths), clock=clock)
    return engine, Timeline.watch(engine)


def add(engine, requests=CLASSIC, names=None):
    for i, (name, (num_prompt_tokens, _)) in enumerate(requests.items()):
        if names is None or name in names:
            engine.add(Request(name, [10 + i] * num_prompt_tokens, SamplingParams(max_tokens=20)))


def run(engine):
    ends = {}
    for count in range(200):
        if not engine.has_work:
            break
        for update in engine.step():
            if update.finish_reason:
                ends[update.request_id] = count
        engine.check_integrity()
    assert not engine.has_work
    assert engine.memory.num_free == engine.memory.num_blocks
    return ends


def places(timeline):
    """By name: (T, row), both counted from 1 as the drawing does."""
    return {name: (step + 1, row + 1) for (name, _), (step, row) in timeline.admissions().items()}


def occupants(timeline, moment):
    return [(one.request_id, one.kind) for one in timeline.steps[moment - 1].rows]


def test_continuous_batching_replays_the_classic_drawing():
    # each T is one step; the step in flight while END is read is the one that computes END
    engine, timeline = make(steps_in_flight=1)
    add(engine)
    run(engine)
    started = places(timeline)
    assert [started[name] for name in ("S1", "S2", "S3", "S4")] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert started["S6"] == (7, 1)
    assert started["S5"] == (6, 3)
    assert started["S7"] == (8, 4)
    last = {}
    for moment, step in enumerate(timeline.steps, 1):
        last.update({one.request_id: moment for one in step.rows})
    assert [last[name] for name in ("S1", "S2", "S3", "S4")] == [6, 8, 5, 7]
    assert timeline.num_tokens()["ended"] == 0


def test_static_batching_keeps_rows_that_ended_and_their_computation_until_the_batch_ends():
    engine, timeline = make(steps_in_flight=1, batching="static")
    add(engine)
    run(engine)
    assert occupants(timeline, 5) == [(name, "decode") for name in ("S1", "S2")] + [
        ("S3", "decode"),
        ("S4", "prompt"),
    ]
    assert occupants(timeline, 8) == [("S1", "ended"), ("S2", "decode"), ("S3", "ended"), ("S4", "ended")]
    started = places(timeline)
    assert {started[name][0] for name in ("S5", "S6", "S7")} == {9}
    assert (
        timeline.num_tokens()["ended"]
        == (8 - 6) + (8 - 5) + (8 - 7)
        == engine.scheduler.policy.num_wasted_tokens
    )


def test_a_static_batch_is_no_larger_than_asked_and_takes_what_waits():
    engine, timeline = make(steps_in_flight=0, batching="static", batch_size=3)
    add(engine)
    run(engine)
    started = places(timeline)
    batches = [sorted(name for name in started if started[name][0] == t) for t, _ in started.values()]
    assert batches[0] == ["S1", "S2", "S3"]
    assert batches[3] == ["S4", "S5", "S6"]
    assert batches[6] == ["S7"]


def test_a_request_that_comes_while_a_static_batch_runs_waits_for_its_end():
    engine, timeline = make(steps_in_flight=0, batching="static")
    add(engine, names=("S1", "S2"))
    engine.step()
    add(engine, names=("S3",))
    ends = run(engine)
    assert places(timeline)["S3"][0] > max(ends["S1"], ends["S2"])


def test_a_dynamic_batch_starts_when_it_is_full_or_its_window_has_passed():
    clock = VirtualClock()
    engine, timeline = make(steps_in_flight=0, batching="dynamic", batch_window_ms=50.0, clock=clock)
    add(engine, names=("S1", "S2"))
    engine.step()
    assert not timeline.steps
    assert engine.scheduler.policy.deadline(engine.scheduler.waiting) == 0.05
    clock.advance_to(0.02)
    add(engine, names=("S3", "S4"))
    engine.step()
    assert [one.request_id for one in timeline.steps[0].rows] == ["S1", "S2", "S3", "S4"]  # full
    clock.advance_to(0.03)
    add(engine, names=("S5",))
    run(engine)  # an engine that only waits lets its clock pass
    late = timeline.steps[places(timeline)["S5"][0] - 1]
    assert [one.request_id for one in late.rows] == ["S5"]
    assert late.moment == pytest.approx(0.08)


def test_a_window_of_wall_time_passes_without_a_busy_loop():
    import time

    engine, _ = make(steps_in_flight=0, batching="dynamic", batch_window_ms=20.0, clock=time.monotonic)
    add(engine, names=("S1",))
    num_calls = 0
    while engine.has_work:
        engine.step()
        num_calls += 1
    assert num_calls < 60


def test_who_hangs_up_leaves_a_static_batch_at_once():
    engine, _ = make(steps_in_flight=0, batching="static")
    engine.add(Request("twins", [10] * 4, SamplingParams(max_tokens=20, n=2)))
    add(engine, names=("S2",))
    while len(engine.scheduler.policy.kept) < 1:
        engine.step()
    held = engine.memory.num_blocks - engine.memory.num_free
    assert engine.abort("S2")
    assert held > 0
    assert engine.memory.num_free == engine.memory.num_blocks  # and with it the batch is over
    run(engine)


def test_unknown_or_impossible_settings_are_one_clear_line():
    with pytest.raises(ConfigError, match="batching='orca' is not known: choose one of continuous, static"):
        EngineConfig.of(batching="orca")
    with pytest.raises(ConfigError, match="batch_size=9 is more than max_num_seqs=8"):
        EngineConfig.of(batching="static", batch_size=9, max_num_seqs=8)
    with pytest.raises(ConfigError, match="batch_window_ms=-1"):
        EngineConfig.of(batching="dynamic", batch_window_ms=-1.0)
