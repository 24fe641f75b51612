"""SamplingParams: any value is served or refused by name, and no value is larger than its limit."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.core import sampling as limits
from quire.core.errors import InvalidRequest

NAMES = [field.name for field in fields(SamplingParams)]
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, 2**64, 10**400, -(10**4000)]),
    st.floats(),
    st.booleans(),
)
SCALARS = st.one_of(st.none(), NUMBERS, st.text(), st.binary(max_size=5), st.just(object()))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner), max_leaves=8
)
STRUCTURED = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("json", "json_object", "regex", "grammar", "choice"), VALUES)
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES | STRUCTURED, max_size=4))
def test_any_value_is_served_or_refused_by_name(given: dict[str, Any]) -> None:
    refused = None
    try:
        served = SamplingParams(**given)
    except InvalidRequest as error:
        refused = error
    if refused is None:
        assert served.changed() == served
    else:
        assert refused.param is not None
        assert len(str(refused)) < 2000


@pytest.mark.parametrize(
    ("field", "largest", "over"),
    [
        ("n", limits.MAX_SEQUENCES, limits.MAX_SEQUENCES + 1),
        ("best_of", limits.MAX_SEQUENCES, 10**9),
        ("stop", ["x"] * limits.MAX_STOPS, ["x"] * (limits.MAX_STOPS + 1)),
        ("stop", "x" * limits.MAX_STOP_CHARACTERS, "x" * 400_000),
        ("bad_words", ["x"] * limits.MAX_BAD_WORDS, ["x"] * (limits.MAX_BAD_WORDS + 1)),
        ("bad_words", ["x" * limits.MAX_BAD_WORD_CHARACTERS], ["ab " * 20_000]),
        ("bad_words_token_ids", [[1] * limits.MAX_BAD_WORD_TOKENS], [[1] * (limits.MAX_BAD_WORD_TOKENS + 1)]),
        ("bad_words_token_ids", [[1] * 64] * 256, [[1] * 64] * 257),
        ("stop_token_ids", [1] * limits.MAX_TOKEN_IDS, [1] * (limits.MAX_TOKEN_IDS + 1)),
        ("allowed_token_ids", [1] * limits.MAX_TOKEN_IDS, [1] * (limits.MAX_TOKEN_IDS + 1)),
        ("logit_bias", dict.fromkeys(range(4096), 1.0), dict.fromkeys(range(4097), 1.0)),
        ("max_tokens", 2**63 - 1, 2**63),
        ("logprobs", 20, 21),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_each_limit_is_kept_and_named(field: str, largest: Any, over: Any) -> None:
    assert SamplingParams(**{field: largest}) is not None
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: over})
    assert refused.value.param == field.removesuffix("_token_ids") or refused.value.param == field


def test_no_more_of_an_endless_list_is_read_than_its_limit() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    with pytest.raises(InvalidRequest, match="more than 262144 token ids"):
        SamplingParams(stop_token_ids=endless())  # type: ignore[arg-type]
