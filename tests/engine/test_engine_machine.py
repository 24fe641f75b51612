"""The engine under random arrivals, forks, stops, aborts and exhaustion: nothing leaks or mixes, all finish."""

from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.config import SchedulerConfig, SpeculativeConfig
from quire.core.errors import InvalidRequest, QueueFull
from quire.core.layout import LayerGroups
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.speculation import Speculation
from quire.engine.validation import Limits
from quire.memory.offload_cache import OffloadCache
from quire.memory.paged import PagedMemory
from quire.memory.swap import PendingTransfers
from quire_lab.simulate.clock import VirtualClock
from tests.engine.beam_oracle import expected_beams, token_scores
from tests.engine.page_runner import END, VOCABULARY, PageRunner, expected
from tests.engine.page_shelf import PageShelf
from tests.engine.random_proposer import RandomProposer

PREFIX = [7, 7, 3, 9, 1, 4, 4, 2]  # prompts begin alike, so that prefix hits happen


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 12),
        in_flight=st.sampled_from([0, 1, 3]),  # 3: stages of a pipeline
        caching=st.booleans(),
        share=st.sampled_from([True, True, True, False]),
        drafting=st.sampled_from([None, 0.0, 0.5, 0.9]),
        adaptive=st.booleans(),
        swap_blocks=st.sampled_from([0, 3, 100]),
        mode=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        after=st.sampled_from(["resumed", "completed"]),
        home_blocks=st.sampled_from([0, 2, 12]),
        shelf=st.booleans(),
        width=st.sampled_from([1, 2, 4]),
        schedule=st.sampled_from(["fcfs", "priority", "fair", "shortest"]),
        windows=st.sampled_from([None, None, (3,), (0, 5), (7, 0, 7)]),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, max_tokens, in_flight, caching, share, drafting, adaptive,
        swap_blocks, mode, after, home_blocks, shelf, width, schedule="fcfs", windows=None,
    ):  # fmt: skip
        groups = LayerGroups.of(windows) if windows and share else None
        num_blocks *= groups.num_groups if groups else 1
        runner = PageRunner(num_blocks, block_size, token_scores, groups)
        transfers, offload_cache = PendingTransfers(), None
        if home_blocks and caching and share:
            disk_tier = PageShelf(runner) if shelf else None
            offload_cache = OffloadCache(swap_blocks + 1, home_blocks, transfers, runner.num_moved, disk_tier)
        memory = PagedMemory(
            num_blocks, block_size, "test", caching, share, swap_blocks, transfers, offload_cache, None, groups,
            max_tokens,
        )  # fmt: skip
        config = SchedulerConfig(
            max_num_seqs, max_tokens, max_queue_requests=8, steps_in_flight=in_flight,
            preemption_mode=mode, admit_after=after, schedule=schedule,
        )  # fmt: skip
        self.build(config, memory, drafting, adaptive, width, runner)

    def build(self, config, memory, drafting, adaptive, width=1, runner=None):
        max_num_seqs, max_tokens = config.limits
        self.memory = memory
        self.runner = runner or PageRunner(memory.num_blocks, memory.block_size, token_scores)
        limits = Limits(VOCABULARY, 64, max_num_seqs, (END,))
        speculation = None
        if drafting is not None:
            speculative = SpeculativeConfig("ngram", 4, adaptive=adaptive, tree_width=width)
            speculation = partial(Speculation, speculative, RandomProposer(drafting), max_num_seqs)
        self.engine = Engine(
            config, limits, self.memory, self.runner, make_speculation=speculation, clock=VirtualClock()
        )
        self.max_batch = max_tokens
        self.prompts = {}
        self.outputs = {}
        self.finished = set()
        self.stopped = set()
        self.beams = set()
        self.count = 0

    @rule(
        prefix=st.integers(0, 8),
        tail=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from(["", "other"]),
        place=st.integers(0, 2),
    )
    def add(self, prefix, tail, max_tokens, n, salt, place):
        request_id = f"r{self.count}"
        self.count += 1
        prompt = PREFIX[:prefix] + tail
        sampling = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=1 if place == 2 else None)
        try:
            self.engine.add(
                Request(
                    request_id, prompt, sampling, cache_salt=salt, priority=place, tenant=f"tenant {place}"
                )
            )
        except (InvalidRequest, QueueFull):
            return
        self.prompts[request_id] = [expected(prompt, index, max_tokens) for index in range(n)]
        for index in range(n):
            self.outputs[request_id, index] = []

    @rule(
        prefix=st.integers(0, 8),
        tail=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 10),
        width=st.integers(1, 6),
        unreturned=st.integers(0, 5),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early=st.sampled_from([True, False, "never"]),
    )
    def add_beams(self, prefix, tail, max_tokens, width, unreturned, penalty, early):
        request_id = f"r{self.count}"
        self.count += 1
        prompt = PREFIX[:prefix] + tail
        n = max(1, width - unreturned)
        sampling = SamplingParams(
            n=n, best_of=width, max_tokens=max_tokens, use_beam_search=True, length_penalty=penalty,
            early_stopping=early,
        )  # fmt: skip
        try:
            self.engine.add(Request(request_id, prompt, sampling))
        except (InvalidRequest, QueueFull):
            return
        self.beams.add(request_id)
        found = expected_beams(prompt, width, max_tokens, penalty, early)
        self.prompts[request_id] = [output for output, _ in found[:n]]
        for index in range(n):
            self.outputs[request_id, index] = []

    @rule(count=st.integers(2, 5), max_tokens=st.integers(6, 10), n=st.sampled_from([1, 1, 2]))
    def crowd(self, count, max_tokens, n):
        """Several at once, which start small and grow: sooner or later some must leave."""
        for i in range(count):
            self.add(prefix=i, tail=[11 + self.count % 30], max_tokens=max_tokens, n=n, salt="", place=i % 3)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.take(self.engine.step())
            self.engine.check_integrity()

    @rule()
    def forget_prefixes(self):
        self.memory.reset_prefix_index()

    @rule()
    def run_out_of_device_memory(self):
        self.runner.is_full = True

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.abort(request_id)
        self.prompts.pop(request_id)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def stop(self, data):
        """As a caller does who sees a stop string: of any sequence, at any moment, too early ones too."""
        living = [
            (request_id, index)
            for request_id, outputs in sorted(self.prompts.items())
            for index in range(len(outputs))
            if (request_id, index) not in self.finished | self.stopped
        ]
        if not living:
            return
        key = data.draw(st.sampled_from(living))
        if self.engine.stop(*key):
            self.stopped.add(key)
        else:  # beams have no index, and there is nothing to stop before the first token
            assert key[0] in self.beams or not self.outputs[key]

    @rule()
    def drain(self):
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.engine.has_work, "some request starves"
        for request_id, outputs in self.prompts.items():
            for index, output in enumerate(outputs):
                found, key = self.outputs[request_id, index], (request_id, index)
                assert found == (output[: len(found)] if key in self.stopped else output)
                assert key in self.finished | self.stopped
        assert self.memory.num_free == self.memory.num_blocks
        assert self.memory.swap.hosts.num_used == 0
        self.prompts.clear()
        self.nothing_is_left()

    def nothing_is_left(self):
        """What the engine keeps per request is gone with the last request."""
        engine, scheduler = self.engine, self.engine.scheduler
        left = {
            "prompt logprobs": engine._committer._prompt_logprobs,
            "beam searches": engine._committer._beams.searches,
            "grammars": engine._structured.running,
            "estimates": engine.speculation._estimates if engine.speculation is not None else {},
            "groups": scheduler._groups,
            "forking": scheduler._batch.forking,
            "preempted": scheduler._preempted,
            "waiting": list(scheduler.waiting),
        }
        assert not any(left.values()), left
        assert scheduler.waiting.num_tokens == 0

    @invariant()
    def whole(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            assert self.runner.largest_step <= self.max_batch
            rows = [s.row for s in self.engine.scheduler.running]
            assert len(set(rows)) == len(rows)

    def take(self, updates):
        for update in updates:
            key = (update.request_id, update.index)
            assert key not in self.finished | self.stopped, "a finished sequence still speaks"
            if update.error:  # shed: it ends whole, and says nothing more
                self.prompts.pop(update.request_id, None)
                self.finished.add(key)
                continue
            if update.request_id in self.prompts:
                self.outputs[key].extend(update.token_ids)
            else:
                pytest.fail("an aborted request still speaks")
            if update.finish_reason:
                self.finished.add(key)

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


def test_a_request_that_a_full_device_sends_back_knows_its_last_token():
    memory, runner = PagedMemory(40, 2, "test"), PageRunner(40, 2)
    engine = Engine(
        SchedulerConfig(4, 12, steps_in_flight=1), Limits(VOCABULARY, 64, 4, (END,)), memory, runner
    )
    prompts, found = {"a": [1, 2, 3], "b": [4, 5]}, {"a": [], "b": [], "newest": []}
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, SamplingParams(max_tokens=10)))
    for count in range(100):
        if count == 3:
            engine.add(Request("newest", [9, 9, 9], SamplingParams(max_tokens=3)))
            runner.is_full = True
        for update in engine.step():
            found[update.request_id].extend(update.token_ids)
    assert not engine.has_work
    assert [found["a"], found["b"]] == [expected(prompt, 0, 10) for prompt in prompts.values()]


def test_a_prefill_chunk_leaves_the_tokens_that_drafts_need():
    machine = EngineMachine()
    machine.start(
        num_blocks=8,
        block_size=2,
        max_num_seqs=4,
        max_tokens=3,
        in_flight=0,
        caching=True,
        share=False,
        drafting=0.0,
        adaptive=True,
        swap_blocks=100,
        mode="recompute",
        after="completed",
        home_blocks=0,
        shelf=False,
        width=1,
    )
    # a preempted group returns: its leader prefills while its follower verifies a draft
    machine.crowd(2, 6, n=2)
    machine.drain()
    machine.whole()
    assert machine.runner.largest_step == machine.max_batch
