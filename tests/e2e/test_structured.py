"""Structured output on the built-in model: answers keep to their form, and nobody else's tokens change for it."""

import json
import re
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutput
from quire.core.errors import InvalidRequest

ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "tags": {"type": "array", "items": {"enum": ["small", "large"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "legs", "kind", "tags"],
    "additionalProperties": False,
}
PROMPT = "Here is an animal as JSON:\n"
PLAIN = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=3, max_tokens=24)]
FORMED = [
    SamplingParams(temperature=0.0, max_tokens=80, structured={"json": ANIMAL}),
    SamplingParams(seed=7, max_tokens=80, structured={"json": ANIMAL}),
    SamplingParams(seed=8, max_tokens=80, structured={"regex": r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,2}\."}),
    SamplingParams(temperature=0.0, max_tokens=9, structured={"json": ANIMAL}),
    SamplingParams(seed=9, max_tokens=40, structured={"choice": ["a cat", "a dog", "a parrot"]}),
]
PROMPTS = ["My favourite animal is", "Once upon a time"]


def tokens(llm: LLM, sampling: list[SamplingParams], prompts: list[str]) -> list[list[int]]:
    results = llm.generate(prompts, sampling, use_tqdm=False)
    llm.engine.check_integrity()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Each request's tokens with nobody beside it: the formed ones, then the plain ones."""
    prompts = [PROMPT] * len(FORMED) + PROMPTS
    return [tokens(llm, [one], [prompt])[0] for one, prompt in zip(FORMED + PLAIN, prompts, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"steps_in_flight": 0},
        {"steps_in_flight": 1},
        {
            "num_blocks": 12,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 9,
            "steps_in_flight": 1,
            "block_size": 8,
        },
        {
            "num_blocks": 12,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 9,
            "steps_in_flight": 0,
            "block_size": 8,
        },
    ],
    ids=["committed at once", "one in flight", "tiny pool", "tiny pool, committed at once"],
)
def test_tokens_do_not_depend_on_neighbours_chunks_or_preemption(alone, options: dict[str, Any]):
    with LLM(use_tqdm=False, max_model_len=120, **options) as llm:
        together = tokens(llm, FORMED + PLAIN, [PROMPT] * len(FORMED) + PROMPTS)
        assert together == alone
        if "num_blocks" in options:
            assert llm.engine.scheduler.stats.num_preemptions


def test_several_samples_each_keep_to_the_form(llm):
    sampling = SamplingParams(n=4, seed=11, max_tokens=80, logprobs=2, structured={"json": ANIMAL})
    (result,) = llm.generate(PROMPT, sampling, use_tqdm=False)
    texts = [output.text for output in result.outputs]
    for output in result.outputs:
        jsonschema.validate(json.loads(output.text), ANIMAL)
        assert output.finish_reason == "stop"
        assert len(output.logprobs) == len(output.token_ids)
    assert len(set(texts)) > 1


def test_beams_each_keep_to_the_form_and_one_beam_is_greedy(llm):
    def beams(width: int) -> SamplingParams:
        return SamplingParams(n=width, use_beam_search=True, max_tokens=80, structured={"json": ANIMAL})

    several, one = llm.generate([PROMPT] * 2, [beams(3), beams(1)], use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=80, structured={"json": ANIMAL})
    (expected,) = llm.generate(PROMPT, greedy, use_tqdm=False)
    assert one.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len({output.text for output in several.outputs}) == 3
    for output in several.outputs:
        jsonschema.validate(json.loads(output.text), ANIMAL)
        assert output.finish_reason == "stop"


def test_a_form_that_is_cut_off_says_so(llm):
    (result,) = llm.generate(
        PROMPT, SamplingParams(max_tokens=5, structured={"json": ANIMAL}), use_tqdm=False
    )
    assert result.outputs[0].finish_reason == "length"
    assert len(result.outputs[0].token_ids) == 5


def test_stop_strings_and_min_tokens_go_with_a_form(llm):
    sampling = SamplingParams(seed=1, max_tokens=80, stop=['"kind"'], structured={"json": ANIMAL})
    (result,) = llm.generate(PROMPT, sampling, use_tqdm=False)
    assert re.search(r'"legs":\s*\d\s*,\s*$', result.outputs[0].text)
    assert result.outputs[0].stop_reason == '"kind"'
    sampling = SamplingParams(
        temperature=0, max_tokens=60, min_tokens=20, structured=StructuredOutput.regex("(ha ?)+")
    )
    (result,) = llm.generate("Laugh:", sampling, use_tqdm=False)
    assert re.fullmatch("(ha ?)+", result.outputs[0].text)
    assert len(result.outputs[0].token_ids) >= 20


def test_a_bad_form_is_one_clear_line_and_the_engine_serves_on(llm):
    for structured, said in (
        (StructuredOutput.json({"properties": {"a": {"not": {}}}}), "#/properties/a/not"),
        (StructuredOutput.regex("(a"), "unclosed group"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=said) as refusal:
                llm.generate(["Hi", "Hello"], SamplingParams(structured=structured), use_tqdm=False)
            assert refusal.value.param == "structured"
    sampling = SamplingParams(
        temperature=0, max_tokens=20, allowed_token_ids=(5,), structured={"choice": ["yes"]}
    )
    with pytest.raises(Exception, match="none of the tokens that the choice allows"):
        llm.generate("Hi", sampling, use_tqdm=False)
    (result,) = llm.generate(
        "Yes or no?", SamplingParams(structured={"choice": ["yes", "no"]}), use_tqdm=False
    )
    assert result.outputs[0].text in ("yes", "no")
