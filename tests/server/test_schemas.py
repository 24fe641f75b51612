"""Schemas of requests as the grammar gets them."""

import json
from typing import Any

import pytest

from quire.core.structured import StructuredOutput
from quire.server.schemas import MAX_WHITESPACE, served_form, served_schema
from tests.server.running import RunningServer

TEXT = {"type": "string"}
PERSON = {"type": "object", "properties": {"name": {"enum": ["Ann"]}}, "required": ["name"]}


def served(schema: Any, strict: bool = False) -> tuple[Any, list[str]]:
    return served_schema(schema, strict, "response_format")


def test_objects_that_list_their_properties_have_no_others():
    inner = {"type": "array", "items": PERSON}
    made, warnings = served({"type": "object", "properties": {"people": inner}, "$defs": {"p": PERSON}})
    assert made["additionalProperties"] is False
    assert made["properties"]["people"]["items"]["additionalProperties"] is False
    assert made["$defs"]["p"]["additionalProperties"] is False
    assert warnings == []
    assert "additionalProperties" not in PERSON  # the request's own


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**PERSON, "additionalProperties": True},
        {**PERSON, "patternProperties": {"^x": TEXT}},
        {**PERSON, "anyOf": [{"required": ["name"]}, {"properties": {"age": {"type": "integer"}}}]},
        {"allOf": [PERSON, {"properties": {"age": {"type": "integer"}}}]},
        {"$defs": {"p": PERSON}, "$ref": "#/$defs/p", "properties": {"age": {"type": "integer"}}},
    ],
    ids=str,
)
def test_objects_that_may_have_more_stay_open(schema: dict[str, Any]):
    made = json.dumps(served(schema)[0])
    assert '"additionalProperties": false' not in made


def test_what_a_field_is_called_is_not_taken_for_a_keyword():
    names = {"properties": PERSON, "pattern": {"type": "integer"}, "not": TEXT, "format": {"enum": ["x"]}}
    made, warnings = served({"type": "object", "properties": names, "default": {"properties": {"a": 1}}})
    assert warnings == []
    assert made["properties"]["pattern"] == {"type": "integer"}
    assert made["default"] == {"properties": {"a": 1}}


def test_what_cannot_be_enforced_is_named_and_patterns_are_removed_unless_strict():
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": TEXT, "uniqueItems": True},
            "word": {"type": "string", "pattern": r"\bfoo\b"},
            "plain": {"type": "string", "pattern": r"^\\b+$"},
            "path": {"type": "string", "format": "uri-reference"},
            "day": {"type": "string", "format": "date"},
            "size": {"type": "integer", "format": "int64"},
        },
    }
    made, warnings = served(schema)
    assert warnings == [
        "response_format: #/properties/tags/uniqueItems is not enforced",
        r"response_format: #/properties/word/pattern '\\bfoo\\b' is not enforced",
        "response_format: #/properties/path/format 'uri-reference' is not enforced",
    ]
    assert made["properties"]["word"]["pattern"] != r"\bfoo\b"
    assert made["properties"]["plain"]["pattern"] == r"^\\b+$"
    made, warnings = served(schema, strict=True)
    assert (made["properties"]["word"]["pattern"], warnings) == (r"\bfoo\b", [])


def test_other_forms_stay_as_they_are():
    for form in (StructuredOutput.regex("a+"), StructuredOutput.json(), StructuredOutput.json("true")):
        assert served_form(form) == (form, [])


# ---------------------------------------------------------------------- a server

ASK = [{"role": "user", "content": "A person, in JSON"}]


def _answer(server: RunningServer, schema: dict[str, Any], **fields: Any) -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": ASK, "response_format": form, "temperature": 0, "max_tokens": 400, **fields}
    response = server.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def test_an_open_schema_of_two_fields_ends(server: RunningServer):
    properties = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}}
    response = _answer(server, {"type": "object", "properties": properties, "required": ["name", "age"]})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
    assert "warning" not in response.headers


def test_a_schema_that_cannot_be_enforced_is_relaxed_with_a_warning(server: RunningServer):
    word = {"type": "string", "pattern": r"^\b[a-z]{3}\b$", "maxLength": 9}
    schema = {"type": "object", "properties": {"word": word}, "required": ["word"]}
    response = _answer(server, schema)
    assert json.loads(response.json()["choices"][0]["message"]["content"]).keys() == {"word"}
    assert "#/properties/word/pattern" in response.headers["warning"]


@pytest.mark.parametrize("max_tokens", [24, 33, 60])
def test_an_answer_that_max_tokens_cuts_off_is_still_json(server: RunningServer, max_tokens: int):
    items = {"type": "array", "items": {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}}
    schema = {"type": "object", "properties": {"story": TEXT, "items": items}, "required": ["story", "items"]}
    answer = _answer(server, schema, max_tokens=max_tokens, min_tokens=max_tokens).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"story", "items"}
    assert answer["usage"]["completion_tokens"] <= max_tokens


def test_a_string_cannot_be_blanks_without_end(server: RunningServer):
    """The bias makes the model write nothing but blanks where it may."""
    blank = server.post("/tokenize", json={"prompt": " "}).json()["tokens"][0]
    schema = {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}
    response = _answer(server, schema, logit_bias={str(blank): 100}, max_tokens=MAX_WHITESPACE + 20)
    text = response.json()["choices"][0]["message"]["content"]
    assert " " * MAX_WHITESPACE in text
    assert " " * (MAX_WHITESPACE + 1) not in text
