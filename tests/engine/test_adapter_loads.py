"""Adapters that are loaded while requests run: read beside the steps, and nothing is left of those that fail."""

import json
import os
import random
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.core.errors import AdapterError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.llm.llm import LLM
from tests.adapters.making import HeldAdapter, random_tensors, write, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8]
SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 200,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    for seed, name in enumerate(("one", "two", "held"), start=1):
        write(tmp_path / "many" / name, seed, 4)
    return tmp_path / "many"


@pytest.fixture(params=[0, 1])
def llm(request, tmp_path, folder):
    model = str(write_model(tmp_path / "model"))
    with LLM(model, use_tqdm=False, lora_dir=str(folder), steps_in_flight=request.param, **SETTINGS) as made:
        yield made


@pytest.fixture
def held(folder, llm):
    """Of a folder that is there already; nobody is left waiting for it."""
    found = HeldAdapter(folder / "held")
    yield found
    found.drop()


def _tokens(llm: LLM, name: str) -> list[int]:
    output = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, adapter=name)[0]
    return list(output.outputs[0].token_ids)


def _finish(engine: Engine) -> list[int]:
    """What was still asked for, to the end: the tokens that came."""
    found: list[int] = []
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            found += update.token_ids
    return found


def _is_clean(engine: Engine) -> bool:
    """Nothing but what names mean is kept."""
    library, pages = engine.adapters.library, engine.memory.adapter_pages
    engine.check_integrity()
    assert (len(library._entries), library.loading()) == (library.num_names, [])
    assert library.num_held <= library.num_names
    assert pages.num_in_use == 0
    return engine.memory.num_free == engine.memory.num_blocks


def _until_read(held: HeldAdapter, engine: Engine) -> None:
    engine.step()
    held.wait_for_reader()


def test_steps_go_on_while_a_file_is_read_and_the_name_is_unknown_until_then(llm, held):
    engine = llm.engine
    expected = _tokens(llm, "one")
    loaded = engine.adapters.load("new", "held")
    _until_read(held, engine)
    assert _tokens_beside(engine) == expected
    assert not loaded.done()
    with pytest.raises(AdapterError, match="no adapter 'new'"):
        engine.add(Request("early", PROMPT, GREEDY, adapter="new"))
    held.let_go()
    _finish(engine)
    assert loaded.result(0) is None
    assert _tokens(llm, "new") not in (expected, _tokens(llm, "two"))
    assert _is_clean(engine)


def _tokens_beside(engine: Engine) -> list[int]:
    """One request from its first to its last token, while a load keeps the engine from being idle."""
    engine.add(Request("beside", PROMPT, GREEDY, adapter="one"))
    found: list[int] = []
    while len(found) < 6:
        for update in engine.step():
            found += update.token_ids
    return found


def test_a_known_name_means_what_it_meant_until_another_is_read(llm, held):
    engine = llm.engine
    _load(engine, "name", "one")
    before = _tokens(llm, "one")
    replaced = engine.adapters.load("name", "held")
    after = engine.adapters.load("name", "two")  # asked for last, and read last
    _until_read(held, engine)
    # is not done before the name means something else
    engine.add(Request("beside", PROMPT, GREEDY, adapter="name"))
    assert engine.adapters.library.name_of(engine.adapters._keys["beside"]) == "name"
    held.let_go()
    found: list[int] = []
    while engine.has_work:
        for update in engine.step():
            found += update.token_ids
        assert replaced.done() or not after.done()
    assert found == before
    assert after.result(0) is replaced.result(0) is None
    assert _tokens(llm, "name") == _tokens(llm, "two") != before
    assert _is_clean(engine)


def test_an_unload_gives_up_what_is_being_loaded_under_that_name(llm, held, folder):
    engine = llm.engine
    waiting = [engine.adapters.load("name", path) for path in ("held", "one")]
    other = engine.adapters.load("other", "two")
    _until_read(held, engine)
    engine.adapters.remove("name")
    for one in waiting:
        with pytest.raises(AdapterError, match="unloaded while"):
            one.result(0)
    with pytest.raises(AdapterError, match="no adapter"):
        engine.adapters.remove("name")
    held.let_go()  # the thread reads it to its end, for nobody
    _finish(engine)
    assert other.result(0) is None
    assert engine.adapters.library.num_held == 1
    _load(engine, "name", "one")
    assert _tokens(llm, "name") == _tokens(llm, "one")
    assert _is_clean(engine)


def test_loads_that_fail_say_why_and_leave_nothing(llm, folder):
    engine = llm.engine
    _load(engine, "name", "one")
    expected = _tokens(llm, "name")
    files = len(os.listdir("/proc/self/fd"))
    _break(folder)
    for path, reason in (
        ("dora", "DoRA"), ("nan", "not finite"), ("short", "cut short"), ("empty", "no adapter_model"),
        ("shapes", "made for another"),
    ):  # fmt: skip
        with pytest.raises(AdapterError, match=reason):
            _load(engine, "name", path)
        assert _is_clean(engine)
    for path, reason in (("..", "outside"), ("nothing", "no folder")):
        with pytest.raises(AdapterError, match=reason):
            engine.adapters.load("name", path)
    assert engine.adapters.stats().num_failures == 5
    assert not engine.has_work
    assert _tokens(llm, "name") == expected
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_load_that_ends_never_takes_what_the_next_step_merges(tmp_path, folder):
    """Host memory for one copy: the one that comes pushes the other out, and it is read again in time."""
    model = str(write_model(tmp_path / "model"))
    with LLM(
        model, use_tqdm=False, lora_dir=str(folder), lora_mode="merge", max_cpu_loras=1, **SETTINGS
    ) as llm:
        expected, _ = _tokens(llm, "one"), llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
        engine = llm.engine
        loaded = engine.adapters.load("new", "two")
        engine.step()
        wait(engine.adapters.library.loading(), timeout=60)
        engine.add(Request("asked", PROMPT, GREEDY, adapter="one"))
        assert _finish(engine) == expected
        assert loaded.done()


def test_reads_that_nobody_wants_any_more_keep_no_engine_awake(llm, folder, held):
    engine = llm.engine
    engine.add(Request("gone", PROMPT, GREEDY, adapter="one"))
    engine.step()
    engine.abort("gone")
    wait(engine.adapters.library.loading(), timeout=60)
    engine.adapters.load("new", "held")
    for _ in range(2):
        engine.step()
    held.wait_for_reader()
    began, used = time.monotonic(), time.thread_time()
    for _ in range(20):
        engine.step()
    assert time.thread_time() - used < 0.8 * (time.monotonic() - began)  # it waits most of the time


def _break(folder: Path) -> None:
    write(folder / "dora", 1, 4, use_dora=True)
    tensors = random_tensors(1, 4)
    tensors[next(iter(tensors))][0, 0] = float("nan")
    save_file(tensors, write(folder / "nan", 1, 4) / "adapter_model.safetensors")
    weights = write(folder / "short", 1, 4) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (write(folder / "empty", 1, 4) / "adapter_model.safetensors").unlink()
    wrong = {name: torch.zeros(3, 3) for name in random_tensors(1, 4)}
    save_file(wrong, write(folder / "shapes", 1, 4) / "adapter_model.safetensors")


def test_loads_unloads_and_requests_at_random_leave_nothing(llm, folder):
    engine, draw = llm.engine, random.Random(0)
    _break(folder)
    paths = ("one", "two", "held", "nan", "short")
    loads: list[Future[None]] = []
    for number in range(60):
        name = draw.choice("abc")
        if draw.random() < 0.6:
            loads.append(engine.adapters.load(name, draw.choice(paths)))
        elif draw.random() < 0.5:
            with suppress(AdapterError):  # it may not be there
                engine.adapters.remove(name)
        with suppress(AdapterError):
            engine.add(Request(f"{number}", PROMPT * draw.randrange(1, 5), GREEDY, adapter=name))
        for _ in range(draw.randrange(4)):
            assert all(update.error is None for update in engine.step())
    _finish(engine)
    assert all(load.done() for load in loads)
    assert {type(load.exception()) for load in loads} == {type(None), AdapterError}
    assert _is_clean(engine)
    for name in "abc":
        with suppress(AdapterError):
            engine.adapters.remove(name)
    library, pages = engine.adapters.library, engine.memory.adapter_pages
    assert (library._entries, library.num_held, library.held_bytes, pages.num_resident) == ({}, 0, 0, 0)


def test_an_engine_that_closes_tells_those_who_wait_for_a_load(llm, held):
    engine = llm.engine
    loaded = engine.adapters.load("new", "held")
    _until_read(held, engine)
    told = threading.Event()
    loaded.add_done_callback(lambda _: told.set())
    closing = threading.Thread(target=llm.close)
    closing.start()
    assert told.wait(30)
    assert loaded.cancelled()
    held.let_go()
    closing.join(30)
    assert not closing.is_alive()


def test_what_was_loaded_before_has_its_name_at_once(llm, held):
    engine = llm.engine
    engine.adapters.restore("new", "held")
    engine.add(Request("early", PROMPT, GREEDY, adapter="new"))
    _until_read(held, engine)
    held.let_go()
    assert _finish(engine) == _tokens(llm, "new") == _tokens(llm, "held")
    with pytest.raises(AdapterError, match="outside"):
        engine.adapters.restore("new", "../model")


def _load(engine: Engine, name: str, path: str) -> None:
    loaded: Future[None] = engine.adapters.load(name, path)
    _finish(engine)
    loaded.result(0)


def test_on_a_simulated_device_a_load_takes_virtual_time(tmp_path):
    (tmp_path / "large").mkdir()
    config = {"r": 64, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "large" / "adapter_config.json").write_text(json.dumps(config))
    settings = {"device": "simulated:a100-40g", "num_blocks": 400, "max_num_seqs": 16}
    with LLM("llama-1b", use_tqdm=False, lora_dir=str(tmp_path), **settings) as llm:
        before = llm.engine.clock()
        _load(llm.engine, "new", "large")
        assert llm.engine.clock() > before
        assert llm.adapters() == ["new", "large"]
