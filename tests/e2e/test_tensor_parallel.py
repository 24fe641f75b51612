"""Several ranks on the built-in model, in int8: the tokens and logprobs of one rank, bit for bit.

The model has 9 query and 3 key-value heads: two ranks hold 6 and 3 of the former, three hold 3 each.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutput
from tests.e2e.conftest import FEW, TINY

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=7)
ADAPTERS = ("smollm-med-5epochs", "smollm-med-100epochs")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
# One after the other: swapped out while a step is in flight; computed again, with drafts, and none in flight.
SETTINGS: dict[str, dict[str, Any]] = {
    "swap, one step in flight": {**TINY, "preemption_mode": "swap"},
    "recompute, drafts, none in flight": {
        **TINY, "num_blocks": 30, "preemption_mode": "recompute", "steps_in_flight": 0, "speculative_config": NGRAM,
    },
}  # fmt: skip


def _facts(results: list[Any]) -> list[Any]:
    return [
        [(o.token_ids, o.cumulative_logprob, o.logprobs, result.prompt_logprobs) for o in result.outputs]
        for result in results
    ]


def _everything(llm: LLM, prompts: list[list[int]], adapters: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Requests of every kind, and all that they return."""
    few = [{"prompt_token_ids": ids} for ids in prompts[FEW]]
    before = llm.engine.scheduler.stats.num_preemptions
    mixed = [GREEDY if i % 2 else SEEDED for i in range(len(few))]
    yield "greedy and seeded", _facts(llm.generate(few, mixed, use_tqdm=False))
    assert llm.engine.scheduler.stats.num_preemptions > before
    hits = llm.engine.memory.stats.prefix_hits
    yield "cached", _facts(llm.generate(few[:2], GREEDY, use_tqdm=False))
    assert llm.engine.memory.stats.prefix_hits > hits
    yield "n", _facts(llm.generate(few[2], SEEDED.changed(n=3, logprobs=2), use_tqdm=False))
    scored = GREEDY.changed(prompt_logprobs=1, max_tokens=2)
    yield "prompt logprobs", _facts(llm.generate(few[3], scored, use_tqdm=False))
    yield "beams", _facts(llm.beam_search(few[4], 3, max_tokens=8, use_tqdm=False))
    words = GREEDY.changed(structured=StructuredOutput.regex("(red|green|blue) [0-9]{3}"))
    yield "grammar", _facts(llm.generate([few[5], few[6]], words, use_tqdm=False))
    if adapters:
        names = [*adapters, None, adapters[0]]
        answers = llm.generate(few[:4], GREEDY.changed(max_tokens=12), adapter=names, use_tqdm=False)
        yield "adapters", _facts(answers)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks


@pytest.mark.parametrize(("setting", "sizes"), zip(SETTINGS, ((2, 3), (2,)), strict=True))
def test_ranks_give_the_bits_of_one_rank(prompts, shared, setting, sizes):
    folder = shared / "adapters"
    adapters = ADAPTERS if folder.is_dir() else ()
    modules = {"lora_modules": {name: str(folder / name) for name in adapters}} if adapters else {}
    found: dict[int, dict[str, Any]] = {}
    for size in (1, *sizes):
        options = {**SETTINGS[setting], **modules, "tensor_parallel_size": size}
        with LLM(use_tqdm=False, max_model_len=512, **options) as llm:
            found[size] = dict(_everything(llm, prompts, adapters))
    for size in sizes:
        for kind, facts in found[1].items():
            assert found[size][kind] == facts, f"{size} ranks, {kind}"
