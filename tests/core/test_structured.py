"""StructuredOutput says the same thing in several ways, and refuses what can never be a form."""

import json

import pytest

from quire import SamplingParams, StructuredOutput
from quire.core.errors import InvalidRequest
from quire.core.request import Request
from quire.core.structured import MAX_BYTES, MAX_DEPTH
from quire.link.messages import Add, decode_to_engine, encode


class Animal:
    """As a pydantic class offers its schema."""

    @staticmethod
    def model_json_schema() -> dict:
        return {"type": "object"}


def test_a_schema_is_a_mapping_its_text_or_a_class():
    forms = {StructuredOutput.json(one) for one in ({"type": "object"}, '{"type":"object"}', Animal)}
    assert forms == {StructuredOutput("json_schema", '{"type":"object"}')}
    assert StructuredOutput.json() == StructuredOutput("json_object")


@pytest.mark.parametrize(
    ("said", "form"),
    [
        ({"json": {"type": "object"}}, StructuredOutput("json_schema", '{"type":"object"}')),
        ({"json_object": True}, StructuredOutput("json_object")),
        ({"regex": "a+", "json": None}, StructuredOutput("regex", "a+")),
        ({"grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
        ({"choice": ["a", "ü"]}, StructuredOutput("choice", '["a","ü"]')),
    ],
)
def test_sampling_parameters_take_a_plain_mapping_and_cross_the_link(said, form):
    sampling = SamplingParams(structured=said)
    assert sampling.structured == form
    assert (
        decode_to_engine(encode(Add.of(Request("id", [], sampling)))).unpacked().sampling.structured == form
    )


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StructuredOutput("xml", "a"), "xml"),
        (lambda: StructuredOutput("json_schema", "{"), "no valid JSON"),
        (lambda: StructuredOutput("json_schema", "[1]"), "must be an object"),
        (lambda: StructuredOutput("json_schema", deep(MAX_DEPTH + 1)), "nested deeper"),
        (lambda: StructuredOutput("json_schema", deep(10_000)), "nested deeper"),
        (lambda: StructuredOutput("json_object", "{}"), "takes no text"),
        (lambda: StructuredOutput.json(3), "not int"),
        (lambda: StructuredOutput.json({"enum": {1, 2}}), "cannot be written as JSON"),
        (lambda: StructuredOutput.regex(""), "empty"),
        (lambda: StructuredOutput.regex(7), "must be text"),
        (lambda: StructuredOutput.regex("a" * (MAX_BYTES + 1)), str(MAX_BYTES)),
        (lambda: StructuredOutput.regex("\ud800"), "half of a character"),
        (lambda: StructuredOutput.choice([]), "1 to"),
        (lambda: StructuredOutput.choice(["a"] * 5000), "5000"),
        (lambda: StructuredOutput.choice(["a", 1]), "strings"),
        (lambda: StructuredOutput.choice("ab"), "list of strings"),
        (lambda: StructuredOutput.of({}), "exactly one"),
        (lambda: StructuredOutput.of({"json": {}, "regex": "a"}), "exactly one"),
        (lambda: StructuredOutput.of({"structural_tag": "a"}), "structural_tag"),
    ],
)
def test_what_can_be_no_form_is_refused_in_one_line(make, message):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        make()
    assert refusal.value.param == "structured"


def test_errors_name_the_field_that_the_caller_wrote():
    with pytest.raises(InvalidRequest) as refusal:
        StructuredOutput.of({"json": "{"}, "guided_json")
    assert refusal.value.param == "guided_json"
    assert StructuredOutput.regex("a", param="regex") == StructuredOutput.regex("a", param="guided_regex")


def test_as_many_levels_as_allowed_are_allowed():
    assert json.loads(StructuredOutput("json_schema", deep(MAX_DEPTH - 1)).text)
