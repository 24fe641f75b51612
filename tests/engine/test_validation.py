"""Limits: what a request may name and how long it may be, checked alike on both sides of the link."""

import pytest

from quire.core.errors import ContextExceeded, InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.validation import Limits, RequestValidator
from quire.memory.paged import PagedMemory

VOCAB = 37
LIMITS = Limits(VOCAB, max_model_len=32, max_num_seqs=4, eos_token_ids=(2,))


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {VOCAB: 1.0}},
        {"allowed_token_ids": (0, -1)},
        {"bad_words_token_ids": ((1, VOCAB),)},
        {"stop_token_ids": (VOCAB + 5,)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_sampling_parameters_that_name_unknown_tokens_are_refused(values):
    sampling = SamplingParams(temperature=0, **values)
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 37") as caught:
        LIMITS.check(Request("r", [1], sampling))
    assert caught.value.param == next(iter(values))


def test_the_last_token_of_the_vocabulary_may_be_named():
    LIMITS.check(Request("r", [0, VOCAB - 1], SamplingParams(logit_bias={VOCAB - 1: 1.0})))


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "message", "param"),
    [
        ([], {}, InvalidRequest, "the prompt is empty", "prompt"),
        ([1] * 32, {}, ContextExceeded, r"32 tokens and the context is 32.*truncate_prompt_tokens", "prompt"),
        (
            [1, VOCAB],
            {},
            InvalidRequest,
            "token id 37 is outside the vocabulary of 37: use 0 to 36",
            "prompt",
        ),
        ([1, -1], {}, InvalidRequest, "token id -1 is outside", "prompt"),
        ([1], {"n": 5}, InvalidRequest, "n=5 sequences can never run together with max_num_seqs=4", "n"),
    ],
    ids=lambda value: "",
)
def test_what_can_never_run_is_refused_with_its_number(prompt, sampling, kind, message, param):
    with pytest.raises(kind, match=message) as caught:
        LIMITS.check(Request("r", prompt, SamplingParams(**sampling)))
    assert caught.value.param == param


def test_acceptance_decides_seed_length_stop_tokens_and_arrival():
    validator = RequestValidator(LIMITS, PagedMemory(4, 4), seed=0, clock=lambda: 5.0)
    asked = Request("r", [1, 2, 3], SamplingParams(max_tokens=4, stop_token_ids=(7,)), tenant="t")
    first, second = validator.accept(asked), validator.accept(asked)
    assert (first.prompt_token_ids, first.max_len, first.arrival, first.tenant) == ((1, 2, 3), 7, 5.0, "t")
    assert first.stop_token_ids == {2, 7}
    assert first.seed != second.seed
    given = validator.accept(Request("r", [1], SamplingParams(seed=-1, ignore_eos=True, max_tokens=1)))
    assert (given.seed, given.stop_token_ids) == (2**64 - 1, frozenset())


def test_a_missing_max_tokens_is_capped_by_the_pool_and_a_given_one_is_refused():
    validator = RequestValidator(LIMITS, PagedMemory(4, 4), seed=0)
    assert validator.accept(Request("r", [1] * 3, SamplingParams(max_tokens=None))).max_len == 17
    with pytest.raises(InvalidRequest, match=r"may need 7 blocks of 4 tokens and the whole pool has 4"):
        validator.accept(Request("r", [1] * 3, SamplingParams(max_tokens=25)))
