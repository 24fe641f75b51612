"""Prompts as Python callers write them: every form there is, and one line for what is none."""

import numpy
import pytest

from quire.core.errors import InvalidRequest
from quire.text.prompts import as_list, prepare, ready_to_sample

IDS = [5, 6]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        (IDS, 1),
        ([IDS, IDS, IDS], 3),
        ((prompt for prompt in ("a", "b")), 2),
        ({"prompt": "a"}, 1),
        (numpy.array(IDS), 1),
        (numpy.array([IDS, IDS, IDS]), 3),
        ([], 0),
    ],
)
def test_one_prompt_is_told_from_several(prompts, count):
    assert len(as_list(prompts)) == count


@pytest.mark.parametrize("prompt", [IDS, numpy.array(IDS), {"prompt_token_ids": numpy.array(IDS)}])
def test_token_ids_may_be_of_numpy(prompt):
    token_ids = prepare(prompt, None).token_ids
    assert token_ids == IDS
    assert {type(token_id) for token_id in token_ids} == {int}


@pytest.mark.parametrize("prompt", [5, None, b"bytes", True])
def test_a_value_that_is_no_prompt_is_named(prompt):
    """Bytes are numbers to Python, which would be answered as token ids."""
    said = f"a prompt is a {type(prompt).__name__}: give text or token ids"
    with pytest.raises(InvalidRequest, match=said):
        as_list(prompt)
    for one in (prompt, {"prompt_token_ids": prompt}):
        if one != {"prompt_token_ids": None}:  # as if it were not given
            with pytest.raises(InvalidRequest, match=said):
                prepare(one, None)


@pytest.mark.parametrize("sampling", [5, {"n": 1}, None])
def test_what_is_no_sampling_parameters_is_named(sampling):
    with pytest.raises(InvalidRequest, match=f"are a {type(sampling).__name__}: give SamplingParams"):
        ready_to_sample(sampling, None)
