"""Beam search gives the tokens of `transformers`, however it is batched, chunked, preempted or mixed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from quire import LLM, SamplingParams
from quire.core.errors import InvalidRequest
from tests.models.checkpoints import VARIANTS, prompts, save

PROMPTS = prompts(5, 9, 14)
ENDS = (7, 8, 20)  # beside the model's own: enough that hypotheses end at different lengths
MAX_TOKENS = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "committed at once": {"steps_in_flight": 0},
    "chunks": {"max_num_batched_tokens": 5, "block_size": 2},
    "tiny pool": {"block_size": 2, "num_blocks": 90, "max_num_batched_tokens": 24},
    "tiny pool, committed at once": {"block_size": 4, "num_blocks": 52, "steps_in_flight": 0},
    "no sharing": {"share": False, "block_size": 4},
}


@pytest.fixture(scope="module", params=["llama", "opt"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(folder, VARIANTS[request.param]())


def _beams(width: int, penalty: float, early: bool | str, **others: Any) -> SamplingParams:
    return SamplingParams(
        n=width, use_beam_search=True, length_penalty=penalty, early_stopping=early, max_tokens=MAX_TOKENS,
        stop_token_ids=ENDS, **others,
    )  # fmt: skip


def _reference(
    model: Any, prompt: list[int], asked: SamplingParams, ends: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """(output, log probability) of each hypothesis."""
    config = GenerationConfig(
        num_beams=asked.num_sequences, num_return_sequences=asked.n, length_penalty=asked.length_penalty,
        early_stopping=asked.early_stopping, max_new_tokens=asked.max_tokens, min_new_tokens=asked.min_tokens,
        repetition_penalty=asked.repetition_penalty, eos_token_id=list(ends), pad_token_id=0, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
    outputs = []
    for index, tokens in enumerate(found.sequences[:, len(prompt) :].tolist()):
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        if asked.num_sequences == 1:  # greedy search there, which tells no score
            outputs.append((tokens[:end], 0.0))
        else:
            outputs.append((tokens[:end], float(found.sequences_scores[index]) * end**asked.length_penalty))
    return outputs


def _llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), dtype="float32", quantization="none", use_tqdm=False, **settings)


def _check(llm: LLM, model: Any, asked: list[SamplingParams]) -> None:
    """All of PROMPTS with all that is asked, at once."""
    pairs = [(prompt, one) for prompt in PROMPTS for one in asked]
    results = llm.generate([prompt for prompt, _ in pairs], [one for _, one in pairs], use_tqdm=False)
    for (prompt, one), result in zip(pairs, results, strict=True):
        if not one.use_beam_search:
            continue
        ends = tuple(sorted({*one.stop_token_ids, *llm.engine.limits.eos_token_ids}))
        expected = _reference(model, prompt, one, ends)
        assert [output.token_ids for output in result.outputs] == [tokens for tokens, _ in expected], one
        for output, (tokens, score) in zip(result.outputs, expected, strict=True):
            assert output.finish_reason == ("stop" if tokens[-1] in ends else "length")
            assert output.stop_reason == (tokens[-1] if tokens[-1] in one.stop_token_ids else None)
            if one.num_sequences > 1:
                assert output.cumulative_logprob == pytest.approx(score, abs=1e-4)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks


def test_hypotheses_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    with _llm(folder) as llm:
        _check(llm, model, [
            _beams(width, penalty, early)
            for width in (1, 2, 4, 8) for penalty in (0.0, 1.0, 2.0) for early in (True, False, "never")
        ])  # fmt: skip


def test_the_widest_search_is_that_of_transformers_too(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    with _llm(folder) as llm:
        _check(llm, model, [_beams(32, 1.0, False)])


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_no_hypothesis(checkpoint: tuple[Path, Any], name: str) -> None:
    folder, model = checkpoint
    with _llm(folder, **SETTINGS[name]) as llm:
        _check(llm, model, [_beams(2, 0.0, True), _beams(4, 1.0, False), _beams(8, 2.0, "never")])
        if "tiny" in name:
            assert llm.engine.scheduler.stats.num_preemptions


def test_settings_change_no_hypothesis_of_int8_pages(tmp_path: Path) -> None:
    """Rows of int8 products have the same bits in every batch, so that rounding to pages cannot differ."""
    save(tmp_path, VARIANTS["llama"]())
    asked = [_beams(2, 0.0, True), _beams(4, 1.0, False), _beams(8, 2.0, "never")]
    pairs = [(prompt, one) for prompt in PROMPTS for one in asked]
    found = {}
    for name, settings in SETTINGS.items():
        with LLM(str(tmp_path), kv_cache_dtype="int8", use_tqdm=False, **settings) as llm:
            results = llm.generate(
                [prompt for prompt, _ in pairs], [one for _, one in pairs], use_tqdm=False
            )  # fmt: skip
            found[name] = [_tokens(result) for result in results]
            llm.engine.check_integrity()
            assert "tiny" not in name or llm.engine.scheduler.stats.num_preemptions
    assert found == dict.fromkeys(SETTINGS, found["as usual"])


def test_biases_and_penalties_apply_to_log_probabilities(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    with _llm(folder) as llm:
        _check(
            llm, model, [_beams(4, 1.0, False, min_tokens=6), _beams(3, 1.0, False, repetition_penalty=1.3)]
        )
        result = llm.generate(
            [PROMPTS[0]], _beams(4, 1.0, False, allowed_token_ids=(3, 4, 5, 9), logit_bias={3: 2.0})
        )[0]
        assert {token for output in result.outputs for token in output.token_ids} <= {3, 4, 5, 9}


def test_beams_share_a_batch_with_all_other_requests(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    others = [
        SamplingParams(temperature=0.0, max_tokens=16),
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=10),
        SamplingParams(temperature=1.0, seed=4, n=1, best_of=2, max_tokens=9),
    ]
    pairs = [(prompt, one) for prompt in PROMPTS for one in others]
    with _llm(folder, block_size=4, num_blocks=90) as llm:
        alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in pairs]
        asked = [*others, _beams(4, 1.0, False), _beams(2, 2.0, True)]
        _check(llm, model, asked)
        every = llm.generate(
            [prompt for prompt in PROMPTS for _ in asked], asked * len(PROMPTS), use_tqdm=False
        )
        mixed = [result for i, result in enumerate(every) if not asked[i % len(asked)].use_beam_search]
        assert [_tokens(one) for one in mixed] == [_tokens(one) for one in alone]


def test_logprobs_add_up_and_name_the_rank(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    with _llm(folder) as llm:
        asked = _beams(3, 1.0, False, logprobs=4, prompt_logprobs=1)
        result = llm.generate([PROMPTS[1]], asked, use_tqdm=False)[0]
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(PROMPTS[1])
        for output in result.outputs:
            assert output.logprobs is not None
            entries = [at[token] for at, token in zip(output.logprobs, output.token_ids, strict=True)]
            assert output.cumulative_logprob == pytest.approx(sum(one.logprob for one in entries), abs=1e-4)
            for at, entry in zip(output.logprobs, entries, strict=True):
                better = [one for one in at.values() if one.logprob > entry.logprob + 1e-5]
                assert entry.rank == 1 + len(better) or entry.rank > 4


def test_beam_search_is_a_call_of_its_own(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    with _llm(folder) as llm:
        results = llm.beam_search(PROMPTS, beam_width=4, max_tokens=8, num_return=2, use_tqdm=False)
        values = [[o.cumulative_logprob / len(o.token_ids) for o in result.outputs] for result in results]
        assert [len(one) for one in values] == [2] * 3
        assert all(one == sorted(one, reverse=True) for one in values)
        assert len(llm.beam_search(PROMPTS[0], use_tqdm=False)[0].outputs) == 4


@pytest.mark.parametrize(("wrong", "param"), [
    ({"n": 33}, "n"),
    ({"best_of": 40}, "best_of"),
    ({"n": 4, "best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"length_penalty": float("nan")}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"stop": ["."]}, "stop"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
])  # fmt: skip
def test_what_beams_cannot_do_is_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{"use_beam_search": True, **wrong})
    assert refused.value.param == param


def _tokens(result: Any) -> list[list[int]]:
    return [output.token_ids for output in result.outputs]
