"""Every family gives transformers' tokens in fp32, and in int8 the same ones however requests are scheduled."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.models.checkpoints import VARIANTS, prompts, reference_logits, save
from tests.models.paging import only_native

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
TINY = {"block_size": 4, "num_blocks": 26, "max_num_seqs": 5, "max_num_batched_tokens": 9}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "mixed batch": {"max_num_seqs": 8, "block_size": 8},
    "chunked and preempted": {**TINY, "preemption_mode": "recompute"},
}
VARIANT_NAMES = (
    *(
        "phi3",
        "phi3-partial-tied",
        "granite-tied-with-biases",
        "olmo2",
        "smollm3-window-untied",
        "mistral-small",
    ),
    *("gemma-multi-query-wide", "gemma2", "gemma3", "gemma3-untied-256"),
    *("starcoder2", "neox", "neox-one-after-another-tied", "falcon-7b", "falcon-40b", "falcon-rw", "bloom"),
    *("mixtral", "qwen2-moe-dense-layers", "qwen3-moe", "olmoe", "gpt-oss", "olmo3"),
)
# free blocks behind their window, so that none is preempted here: test_windows.py does that
WINDOWED = ("smollm3-window-untied", "gemma2", "gemma3", "gemma3-untied-256", "gpt-oss", "olmo3")
IN_INT8 = ("gpt-oss", "phi3", "granite", "olmo2", "gemma2", "gemma3", "neox", "bloom", "mixtral", "olmoe")


def texts() -> list[list[int]]:
    """Of several lengths; the last two begin like the third."""
    some = prompts(5, 1, 33, 21, 12)
    return [*some, some[2][:24] + [3, 4], some[2][:32]]


def generate(folder: Path, **settings: Any) -> tuple[list[list[int]], int, int]:
    """Tokens of each text, preemptions, and tokens found in the prefix cache."""
    given = [{"prompt_token_ids": text} for text in texts()]
    with LLM(str(folder), device="cpu", use_tqdm=False, max_model_len=64, **settings) as llm:
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        again = llm.generate(given[2:3], GREEDY, use_tqdm=False)
        assert again[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
        llm.engine.check_integrity()
        found = sum(output.num_cached_tokens for output in [*outputs, *again])
        return (
            [list(output.outputs[0].token_ids) for output in outputs],
            llm.engine.scheduler.stats.num_preemptions,
            found,
        )


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_in_fp32_greedy_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """By induction: each token is the best one of transformers, given the tokens before."""
    reference = save(tmp_path, VARIANTS[variant]())
    answers = {}
    for name, settings in SETTINGS.items():
        answers[name], num_preemptions, num_cached = generate(
            tmp_path, dtype="float32", quantization="none", **settings
        )
        assert answers[name] == answers["alone"], name
        if variant not in WINDOWED:
            assert (num_preemptions > 0) == (name == "chunked and preempted")
        assert num_cached > 0
    for text, answer in zip(texts(), answers["alone"], strict=True):
        logits = reference_logits(reference, [*text, *answer])
        assert logits[len(text) - 1 : -1].argmax(-1).tolist() == answer
    tokens = {token for answer in answers["alone"] for token in answer}
    tied = reference.config.tie_word_embeddings  # such models tend to say a token again
    assert len(tokens) > (4 if tied else 20), "answers that hardly differ prove nothing"


@only_native
@pytest.mark.parametrize("variant", IN_INT8)
def test_in_int8_tokens_do_not_depend_on_the_schedule(
    variant: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    answers = {
        name: generate(tmp_path / "model", **settings)[0]
        for name, settings in {**SETTINGS, "without a tape": {"enforce_eager": True}}.items()
    }
    assert all(answer == answers["alone"] for answer in answers.values())
