"""JSON that a limit is about to cut off ends in time."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from quire.core.structured import StructuredOutput
from quire.grammar.closing import HORIZON, MARGIN, Closer
from quire.grammar.matcher import Matcher
from quire.grammar.vocabulary import Vocabulary

ITEM = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "color": {"enum": ["red", "green"]}},
    "required": ["text", "color"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "items": {"type": "array", "items": ITEM},
    },
    "required": ["name", "age", "items"],
    "additionalProperties": False,
}
BEGUN = [
    "",
    '{"name": "Ann and then some more',
    '{"name": "A\\\\',
    '{"name": "Ann", "age": 12',
    '{"name": "Ann", "age": 12, "items": [',
    '{"name": "Ann", "age": 12, "items": [{"text": "a", "color": "red"}, {"te',
]


@pytest.fixture(scope="module")
def closer(real_vocabulary: Vocabulary) -> Closer:
    return Closer(real_vocabulary)


def begun(start: Callable[..., Matcher], vocabulary: Vocabulary, text: str, schema: Any) -> Matcher:
    matcher = start(StructuredOutput.json(schema))
    assert vocabulary.encode is not None
    matcher.advance(vocabulary.encode(text))
    return matcher


@pytest.mark.parametrize("text", BEGUN)
@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["schema", "object"])
def test_from_anywhere_the_text_becomes_whole(
    closer: Closer, real_vocabulary: Vocabulary, start: Callable[..., Matcher], text: str, schema: Any
):
    matcher = begun(start, real_vocabulary, text, schema)
    left = next(left for left in range(1, HORIZON + 1) if closer.token_to_end(matcher, left) is not None)
    written, num_left = text.encode(), left
    while not matcher.is_terminated:
        token_id = closer.token_to_end(matcher, num_left)
        assert token_id is not None
        written += real_vocabulary.tokens[token_id]
        matcher.advance([token_id])
        num_left -= 1
    assert num_left == 0
    jsonschema.validate(json.loads(written), schema or {"type": "object"})


def test_it_waits_while_there_is_room_and_gives_up_when_there_is_none(
    closer: Closer, real_vocabulary: Vocabulary, start: Callable[..., Matcher]
):
    matcher = begun(start, real_vocabulary, '{"name": "Ann', SCHEMA)
    forced = [left for left in range(1, 60) if closer.token_to_end(matcher, left) is not None]
    assert forced == list(range(forced[0], forced[0] + MARGIN + 1))
    assert not matcher.is_terminated  # it walks with a copy
