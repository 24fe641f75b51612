"""Every text that a grammar lets through is of its form, and every text of its form is let through."""

import json
import re

import jsonschema
import numpy as np
import pytest

from quire.core.structured import StructuredOutput
from quire.grammar.matcher import GrammarError
from tests.grammar.conftest import LETTERS, allowed, is_complete

SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 8},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "vip": {"type": "boolean"},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        },
        "required": ["user"],
        "additionalProperties": False,
    },
    "enums": {"type": "array", "items": {"enum": ["red", 7, None, True]}, "minItems": 1, "maxItems": 4},
    "anyOf": {"anyOf": [{"const": "none"}, {"type": "array", "items": {"type": "number"}, "maxItems": 2}]},
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"enum": [1, 2]},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "pattern": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "when": {"type": "string", "format": "date"},
        },
        "required": ["id", "when"],
        "additionalProperties": False,
    },
}


def random_text(matcher, vocabulary, seed: int, max_tokens: int = 400) -> bytes:
    """A walk through the grammar that ends where it may; the shortest tokens first, so that it does end."""
    rng = np.random.default_rng(seed)
    text = b""
    for step in range(max_tokens):
        ids = allowed(matcher, vocabulary)
        assert len(ids), "the grammar leaves no token"
        ends = np.intersect1d(ids, vocabulary.end_ids)
        assert is_complete(matcher) == bool(len(ends))
        if len(ends) and (matcher.is_terminated or step > 50 or rng.random() < 0.3):
            matcher.advance([int(ends[0])])
            assert matcher.is_terminated
            matcher.rollback(1)
            assert is_complete(matcher)
            return text
        ids = np.setdiff1d(ids, vocabulary.end_ids)
        if step > 100:
            ids = np.array(sorted(ids, key=lambda one: (vocabulary.tokens[one] not in b'"}],null', one))[:3])
        chosen = int(rng.choice(ids))
        assert chosen not in vocabulary.special_ids
        text += vocabulary.tokens[chosen]
        matcher.advance([chosen])
    pytest.fail(f"no end within {max_tokens} tokens: {text!r}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_is_json_that_the_schema_describes(start, real_vocabulary, name):
    schema = SCHEMAS[name]
    for seed in range(6):
        text = random_text(start(StructuredOutput.json(schema)), real_vocabulary, seed)
        jsonschema.validate(json.loads(text), schema)


def test_a_json_object_is_any_object(start, real_vocabulary):
    for text in ("{}", '{"a": [1, {"b": null}], "ü": "\\n"}'):
        matcher = start(StructuredOutput.json())
        matcher.advance(real_vocabulary.encode(text))
        assert matcher.is_terminated
    for text in ("[1]", "null", '"{}"'):
        assert start(StructuredOutput.json()).accepted(real_vocabulary.encode(text)) == 0


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (StructuredOutput.regex("a(b|bc){1,2}c?"), ["ab", "abb", "abc", "abbc", "abcb", "abcbc", "abbcc"]),
        (StructuredOutput.regex("^(ab|ca)?$"), ["", "ab", "ca"]),
        (StructuredOutput.choice(["abc", "ab", 'a"b\n', "<|end|>"]), ["abc", "ab", 'a"b\n', "<|end|>"]),
        (StructuredOutput.grammar('start: "a" x\nx: "b" | "b" x "c"'), ["ab", "abbc", "abbbcc", "abbbbccc"]),
        (StructuredOutput.grammar('root ::= "ab" ("c" | "a")'), ["abc", "aba"]),
    ],
    ids=["regex", "regex with anchors", "choice", "lark", "gbnf"],
)
def test_a_token_is_allowed_if_and_only_if_some_text_goes_on_with_it(letters_compiler, form, texts):
    """All texts of up to 8 letters are tried; the grammar of the recursive form has longer ones too."""
    grammar = letters_compiler.submit(form).result(30)
    regex = re.compile(form.text) if form.kind == "regex" else None
    seen = set()

    def visit(matcher, text: bytes) -> None:
        ids = set(allowed(matcher, LETTERS).tolist())
        assert (
            (262 in ids)
            == is_complete(matcher)
            == (text.decode() in texts or bool(regex and regex.fullmatch(text.decode())))
        )
        if is_complete(matcher):
            seen.add(text.decode())
        for token_id in ids - {262}:
            longer = text + LETTERS.tokens[token_id]
            assert LETTERS.tokens[token_id], "a token of no letters is never allowed"
            if len(longer) <= 8:
                fork = matcher.fork()
                fork.advance([token_id])
                visit(fork, longer)
        following = [one.encode()[len(text) :] for one in texts if one.encode().startswith(text)]
        possible = {
            token_id
            for token_id, token in enumerate(LETTERS.tokens)
            if token and token_id != 262 and any(one.startswith(token) for one in following)
        }
        # where every text goes on with the same letter, only the usual token for it is allowed
        forced = len({one[:1] for one in following}) == 1
        assert ids & possible if forced and possible else ids >= possible

    visit(grammar.matcher(), b"")
    assert seen >= set(texts)


def test_a_fork_goes_its_own_way(start, real_vocabulary):
    leader = start(StructuredOutput.choice(["yes", "no"]))
    follower = leader.fork()
    first = next(i for i in allowed(leader, real_vocabulary) if real_vocabulary.tokens[i] == b"no")
    leader.advance([int(first)])
    assert leader.is_terminated
    assert not follower.is_terminated
    assert len(allowed(follower, real_vocabulary)) > 1


def test_drafts_are_counted_and_tokens_taken_back(start, real_vocabulary):
    matcher = start(StructuredOutput.json({"type": "array", "items": {"type": "integer"}, "maxItems": 3}))
    draft = real_vocabulary.encode("[1, 22")
    wrong = [*draft, *real_vocabulary.encode(" apples")]
    before = allowed(matcher, real_vocabulary).tolist()
    assert matcher.accepted(wrong) == len(draft)
    assert allowed(matcher, real_vocabulary).tolist() == before, "counting a draft changes nothing"
    matcher.advance(draft)
    matcher.rollback(len(draft))
    assert allowed(matcher, real_vocabulary).tolist() == before
    with pytest.raises(GrammarError):
        matcher.advance(wrong)


def test_blanks_between_json_tokens_have_an_end(start, real_vocabulary):
    matcher = start(StructuredOutput.json({"type": "array", "items": {"type": "integer"}}))
    laid_out = real_vocabulary.encode("[\n    1,\n\t2 , 3\n]")
    assert matcher.accepted(laid_out) == len(laid_out)
    matcher.advance(real_vocabulary.encode("["))
    line, blank = real_vocabulary.encode("\n"), real_vocabulary.encode(" ")
    assert matcher.accepted(line * 2) == 1
    assert matcher.accepted(blank * 2) == 1
    assert matcher.accepted(line + blank * 60) == 41


def test_special_tokens_are_no_text(start, real_vocabulary):
    matcher = start(StructuredOutput.regex("(.|\n)*"))
    special = set(allowed(matcher, real_vocabulary).tolist()) & set(real_vocabulary.special_ids)
    assert special == set(real_vocabulary.end_ids)
