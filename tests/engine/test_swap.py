"""Under memory pressure: the same tokens whichever way requests leave the pool, and nothing is lost over thousands."""

import json
import random

import pytest

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import build as building
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire.runner.runner import Runner
from quire.runner.transfer import HostArena
from tests.engine.page_runner import END, VOCABULARY, PageRunner, expected
from tests.engine.test_device_runner import SHAPE, DeviceRunner

QUARTER = {"num_blocks": 18, "max_num_seqs": 8}
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12),
    SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=10),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=20, presence_penalty=1.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


def outputs(folder, **settings):
    config = EngineConfig.of(
        model=str(folder), load_format="dummy", device="cpu", block_size=4, **{"dtype": "float32", **settings}
    )
    built = building.build(config)
    engine = built.engine
    chosen = random.Random(5)
    for index in range(10):
        prompt = [chosen.randrange(97) for _ in range(chosen.randrange(1, 13))] + [7, 8, 7, 8, 7]
        engine.add(Request(str(index), prompt, SAMPLINGS[index % len(SAMPLINGS)]))
    found = {}
    while engine.has_work:
        for update in engine.step():
            key = (update.request_id, update.index)
            found[key] = found.get(key, ()) + update.token_ids
            if update.prompt_logprobs:
                found[update.request_id, -1] = tuple(entry.token_id for entry in update.prompt_logprobs)
    engine.check_integrity()
    assert engine.memory.num_free == engine.memory.num_blocks
    assert engine.memory.swap.hosts.num_used == 0
    engine.close()
    return found, engine.scheduler.stats, built.report


# Products of which a row's bits do not depend on the batch: rounding to int8 pages would show a difference.
INT8_PAGES = {"kv_cache_dtype": "int8", "dtype": "auto", "quantization": "int8"}
DRAFTS = {"speculative_config": '{"method": "ngram", "adaptive": false}'}


@pytest.mark.parametrize("pages", [{}, INT8_PAGES], ids=["float pages", "int8 pages"])
@pytest.mark.parametrize(("runner", "modes", "extra"), [
    (Runner, ["recompute", "swap", "auto"], {}), (Runner, ["swap"], DRAFTS), (DeviceRunner, ["swap"], {}),
], ids=["runner", "drafts", "device runner"])  # fmt: skip
def test_a_quarter_of_the_pool_gives_the_same_tokens_in_every_mode(
    folder, monkeypatch, runner, modes, extra, pages
):
    wanted, stats, _ = outputs(folder, num_blocks=2000, **pages)
    assert not stats.num_preemptions
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    for mode in modes:
        found, stats, _ = outputs(folder, preemption_mode=mode, **QUARTER, **extra, **pages)
        assert found == wanted
        assert stats.num_preemptions
        assert bool(stats.num_swaps_out) == (mode != "recompute")
        assert stats.num_swaps_out == stats.num_swaps_in


def test_a_swap_space_of_zero_says_so_and_computes_again(folder):
    wanted, _, _ = outputs(folder, num_blocks=2000)
    found, stats, report = outputs(folder, swap_space=0, preemption_mode="swap", **QUARTER)
    assert found == wanted
    assert stats.num_preemptions
    assert not stats.num_swaps_out
    assert any(
        "swap      off (swap_space=0): preempted requests are computed again" in one for one in report.lines()
    )


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_nothing_leaks_over_thousands_of_requests(count, mode):
    num_blocks, in_flight = 24, 1
    memory, runner = PagedMemory(num_blocks, 4, "test", num_swap_blocks=40), PageRunner(num_blocks, 4)
    config = SchedulerConfig(8, 64, steps_in_flight=in_flight, preemption_mode=mode)
    engine = Engine(config, Limits(VOCABULARY, 64, 8, (END,)), memory, runner)
    chosen = random.Random(1)
    wanted, found, sent = {}, {}, 0
    while sent < count or engine.has_work:
        while sent < count and len(engine.scheduler.waiting) < 4:
            prompt = [chosen.randrange(1, VOCABULARY) for _ in range(chosen.randrange(1, 20))]
            n, max_tokens = chosen.choice([1, 1, 1, 2]), chosen.randrange(1, 24)
            engine.add(Request(str(sent), prompt, SamplingParams(n=n, max_tokens=max_tokens)))
            for index in range(n):
                wanted[str(sent), index] = expected(prompt, index, max_tokens)
            sent += 1
        for update in engine.step():
            found.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            if update.finish_reason:
                key = update.request_id, update.index
                assert found.pop(key) == wanted.pop(key)
    engine.check_integrity()
    assert not wanted
    assert memory.num_free == num_blocks
    assert memory.swap.hosts.num_used == 0
    stats = engine.scheduler.stats
    assert (stats.num_preemptions if mode == "recompute" else stats.num_swaps_out) > count // 50
    assert not engine.scheduler._preempted
    assert set(runner.hosts) <= set(range(1, 41))


def test_swap_memory_is_made_ready_once_and_before_it_is_needed(folder, monkeypatch):
    told = []

    def prepare(arena, num_blocks):
        told.append((engine.memory.usage, engine.scheduler.stats.num_preemptions))

    monkeypatch.setattr(HostArena, "prepare", prepare)  # its own has nothing to do on a CPU
    config = EngineConfig.of(
        model=str(folder), load_format="dummy", dtype="float32", device="cpu", block_size=4, **QUARTER,
        preemption_mode="swap",
    )  # fmt: skip
    engine = building.build(config).engine
    for index in range(6):
        engine.add(
            Request(str(index), [7] * 9, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        )
    while engine.has_work:
        engine.step()
    engine.close()
    assert engine.scheduler.stats.num_preemptions
    assert len(told) == 1
    assert told[0][0] > 0.4
    assert told[0][1] == 0
