"""Any mix of adapters in one batch gives what each would give alone, and nothing of it is ever lost."""

import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.core.errors import AdapterError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.kernels.registry import alternatives
from quire.llm.llm import LLM
from quire.runner.runner import Runner
from quire.runner.staging import Staging
from tests.adapters.making import WIDTHS, config, random_tensors, write, write_model
from tests.engine.test_device_runner import DeviceRunner, PaddingRunner

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(10, 60)), [9] * 17, list(range(10, 26)), [3], list(range(20, 40))]
NAMES = ["small", None, "wide", "attention", "small", "wide"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write(folder / "small", 1, 1)
    write(folder / "wide", 2, 37, lora_alpha=8)
    write(folder / "attention", 3, 16, tuple(WIDTHS)[:4])
    return folder


def _llm(model: Path, folder: Path | None = None, **settings) -> LLM:
    adapters = {"enable_lora": True} if folder is None else {"lora_dir": str(folder)}
    plain = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 400}
    return LLM(str(model), use_tqdm=False, **{**plain, **adapters, **settings})


def _tokens(llm: LLM, prompts, names, sampling=GREEDY) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, adapter=names)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def alone(model, folder) -> dict[str | None, list[list[int]]]:
    """What each prompt gives with each adapter, with nothing beside it."""
    with _llm(model, folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        return {
            name: [_tokens(llm, [prompt], name)[0] for prompt in PROMPTS]
            for name in (None, "small", "wide", "attention")
        }


@pytest.mark.parametrize("runner", [Runner, DeviceRunner, PaddingRunner])
@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"steps_in_flight": 0},
    {"num_blocks": 262, "max_num_seqs": 18},
])  # fmt: skip
def test_all_mixes_in_one_batch_equal_one_by_one(model, folder, alone, runner, settings, monkeypatch):
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    assert len({str(outputs) for outputs in alone.values()}) == 4  # they do differ
    with _llm(model, folder, **settings) as llm:
        for names in (NAMES, NAMES[::-1], [None] * 6, ["wide"] * 6):
            expected = [alone[name][i] for i, name in enumerate(names)]
            assert _tokens(llm, PROMPTS, names) == expected


@pytest.mark.parametrize("settings", [
    {"lora_mode": "merge"}, {"lora_memory": "separate", "num_blocks": 340, "lora_memory_bytes": 250 * 1024},
])  # fmt: skip
def test_the_baselines_give_the_same_tokens(model, folder, alone, settings):
    """They are slower or need more memory; what they compute is the same."""
    block_bytes = 2 * 2 * 4 * 2 * 8 * 4
    if "lora_memory_bytes" in settings:
        settings = {**settings, "lora_memory_bytes": 250 * block_bytes}
    with _llm(model, folder, **settings) as llm:
        for names in (NAMES, NAMES[::-1], [None] * 6, ["wide"] * 6):
            expected = [alone[name][i] for i, name in enumerate(names)]
            assert _tokens(llm, PROMPTS, names) == expected


@pytest.mark.skipif("triton" not in alternatives("lora_pack"), reason="needs Triton")
@pytest.mark.parametrize("cached", [True, False])
def test_a_device_that_packs_for_itself_gives_the_same_tokens(model, folder, alone, cached):
    """As on a GPU: files travel as they are, in pieces through staging memory, and evict each other."""
    with _llm(model, folder, num_blocks=262, max_num_seqs=18, enable_prefix_caching=cached) as llm:
        library, slots = llm.engine.adapters.library, llm.engine._runner._adapters
        library._reader = replace(library._reader, piece_bytes=16 << 10, layouts=OrderedDict())
        slots._staging = Staging(64 << 10, pin=False, device=torch.device("cpu"))
        for names in (NAMES, ["wide"] * 6, NAMES[::-1]):
            assert _tokens(llm, PROMPTS, names) == [alone[name][i] for i, name in enumerate(names)]
        kept = [entry.packed for entry in library._held.values()]
        assert len(kept) == 3
        assert all(packed.pieces for packed in kept)


def test_int8_gives_every_row_its_own_bits(tmp_path_factory, folder, model):
    """As without adapters: on the CPU in int8 neighbours change nothing."""
    with _llm(model, folder, dtype="auto", quantization="int8") as llm:
        one_by_one = [_tokens(llm, [prompt], name)[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)]
        assert _tokens(llm, PROMPTS, NAMES) == one_by_one
        assert _tokens(llm, PROMPTS * 3, NAMES * 3) == one_by_one * 3


def test_forks_beams_and_prompt_logprobs_run_with_adapters(model, folder):
    sampling = [
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=6),
        SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=1),
    ]
    with _llm(model, folder) as llm:
        together = _tokens(llm, PROMPTS[:3], ["wide", "small", "attention"], sampling)
        apart = []
        for prompt, name, one in zip(PROMPTS, ["wide", "small", "attention"], sampling, strict=False):
            apart += _tokens(llm, [prompt], name, one)
        assert together == apart


def test_one_requests_adapter_never_touches_anothers_tokens_or_cache(model, folder, alone):
    """The same prompt under every adapter, over and over, through one prefix index."""
    prompt = PROMPTS[1]
    with _llm(model, folder, num_blocks=500) as llm:
        for _ in range(3):
            for name in ("wide", None, "small", "attention"):
                assert _tokens(llm, [prompt], name) == [alone[name][1]]
        assert llm.engine.memory.stats.prefix_hits > 0


def test_an_adapter_given_again_under_its_name_never_meets_old_pages(model):
    prompt = PROMPTS[1]
    with _llm(model) as llm:
        seen = []
        for seed in (1, 2, 1):
            llm.add_adapter("mine", random_tensors(seed, 8), config(8))
            seen += _tokens(llm, [prompt], "mine")
        assert seen[0] == seen[2] != seen[1]
        assert llm.adapters() == ["mine"]
        llm.remove_adapter("mine")
        with pytest.raises(AdapterError, match="no adapter 'mine'"):
            _tokens(llm, [prompt], "mine")
        assert llm.engine.memory.adapter_pages.num_resident == 0


def test_an_adapter_that_fails_to_load_fails_its_own_requests_only(model, folder, alone, tmp_path):
    for name in ("small", "wide"):
        (tmp_path / name).symlink_to(folder / name)
    broken = write(tmp_path / "broken", 0, 4)
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    modules = {"small": str(tmp_path / "small"), "wide": str(tmp_path / "wide"), "broken": str(broken)}
    with _llm(model, enable_lora=True, lora_modules=modules) as llm:
        engine = llm.engine
        for i, name in enumerate(["small", "broken", None, "broken", "wide"]):
            engine.add(Request(str(i), PROMPTS[i], GREEDY, adapter=name))
        found: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        while engine.has_work:
            for update in engine.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
                if update.error:
                    errors[update.request_id] = update.error
        assert set(errors) == {"1", "3"}
        assert "broken" in errors["1"]
        assert [found["0"], found["2"], found["4"]] == [alone["small"][0], alone[None][2], alone["wide"][4]]
        engine.check_integrity()
        with pytest.raises(AdapterError, match="broken"):
            engine.add(Request("again", PROMPTS[0], GREEDY, adapter="broken"))


def test_a_popular_adapter_cannot_starve_the_rest(model, folder):
    """A hundred requests of one adapter came first; another's single request does not wait for them all."""
    with _llm(model, folder, max_num_seqs=4) as llm:
        engine = llm.engine
        for i in range(60):
            engine.add(Request(f"popular-{i}", PROMPTS[0], GREEDY, adapter="small"))
        engine.add(Request("other", PROMPTS[0], GREEDY, adapter="attention"))
        engine.add(Request("base", PROMPTS[0], GREEDY))
        ended: list[str] = []
        while engine.has_work:
            ended += [update.request_id for update in engine.step() if update.finish_reason]
        assert ended.index("other") < 12
        assert ended.index("base") < 12


def test_without_adapters_asking_for_one_says_what_to_set(model):
    with LLM(str(model), load_format="dummy", num_blocks=50, use_tqdm=False) as llm:
        with pytest.raises(AdapterError, match="enable_lora"):
            llm.generate({"prompt_token_ids": [1]}, GREEDY, adapter="a", use_tqdm=False)
        with pytest.raises(AdapterError, match="enable_lora"):
            llm.add_adapter("a", {}, {})


def _soak(model: Path, num_requests: int, seed: int, **settings) -> None:
    """Loads, unloads and serves at random in a pool that is always too small."""
    random_ = random.Random(seed)
    tensors = {
        i: (random_tensors(i, 1 + i % 9, tuple(WIDTHS)[: 1 + i % 7]), config(1 + i % 9)) for i in range(24)
    }
    with _llm(model, num_blocks=110, max_num_seqs=8, max_num_batched_tokens=64, **settings) as llm:
        engine = llm.engine
        loaded: set[str] = set()
        served = live = 0
        while served < num_requests or engine.has_work:
            action = random_.random()
            if action < 0.06:
                index = random_.randrange(24)
                llm.add_adapter(f"a{index}", *tensors[random_.choice([index, (index + 1) % 24])])
                loaded.add(f"a{index}")
            elif action < 0.08 and loaded:
                llm.remove_adapter(loaded.pop())
            while served < num_requests and live < 24:
                names = [None, *sorted(loaded)]
                prompt = [random_.randrange(90) for _ in range(random_.randrange(1, 40))]
                sampling = GREEDY.changed(max_tokens=random_.randrange(1, 12), n=1, temperature=0)
                engine.add(Request(str(served), prompt, sampling, adapter=random_.choice(names)))
                served, live = served + 1, live + 1
            if action > 0.99:
                live -= engine.abort(str(random_.randrange(max(1, served - 30), served + 1)))
            for update in engine.step():
                assert update.error is None, update.error
                live -= update.finish_reason is not None
            if random_.random() < 0.05:
                engine.check_integrity()
        for name in sorted(loaded):
            llm.remove_adapter(name)
        engine.check_integrity()
        pages = engine.memory.adapter_pages
        assert (pages.num_resident, pages.num_in_use, pages.num_blocks) == (0, 0, 0)
        assert engine.memory.num_free == engine.memory.num_blocks
        assert pages.stats.num_evictions > 0
        assert not engine.adapters.library._entries
        assert engine.adapters.stats().running == engine.adapters.stats().waiting == ()


def test_soak(model):
    _soak(model, 400, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak_of_20000_requests(model):
    _soak(model, 20_000, seed=1)
