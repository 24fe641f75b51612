"""Encoder-decoder models give transformers' tokens, however they are batched, preempted, sampled or found again."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, InvalidRequest
from quire.core.request import Request
from quire.engine import build as building
from quire.engine.engine import Engine
from quire.kernels.registry import alternatives, load
from quire.layers.factory import LayerFactory
from quire.models.encoder_decoder import EncoderDecoder
from quire.runner.cross_cuda import CrossCudaOps
from quire.scheduler.preemption import Preemption
from quire_lab.baselines.synthetic_drafts import SyntheticProposer
from tests.engine.test_device_runner import EagerGraphs
from tests.models.checkpoints import llama
from tests.models.checkpoints import save as save_decoder
from tests.models.seq2seq import SMALL, VARIANTS, bart, flan, generate, prompts, save

PROMPTS = prompts(5, 16, 1, 33, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
ENDS = (7, 8, 20, 30, 31, 32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, transformers' model) by variant, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = folder, save(folder, VARIANTS[variant](), untied="untied" in variant)
        return made[variant]

    return get


@pytest.fixture(scope="module")
def roomy_tokens(checkpoints: Any) -> Any:
    """The tokens of requests that are never preempted, by variant, made once."""

    @cache
    def get(variant: str) -> tuple[list[list[int]], list[SamplingParams], list[list[list[int]]]]:
        texts = prompts(5, 16, 11, 20, 9, 3, 17, 8)
        sampling = [_mixed()[i % 4] for i in range(len(texts))]
        llm = _llm(checkpoints(variant)[0], block_size=4)
        expected = _tokens(llm, texts, sampling)
        llm.close()
        return texts, sampling, expected

    return get


def _llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, **{"dtype": "float32", "quantization": "none", **settings})


def _tokens(llm: LLM, texts: list[list[int]], sampling: Any) -> list[list[list[int]]]:
    results = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks
    return [[list(output.token_ids) for output in result.outputs] for result in results]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(variant: str, checkpoints: Any) -> None:
    folder, model = checkpoints(variant)
    expected = [generate(model, prompt, 14) for prompt in PROMPTS]
    assert len({token for outputs in expected for token in outputs[0]}) > 8, "equal tokens prove nothing"
    for settings in ({"block_size": 8}, {"block_size": 1, "steps_in_flight": 0, "max_prompt_chunk": 3}):
        llm = _llm(folder, **settings)
        assert _tokens(llm, PROMPTS, GREEDY) == expected
        assert _tokens(llm, PROMPTS[3:4], GREEDY) == expected[3:4]
        llm.close()


@pytest.mark.parametrize("variant", ["t5", "flan-untied", "bart"])
def test_beams_are_those_of_transformers(variant: str, checkpoints: Any) -> None:
    folder, model = checkpoints(variant)
    llm = _llm(folder, block_size=4)
    ends = tuple(sorted({*ENDS, *llm.engine.limits.eos_token_ids}))
    for width, penalty, early in ((4, 1.0, False), (2, 0.6, True)):
        asked = SamplingParams(
            n=width, use_beam_search=True, length_penalty=penalty, early_stopping=early, max_tokens=9,
            stop_token_ids=ENDS,
        )  # fmt: skip
        expected = [
            generate(
                model, prompt, 9, ends=ends, num_beams=width, num_return_sequences=width, length_penalty=penalty,
                early_stopping=early,
            )
            for prompt in PROMPTS[:4]
        ]  # fmt: skip
        assert _tokens(llm, PROMPTS[:4], asked) == expected
    llm.close()


def test_penalties_count_the_tokens_of_the_decoder(checkpoints: Any) -> None:
    folder, model = checkpoints("flan-untied")
    llm = _llm(folder)
    ends = llm.engine.limits.eos_token_ids
    texts = [[*prompt[:20], *ends] for prompt in PROMPTS]  # a prompt has the end token itself
    asked = SamplingParams(temperature=0, max_tokens=14, repetition_penalty=1.6)
    expected = [generate(model, text, 14, ends=ends, repetition_penalty=1.6) for text in texts]
    assert expected != [generate(model, text, 14, ends=ends) for text in texts]
    assert _tokens(llm, texts, asked) == expected
    llm.close()


def test_the_shape_of_flan_t5_small_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, flan(**SMALL), untied=True)
    llm = _llm(tmp_path)
    texts = prompts(30, 7)
    assert _tokens(llm, texts, GREEDY) == [generate(model, text, 14) for text in texts]
    llm.close()


# ---------------------------------------------------------------------- memory


def _mixed() -> list[SamplingParams]:
    return [
        GREEDY,
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, ignore_eos=True),
        SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=10),
        SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=20, presence_penalty=1.0),
    ]


@pytest.mark.parametrize("variant", ["flan-untied", "bart"])
@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_give_the_same_tokens(
    variant: str, mode: str, steps_in_flight: int, checkpoints: Any, roomy_tokens: Any
) -> None:
    folder, _ = checkpoints(variant)
    texts, sampling, expected = roomy_tokens(variant)
    llm = _llm(
        folder, block_size=4, num_blocks=26, max_num_seqs=8, preemption_mode=mode,
        steps_in_flight=steps_in_flight,
    )  # fmt: skip
    assert _tokens(llm, texts, sampling) == expected
    stats = llm.engine.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swaps_out > 0) == (mode == "swap")
    llm.close()


@pytest.fixture
def engine(checkpoints: Any) -> Any:
    folder, _ = checkpoints("flan-untied")
    settings = {"dtype": "float32", "quantization": "none", "block_size": 4}
    built = building.build(EngineConfig.of(model=str(folder), **settings))
    yield built.engine
    built.engine.close()


def _run(engine: Engine) -> dict[tuple[str, int], tuple[int, ...]]:
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    while engine.has_work:
        for update in engine.step():
            key = update.request_id, update.index
            found[key] = found.get(key, ()) + update.token_ids
            assert update.error is None
        engine.check_integrity()
    return found


@pytest.mark.parametrize("beams", [False, True])
def test_samples_and_beams_share_the_pages_of_the_encoder(engine: Engine, beams: bool) -> None:
    sampling = SamplingParams(n=4, use_beam_search=beams, max_tokens=3, ignore_eos=True, seed=1)
    engine.add(Request("one", prompts(37)[0], sampling))
    most = 0
    while engine.has_work:
        engine.step()
        held = {block for s in engine.scheduler.running for block in s.block_ids[:10]}
        assert len(held) <= 10  # 37 tokens in blocks of 4, once for all four
        most = max(most, engine.memory.num_blocks - engine.memory.num_free)
    assert most <= 10 + 4 + 1  # a block of outputs each, and one that is being copied
    engine.check_integrity()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that went through an encoder."""
    lengths: list[int] = []
    encode = EncoderDecoder.encode

    def counted(self: Any, batch: Any, *others: Any) -> None:
        lengths.extend(batch.lengths.tolist())
        encode(self, batch, *others)

    monkeypatch.setattr(EncoderDecoder, "encode", counted)
    return lengths


def test_an_equal_prompt_is_found_whole_and_the_encoder_runs_once(engine: Engine, encoded: list[int]) -> None:
    (prompt,) = prompts(18)
    engine.add(Request("first", prompt, GREEDY))
    first = _run(engine)["first", 0]
    engine.add(Request("again", prompt, GREEDY))
    cached = 0
    found: tuple[int, ...] = ()
    while engine.has_work:
        for update in engine.step():
            found, cached = found + update.token_ids, max(cached, update.num_cached)
    assert (found, cached, encoded) == (first, 18, [18])
    # The same beginning is another prompt: what the encoder makes of it depends on its end.
    for other in (prompt[:-1], [*prompt, 5], [*prompt[:16], 5, 6], [*prompt, 0]):
        engine.add(Request("other", other, GREEDY))
        _run(engine)
    assert encoded == [18, 17, 19, 18, 19]
    # Of a prompt that has lost one of its blocks nothing is used.
    sequence_blocks = engine.memory.index
    engine.memory.index.forget(next(b for b in range(1, 200) if sequence_blocks.knows(b)))
    engine.add(Request("last", prompt, GREEDY))
    assert _run(engine)["last", 0] == first
    assert encoded[-1] == 18
    engine.check_integrity()


@pytest.mark.parametrize("gigabytes", [0.001, 0.00015])  # for all blocks, or for some of them
def test_evicted_prompts_come_back_whole_from_host_memory(
    gigabytes: float, checkpoints: Any, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = checkpoints("flan-untied")
    monkeypatch.setattr(Preemption, "fetching_pays", lambda self, memory: True)
    llm = _llm(folder, block_size=4, num_blocks=20, max_num_seqs=2, kv_offload_gb=gigabytes)
    texts = prompts(22, 37, 21, 30, 25, 22)
    expected = [generate(model, text, 14)[0] for text in texts]
    for _ in range(3):
        assert [_tokens(llm, [text], GREEDY)[0][0] for text in texts] == expected
    stats, lengths = llm.engine.memory.offload_cache.stats, [len(text) for text in texts]
    assert stats.saved > 50
    assert (encoded == lengths) == (stats.host_hits > 50) == (gigabytes == 0.001)
    llm.close()


def test_aborted_requests_leave_nothing_behind(engine: Engine) -> None:
    chosen = random.Random(3)
    texts = prompts(*(chosen.randrange(1, 30) for _ in range(24)))
    for index, text in enumerate(texts):
        engine.add(Request(str(index), text, _mixed()[index % 4]))
        engine.step()
        if index % 3 == 2:
            engine.abort(str(chosen.randrange(index)))
        engine.check_integrity()
    _run(engine)
    assert engine.memory.num_free == engine.memory.num_blocks


# ---------------------------------------------------------------------- speculation


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
TREES = {**NGRAM, "tree_width": 3}


def _draft_mostly_right(engine: Engine, texts: list[list[int]], known: list[list[list[int]]]) -> None:
    """Drafts from these answers from now on, in blocks of 4, in place of prompt lookup."""
    answers = {}
    limits = engine.limits
    for text, outputs in zip(texts, known, strict=True):
        expanded = limits.encoder.expand(Request("", text, GREEDY), 4, limits.max_model_len)
        answers |= {(tuple(expanded.prompt_token_ids), i): tokens for i, tokens in enumerate(outputs)}
    engine.speculation.propose_with(SyntheticProposer(answers, limits.vocab_size, 0.7, 0.5))


@pytest.mark.parametrize("drafts", [NGRAM, TREES])
@pytest.mark.parametrize(("variant", "settings"), [
    ("flan-untied", {"num_blocks": 34, "max_num_seqs": 8}),
    ("bart", {"steps_in_flight": 0}),
    ("t5", {"num_blocks": 34, "max_num_seqs": 8, "preemption_mode": "swap"}),
])  # fmt: skip
def test_drafts_never_change_the_tokens(
    variant: str, settings: dict[str, Any], drafts: dict[str, Any], checkpoints: Any, roomy_tokens: Any
) -> None:
    texts, sampling, expected = roomy_tokens(variant)
    llm = _llm(checkpoints(variant)[0], block_size=4, speculative_config=drafts, **settings)
    assert _tokens(llm, texts, sampling) == expected
    stats = llm.engine.draft_stats
    num_tokens, num_accepted = stats.num_draft_tokens, stats.num_accepted_tokens
    assert num_tokens > 0
    _draft_mostly_right(llm.engine, texts, expected)
    assert _tokens(llm, texts, sampling) == expected
    assert 10 < stats.num_accepted_tokens - num_accepted < stats.num_draft_tokens - num_tokens
    assert "num_blocks" not in settings or llm.engine.scheduler.stats.num_preemptions > 0
    llm.close()


def _draft_model(folder: Path, **settings: Any) -> dict[str, Any]:
    basic = {"method": "draft_model", "model": str(folder), "quantization": "none", "adaptive": False}
    return {**basic, "num_speculative_tokens": 3, **settings}


@pytest.mark.parametrize(("variant", "draft", "ops", "width", "settings"), [
    ("flan-untied", "flan-untied", None, 1, {"num_blocks": 34}),
    ("flan-untied", "mt5", None, 1, {"num_blocks": 34}),
    ("t5", "t5", CrossCudaOps, 1, {"num_blocks": 34, "preemption_mode": "swap"}),
    ("bart", "bart", None, 1, {"steps_in_flight": 0, "max_num_batched_tokens": 24}),
    ("bart", "bart", None, 2, {}),
])  # fmt: skip
def test_a_draft_model_has_an_encoder_of_its_own(
    variant: str, draft: str, ops: Any, width: int, settings: dict[str, Any], checkpoints: Any, roomy_tokens: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Drafts of the target itself are right, also after a preemption and where a step holds few prompts."""
    texts, sampling, expected = roomy_tokens(variant)
    if ops is not None:
        monkeypatch.setattr("quire.engine.build.runner.CrossCpuOps", ops)
    drafts = _draft_model(checkpoints(draft)[0], tree_width=width)
    llm = _llm(checkpoints(variant)[0], block_size=4, max_num_seqs=8, speculative_config=drafts, **settings)
    assert _tokens(llm, texts, sampling) == expected
    stats = llm.engine.draft_stats
    assert stats.num_draft_tokens > 20
    assert draft != variant or stats.num_accepted_tokens * width > 0.95 * stats.num_draft_tokens
    assert "num_blocks" not in settings or llm.engine.scheduler.stats.num_preemptions > 0
    llm.close()


def test_a_draft_model_encodes_a_prompt_once_for_all_samples(checkpoints: Any, encoded: list[int]) -> None:
    folder, _ = checkpoints("flan-untied")
    llm = _llm(folder, block_size=4, speculative_config=_draft_model(folder))
    _tokens(llm, prompts(18), SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=9, ignore_eos=True))
    assert encoded == [18, 18]
    stats = llm.engine.draft_stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 12
    llm.close()


def test_a_draft_model_that_does_not_fit_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path / "decoder", llama(max_position_embeddings=512))
    save(tmp_path / "short", bart(max_position_embeddings=32))
    for model, message in (
        (tmp_path / "decoder", "LlamaForCausalLM and the target Bart.*both must have an encoder, or neither"),
        (tmp_path / "short", "the draft model's encoder has 32 positions and the target's 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            _llm(checkpoints("bart")[0], speculative_config=_draft_model(model))


def test_drafts_are_looked_up_in_the_prompt_too(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = checkpoints("bart")
    llm = _llm(folder, speculative_config=NGRAM)
    prompt = list(range(40, 97)) + list(range(3, 10))
    (expected,) = generate(model, prompt, 3)
    drafted: list[tuple[int, ...]] = []
    launch = llm.engine._runner.launch

    def noted(step: Any) -> None:
        drafted.extend(tuple(draft.token_ids) for draft in step.drafts)
        launch(step)

    monkeypatch.setattr(llm.engine._runner, "launch", noted)
    assert _tokens(llm, [prompt], GREEDY.changed(max_tokens=3)) == [[expected]]
    after = prompt.index(expected[0]) + 1
    assert drafted[0] == tuple(prompt[after : after + len(drafted[0])])
    llm.close()


# ---------------------------------------------------------------------- formats and limits


@pytest.mark.parametrize("variant", ["t5", "flan-untied", "flan-silu"])
def test_int8_gives_the_same_tokens_alone_and_in_any_batch(variant: str, checkpoints: Any) -> None:
    folder, _ = checkpoints(variant)
    llm = _llm(folder, quantization="int8", block_size=4, enable_prefix_caching=False)
    together = _tokens(llm, PROMPTS, GREEDY)
    assert [_tokens(llm, [text], GREEDY)[0] for text in PROMPTS] == together
    llm.close()


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "int8"])
def test_other_types_of_pages_hold_cross_attention_too(kv_cache_dtype: str, checkpoints: Any) -> None:
    folder, model = checkpoints("flan-untied")
    llm = _llm(folder, kv_cache_dtype=kv_cache_dtype)
    found = [outputs[0][:2] for outputs in _tokens(llm, PROMPTS, GREEDY)]
    expected = [generate(model, prompt, 2)[0] for prompt in PROMPTS]
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 4
    llm.close()


def test_what_an_encoder_decoder_model_cannot_do_is_refused(checkpoints: Any) -> None:
    folder, _ = checkpoints("bart")
    llm = _llm(folder)
    (long,) = prompts(65)
    with pytest.raises(InvalidRequest, match="65 tokens and the model's encoder takes at most 64"):
        llm.generate([{"prompt_token_ids": long}], GREEDY)
    with pytest.raises(InvalidRequest, match="prompt_logprobs is not available"):
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(prompt_logprobs=1))
    (result,) = llm.generate(
        [{"prompt_token_ids": long[:64]}], SamplingParams(temperature=0, ignore_eos=True, max_tokens=500)
    )
    assert len(result.outputs[0].token_ids) == 63  # the decoder has 64 positions, one is its start token
    assert result.outputs[0].finish_reason == "length"
    llm.close()
    for setting in (
        {"kv_offload_gb": 1.0, "kv_offload_dir": str(folder), "role": "prefill"},
        {"weights_memory_gb": 1.0},
    ):
        with pytest.raises(ConfigError, match="not available for encoder-decoder models"):
            _llm(folder, **setting)
    with pytest.raises(ConfigError, match="leave no block"):
        _llm(folder, max_num_batched_tokens=10, max_num_seqs=4)


def test_a_step_bounds_the_prompt_that_its_encoder_takes(checkpoints: Any) -> None:
    folder, model = checkpoints("flan-untied")
    llm = _llm(folder, max_num_batched_tokens=40, max_num_seqs=8, block_size=8, itl_goal="1")
    texts = prompts(40, 33, 20, 39, 1, 40)
    assert _tokens(llm, texts, GREEDY) == [generate(model, text, 14) for text in texts]
    with pytest.raises(InvalidRequest, match="41 tokens and the model's encoder takes at most 40"):
        llm.generate([{"prompt_token_ids": prompts(41)[0]}], GREEDY)
    llm.close()


def test_a_forced_first_token_follows_the_start_token(checkpoints: Any, tmp_path: Path) -> None:
    _, model = checkpoints("flan-untied")
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"decoder_start_token_id": 4, "forced_bos_token_id": 9}'
    )
    llm = _llm(tmp_path)
    (prompt,) = prompts(12)
    expected = model.generate(
        torch.tensor([prompt]),
        decoder_start_token_id=4,
        forced_bos_token_id=9,
        max_new_tokens=15,
        do_sample=False,
    )
    assert _tokens(llm, [prompt], GREEDY)[0][0] == expected[0, 2:].tolist()
    llm.close()


# ---------------------------------------------------------------------- the operations of a GPU, here on the CPU


class PaddedCrossOps(CrossCudaOps):
    """Pads decodes as graphs do, and runs at once what a graph would have captured."""

    def __init__(self, model: Any, pool: Any, limits: Any, device: Any, adapters: Any = None) -> None:
        super().__init__(model, pool, limits, device, adapters)
        self._graphs = EagerGraphs(model, pool, self._inputs, self._drafts, limits, adapters)
        self._graphs._prompt_shapes = []


def _with_adapters(llm: LLM, model: Any) -> None:
    """Adds adapters "0" and "1" of every projection."""
    for seed in range(2):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                shapes = {"A": (2, module.in_features), "B": (module.out_features, 2)}
                for which, shape in shapes.items():
                    tensors[f"base_model.model.{name}.lora_{which}.weight"] = (
                        torch.randn(shape, generator=generator) * 0.3
                    )
        llm.add_adapter(str(seed), tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 2})


@pytest.mark.parametrize(("variant", "ops", "quantization", "drafts"), [
    ("flan-untied", None, "int8", TREES), ("flan-untied", PaddedCrossOps, "none", None),
    ("bart", CrossCudaOps, "none", NGRAM),
])  # fmt: skip
def test_adapters_give_the_same_tokens_preempted_on_any_device(
    variant: str, ops: Any, quantization: str, drafts: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = checkpoints(variant)
    inputs = [{"prompt_token_ids": text} for text in 3 * prompts(5, 16, 11, 20)]
    names = [name for name in (None, "0", "1") for _ in range(4)]  # of the same four prompts

    def tokens(**settings: Any) -> tuple[LLM, list[list[list[int]]]]:
        llm = _llm(folder, enable_lora=True, block_size=4, quantization=quantization, **settings)
        _with_adapters(llm, model)
        results = llm.generate(inputs, 3 * _mixed(), adapter=names, use_tqdm=False)
        llm.engine.check_integrity()
        llm.close()
        return llm, [[list(output.token_ids) for output in result.outputs] for result in results]

    _, expected = tokens()
    assert len({str(answers) for answers in expected}) == len(expected)
    if ops is not None:
        monkeypatch.setattr("quire.engine.build.runner.CrossCpuOps", ops)
    llm, found = tokens(num_blocks=40, max_num_seqs=8, speculative_config=drafts)
    assert found == expected
    assert llm.engine.scheduler.stats.num_preemptions > 0
    assert (llm.engine.draft_stats.num_drafts > 0) == (drafts is not None)


def _triton_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by Triton's interpreter, with the plans that a GPU's steps have."""
    plain = LayerFactory.kernel

    def kernel(self: LayerFactory, operation: str) -> Any:
        return load("attention", "triton") if operation == "attention" else plain(self, operation)

    def planner(config: Any, limits: Any, layout: Any, device: Any) -> Any:
        return load("attention", "triton").StepPlanner(
            limits.max_num_seqs + 1, config.num_heads, config.num_kv_heads, config.head_dim, device,
            max_tokens=limits.max_num_batched_tokens, max_context=limits.max_model_len,
            block_size=layout.block_size, kv_dtype=layout.dtype, dtype=limits.activation_dtype,
        )  # fmt: skip

    monkeypatch.setattr(LayerFactory, "kernel", kernel)
    monkeypatch.setattr("quire.runner.cuda.attention_planner", planner)
    monkeypatch.setattr("quire.runner.cross_cuda.attention_planner", planner)


@pytest.mark.parametrize(("variant", "ops", "by_triton", "drafts"), [
    ("flan-untied", CrossCudaOps, False, None), ("bart", PaddedCrossOps, False, None),
    ("t5", CrossCudaOps, False, TREES), ("bart", PaddedCrossOps, False, TREES),
    ("flan-untied", PaddedCrossOps, False, NGRAM), ("t5", PaddedCrossOps, True, NGRAM),
])  # fmt: skip
def test_the_operations_of_a_gpu_give_the_same_tokens(
    variant: str, ops: Any, by_triton: bool, drafts: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoints(variant)
    settings = {"block_size": 4, "num_blocks": 18, "max_num_seqs": 6}
    texts = prompts(5, 21) if by_triton else prompts(5, 16, 11, 20, 9)
    sampling = [_mixed()[i % 4] for i in range(len(texts))]
    if by_triton:  # an interpreter is slow
        sampling = [GREEDY.changed(max_tokens=4), GREEDY.changed(max_tokens=3)]
    expected = _tokens(_llm(folder, **settings), texts, sampling)
    monkeypatch.setattr("quire.engine.build.runner.CrossCpuOps", ops)
    if by_triton:
        if "triton" not in alternatives("attention"):
            pytest.skip("Triton does not run on this machine")
        _triton_attention(monkeypatch)
    llm = _llm(folder, **settings, speculative_config=drafts)
    assert isinstance(llm.engine._runner._ops, CrossCudaOps)
    if drafts is not None:
        _draft_mostly_right(llm.engine, texts, expected)
    assert _tokens(llm, texts, sampling) == expected
    assert by_triton or llm.engine.scheduler.stats.num_preemptions > 0
    assert (llm.engine.draft_stats.num_accepted_tokens > 0) == (drafts is not None)
    llm.close()
