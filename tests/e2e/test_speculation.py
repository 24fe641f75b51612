"""Speculation on the built-in model: bit for bit the same answers, in fewer steps where the text repeats."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire_lab.baselines.synthetic_drafts import SyntheticProposer

PASSAGE = (
    "The lighthouse on the northern cape was built in 1874, after three ships were lost in a single winter. "
    "Its lamp burned rapeseed oil until 1911, when a paraffin burner took its place."
)
ANIMALS = (
    'Animals as JSON:\n{"name": "Tom", "legs": 4, "kind": "cat"}\n{"name": "Rex", "legs": 4, "kind": "dog"}\n'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "legs", "kind"],
    "additionalProperties": False,
}
ASKED = [
    (f"{PASSAGE}\n{PASSAGE}\nThe lighthouse on", SamplingParams(temperature=0.0, max_tokens=40)),
    (f"{PASSAGE}\n{PASSAGE}\nThe lighthouse", SamplingParams(temperature=0.6, seed=4, n=2, max_tokens=24)),
    (f"{PASSAGE}\n{PASSAGE}\n", SamplingParams(temperature=0.0, max_tokens=60, stop=["winter"], logprobs=3)),
    (ANIMALS, SamplingParams(temperature=0.0, max_tokens=60, structured={"json": SCHEMA})),
    (ANIMALS, SamplingParams(temperature=0.8, seed=6, max_tokens=60, structured={"json": SCHEMA})),
    ("1 2 3 4 1 2 3 4 1 2 3", SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.3)),
    ("1 2 3 4 1 2 3 4 1 2 3", SamplingParams(max_tokens=24, seed=2, min_tokens=9, bad_words=[" 4"])),
    (f"{PASSAGE}\nIts lamp", SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=20)),
]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return _answers(num_blocks=400)


def _answers(proposer: SyntheticProposer | None = None, **settings: Any) -> list[Any]:
    llm = LLM(**settings)
    if proposer is not None:
        assert llm.engine.speculation is not None
        llm.engine.speculation.propose_with(proposer)
    results = llm.generate([text for text, _ in ASKED], [one for _, one in ASKED], use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks
    stats = llm.engine.draft_stats
    if "speculative_config" in settings:
        assert stats.num_draft_tokens >= stats.num_accepted_tokens > 0
    llm.close()
    return [
        [
            (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
            for one in result.outputs
        ]
        for result in results
    ]


@pytest.mark.parametrize("settings", [
    {"adaptive": False, "num_speculative_tokens": 4}, {"adaptive": True}, {"steps_in_flight": 0, "adaptive": False},
    {"num_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 48, "adaptive": False},
    {"adaptive": False, "num_speculative_tokens": 4, "tree_width": 4},
])  # fmt: skip
def test_answers_are_the_same(plain: list[Any], settings: dict[str, Any]) -> None:
    of_drafts = ("adaptive", "num_speculative_tokens", "tree_width")
    speculative = {"method": "ngram"} | {k: v for k, v in settings.items() if k in of_drafts}
    others = {"num_blocks": 400} | {k: v for k, v in settings.items() if k not in of_drafts}
    assert _answers(speculative_config=speculative, **others) == plain


def test_answers_are_the_same_bit_for_bit_whichever_branch_is_followed(plain: list[Any]) -> None:
    """Drafts whose first branch is mostly wrong, so that accepted pages move and later tokens read them there."""
    llm = LLM(num_blocks=40)
    tokenizer = llm.get_tokenizer()
    llm.close()
    assert tokenizer is not None
    answers = {
        (tuple(tokenizer.encode(text)), index): tuple(answer[1])
        for (text, _), result in zip(ASKED, plain, strict=True)
        for index, answer in enumerate(result)
    }
    proposer = SyntheticProposer(answers, 49152, acceptance_rate=0.4, branch_acceptance=0.9)
    speculative = {"method": "ngram", "adaptive": False, "num_speculative_tokens": 4, "tree_width": 3}
    assert _answers(proposer, num_blocks=400, speculative_config=speculative) == plain


def test_text_that_repeats_takes_fewer_steps() -> None:
    llm = LLM(num_blocks=200, speculative_config={"method": "ngram", "adaptive": False})
    llm.generate([ASKED[0][0]], ASKED[0][1], use_tqdm=False)
    assert llm.engine.stats.num_generated_tokens == 40
    assert llm.engine.stats.num_steps < 25
    llm.close()
