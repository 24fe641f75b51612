"""Adapters on a simulated device: pages, admission and eviction are real; sizes stand for weights, charges for time."""

import json
import random

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build
from quire.kernels import native
from quire_lab.simulate.adapters import DISK_BANDWIDTH, READS_AT_ONCE

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANKS = (64, 32, 16, 8)


def adapter(rank):
    return {"r": rank, "target_modules": TARGETS}


def built(num_adapters=0, **settings):
    given = {"model": "llama-1b", "device": "simulated:a100-40g", "num_blocks": 400, "max_num_seqs": 16}
    engine = build(EngineConfig.of(**{**given, "enable_lora": True, **settings})).engine
    for index in range(num_adapters):
        engine.adapters.add(f"a{index}", {}, adapter(RANKS[index % len(RANKS)]))
    return engine


def served(engine, names, length=40, num_tokens=30):
    """Tokens and errors by request."""
    draw = random.Random(1)
    for index, name in enumerate(names):
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index)
        engine.add(
            Request(f"{index}", [draw.randrange(9, 99) for _ in range(length)], sampling, adapter=name)
        )
    tokens, errors = {}, {}
    while engine.has_work:
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.error is not None:
                errors[update.request_id] = update.error
    engine.check_integrity()
    return tokens, errors


def test_unified_separate_and_merged_adapters_give_the_same_tokens():
    names = [f"a{(7 * i) % 40}" if i % 5 else None for i in range(60)]
    expected = served(built(40, num_blocks=4000), names)
    unified = built(40)
    assert served(unified, names) == expected
    assert unified.memory.adapter_pages.stats.num_evictions > 0
    apart = built(40, lora_memory="separate")
    assert served(apart, names) == expected
    assert apart.memory.num_blocks == 300
    assert served(built(40, lora_mode="merge"), names) == expected


def test_more_adapters_in_a_step_cost_more_and_none_cost_nothing():
    def seconds(names, **settings):
        engine = built(16, **{"num_blocks": 4000, **settings})
        served(engine, names)
        return engine.clock()

    base = seconds([None] * 16)
    assert base == seconds([None] * 16, num_blocks=5000)
    one, many = seconds(["a1"] * 16), seconds([f"a{i}" for i in range(16)])
    assert base < one < many
    turns = seconds([f"a{i % 4}" for i in range(16)], lora_mode="merge")
    assert turns > 2 * many  # sixteen requests in four turns, where they ran in one batch


def test_a_step_of_the_h200_charges_what_its_kernels_take():
    """3.3 ms were measured for 256 rows of 100 adapters (benchmarks/results/lora_gpu.json)."""
    settings = {"model": "llama-8b", "device": "simulated:h200", "num_blocks": 20000, "max_num_seqs": 256}
    engine = built(100, **settings)
    names = [f"a{i % 100}" for i in range(256)]
    served(engine, names, length=2, num_tokens=200)
    base = built(**settings)
    served(base, [None] * 256, length=2, num_tokens=200)
    assert (engine.clock() - base.clock()) / 200 == pytest.approx(3.3e-3, rel=0.3)


def test_folders_need_their_config_only_and_reading_them_passes_time(tmp_path):
    for index in range(3):
        folder = tmp_path / f"f{index}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(adapter(64)))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text(json.dumps({"r": 4}))
    names = ["f0", "f1", "f2", "broken", None]
    cold = built(lora_dir=str(tmp_path))
    tokens, errors = served(cold, names)
    assert len(tokens["0"]) == len(tokens["4"]) == 30
    assert set(errors) == {"3"}
    assert "no target_modules" in errors["3"]
    held = cold.adapters.stats()
    assert held.num_reads == 3
    first = cold.clock()
    assert first > held.host_bytes / DISK_BANDWIDTH
    served(cold, ["f0", "f1", "f2", None])
    assert cold.clock() - first < first
    assert cold.adapters.stats().num_reads == 3


@pytest.mark.parametrize("lora_memory", ["unified", "separate"])
def test_adapters_that_wait_for_room_do_not_evict_each_other(lora_memory):
    """Forty adapters, of which a few fit, for a hundred requests: one comes for a request, not at every step."""
    engine = built(40, num_blocks=400, lora_memory=lora_memory)
    served(engine, [f"a{(7 * i) % 40}" for i in range(100)])
    assert engine.memory.adapter_pages.stats.num_loads <= 2 * 100


def test_reads_whose_requests_were_aborted_do_not_keep_others_from_reading(tmp_path):
    count = 2 * READS_AT_ONCE + 1
    for index in range(count):
        (tmp_path / f"f{index}").mkdir()
        (tmp_path / f"f{index}" / "adapter_config.json").write_text(json.dumps(adapter(8)))
    engine = built(lora_dir=str(tmp_path))
    for index in range(count - 1):
        engine.add(Request(f"gone {index}", [7], SamplingParams(max_tokens=1), adapter=f"f{index}"))
    engine.scheduler.schedule()  # all of them are asked for, and none is there yet
    for index in range(count - 1):
        engine.abort(f"gone {index}")
    engine.clock.advance_to(60.0)
    tokens, errors = served(engine, [f"f{count - 1}"])
    assert len(tokens["0"]) == 30
    assert not errors


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"reservation": "max"}, "adapters need pages"),
        ({"lora_mode": "merge", "device": "simulated:cpu", "quantization": "int8"}, "full precision"),
        ({"lora_memory": "separate", "lora_memory_bytes": 1}, "lora_memory_bytes=1"),
    ],
)
def test_what_a_real_start_refuses_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        built(**settings)


@pytest.mark.parametrize("memory", ["unified", "separate"])
@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"batching": "dynamic", "batch_size": 4, "batch_window_ms": 50}]
)
def test_an_adapter_that_came_early_for_another_never_keeps_the_first_out(tmp_path, settings, memory):
    """The first in line still reads its adapter from disk when the second one's comes in, into the last room."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "adapter_config.json").write_text(json.dumps(adapter(8)))
    engine = built(lora_dir=str(tmp_path), lora_memory=memory, **settings)
    pages, short = engine.memory.adapter_pages, SamplingParams(max_tokens=1, ignore_eos=True)
    engine.adapters.add("host", {}, adapter(8))
    for index in range(100):  # idle adapters, until room for one more is all that is left
        engine.adapters.add(f"fill{index}", {}, adapter(8))
        engine.add(Request(f"f{index}", [5, 6, 7], short, adapter=f"fill{index}"))
        finish(engine)
        size = engine.adapters.library.want(engine.adapters.library.resolve("host")).num_blocks
        if not pages.has_spare_room(2 * size, 0):
            break
    if "max_num_seqs" in settings:
        engine.add(Request("long", list(range(5, 605)), short))
        engine.step()
    for name in ("disk", "host"):
        engine.add(
            Request(name, [5, 6, len(name)], SamplingParams(max_tokens=4, ignore_eos=True), adapter=name)
        )
    finish(engine)
    engine.check_integrity()


def finish(engine, most=3000):
    for _ in range(most):
        if not engine.has_work:
            return
        engine.step()
    pytest.fail("the engine goes round and round")


def test_sizes_need_no_native_code(monkeypatch):
    asked = []
    monkeypatch.setattr(native, "available", lambda: asked.append(1) or True)
    built(2)
    assert not asked
