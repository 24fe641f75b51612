"""Beam search on the built-in model in full precision: hypotheses of `transformers`, beside requests of all kinds."""

import torch
from transformers import GenerationConfig

from quire import LLM, SamplingParams
from tests.e2e.reference import reference_model

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was a"]
MAX_TOKENS = 10


def test_hypotheses_on_the_built_in_model_are_those_of_transformers() -> None:
    sampling = SamplingParams(n=3, best_of=4, use_beam_search=True, max_tokens=MAX_TOKENS)
    others = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=20),
        SamplingParams(temperature=0.8, seed=1, max_tokens=20, structured={"regex": "[a-c]{4,9}"}),
    ]
    with LLM(dtype="float32", quantization="none", block_size=4, num_blocks=400, use_tqdm=False) as llm:
        texts = [*PROMPTS, *PROMPTS]
        results = llm.generate(texts, [*[sampling] * len(PROMPTS), *others], use_tqdm=False)
        alone = [llm.generate([p], one, use_tqdm=False)[0] for p, one in zip(PROMPTS, others, strict=True)]
        llm.engine.check_integrity()
        ends = list(llm.engine.limits.eos_token_ids)
    config = GenerationConfig(
        num_beams=4, num_return_sequences=3, max_new_tokens=MAX_TOKENS, eos_token_id=ends, pad_token_id=ends[0],
        do_sample=False,
    )  # fmt: skip
    for result in results[: len(PROMPTS) - 1]:  # the reference is slow
        tokens = result.prompt_token_ids
        with torch.inference_mode():
            found = reference_model().generate(
                torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), generation_config=config
            )
        for output, expected in zip(result.outputs, found[:, len(tokens) :].tolist(), strict=True):
            assert output.token_ids == expected[: len(output.token_ids)]
            assert set(expected[len(output.token_ids) :]) <= set(ends)
    for mixed, single in zip(results[len(PROMPTS) :], alone, strict=True):
        assert [o.text for o in mixed.outputs] == [o.text for o in single.outputs]
