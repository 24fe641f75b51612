"""Structured output through the official client: parsed models, whole and streamed, and clear refusals."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Annotated

import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.server.running import MODEL, RunningServer

ASK = [{"role": "user", "content": "Invent a pet. Answer in JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


class Owner(BaseModel):
    name: Annotated[str, Field(max_length=8)]


class Pet(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=8)]
    size: Size
    owner: Owner | None
    ages: Annotated[list[Annotated[int, Field(ge=0, le=30)]], Field(max_length=2)]


def test_the_clients_own_models_are_parsed_whole_and_streamed(server: RunningServer):
    client = server.client()
    asked = {"model": MODEL, "messages": ASK, "response_format": Pet, "max_tokens": 150, "seed": 4}
    whole = client.chat.completions.parse(**asked, n=2)
    pets = [choice.message.parsed for choice in whole.choices]
    assert all(isinstance(pet, Pet) for pet in pets)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == pets[0], "a stream says what a whole answer does"


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 200, "temperature": 0}, None),
        ({"response_format": FORMAT}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, "ab|ac"),
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"grammar": 'start: "x" /[yz]{2}/'}, "x[yz]{2}"),
    ],
    ids=lambda value: str(value)[:36] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_way_to_ask_for_a_form_is_honoured(server: RunningServer, path: str, fields: dict, matches):
    prompt = {"messages": ASK} if "chat" in path else {"prompt": "Answer: "}
    response = server.post(path, json={"max_tokens": 60, **prompt, **fields})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if isinstance(matches, str):
        assert re.fullmatch(matches, text)
    elif matches is not None:
        jsonschema.validate(json.loads(text), matches)
    elif choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format",
            "strict",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"not": {}}}}, "strict": True},
                }
            },
            "response_format",
            "#/properties/a/not",
        ),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "start: nowhere"}, "grammar", "nowhere"),
        ({"guided_json": "{"}, "guided_json", "no valid JSON"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"regex": "a" * 200_000}, "regex", "131072"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "response_format and regex"),
        ({"regex": 3}, "regex", "string"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_honoured_is_a_400_that_names_it(
    server: RunningServer, fields, param, said, stream
):
    error = server.chat_error(**fields, stream=stream)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


def test_without_strict_what_cannot_be_enforced_is_left_out(server: RunningServer):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    asked = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": False}}
    body = {"messages": ASK, "response_format": asked, "max_tokens": 60}
    response = server.post("/v1/chat/completions", json=body)
    found = json.loads(response.json()["choices"][0]["message"]["content"])
    assert len(found) == 2
    assert set(found) <= {1, 2}
    asked["json_schema"]["strict"] = True
    assert "#/uniqueItems" in server.chat_error(response_format=asked)["message"]


def test_a_schema_that_never_compiles_keeps_nobody_waiting(server: RunningServer):
    body = {"messages": ASK, "max_tokens": 2, "guided_json": {"type": "integer", "multipleOf": 9_999_999}}

    def refusal() -> dict:
        """It may take five seconds of the processor's time: where that is scarce, no one waits so long."""
        while (answer := server.post("/v1/chat/completions", json=body)).status_code >= 500:
            assert "try again later" in answer.text
        assert answer.status_code == 400
        return answer.json()["error"]

    with ThreadPoolExecutor(1) as other:
        refused = other.submit(refusal)
        for number in range(3):
            response = server.post(
                "/v1/completions",
                json={"prompt": "Pick:", "guided_choice": ["a", f"b{number}"], "max_tokens": 8},
            )
            assert response.status_code == 200, response.text
            if number == 0:
                assert not refused.done()
        error = refused.result()
    assert (error["param"], "longer than 5 s" in error["message"]) == ("guided_json", True)
    assert refusal()["message"] == error["message"], "the second time at once"
    server.wait_idle()
