"""Tools and structured output through /v1/responses and /v1/messages, with the clients' own ways to ask for them."""

import asyncio
import json
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.server.running import MODEL, RunningServer

QUESTION = "What is the weather in Paris?"
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PARAMETERS}
ANTHROPICS_TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


@pytest.fixture(scope="module")
def openais(server: RunningServer) -> openai.OpenAI:
    return server.client(timeout=60)


@pytest.fixture(scope="module")
def anthropics(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60)


def test_a_response_calls_a_function_and_goes_on_with_its_output(openais: openai.OpenAI):
    settings: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_output_tokens": 60}
    first = openais.responses.create(
        **settings, input=QUESTION, tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    settings |= {"max_output_tokens": 8, "tool_choice": "none"}
    second = openais.responses.create(**settings, input=output, previous_response_id=first.id)
    assert second.output_text
    sent: Any = [{"role": "user", "content": QUESTION}, call.to_dict(), *output]
    assert openais.responses.create(**settings, input=sent).output_text == second.output_text
    with pytest.raises(openai.BadRequestError, match="call_id") as caught:
        openais.responses.create(**settings, input=output)
    assert caught.value.param == "input"


def test_a_function_calls_arguments_are_streamed(openais: openai.OpenAI):
    with openais.responses.stream(
        model=MODEL,
        input=QUESTION,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=80,
    ) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events[3:-3]) == call.arguments
    assert json.loads(call.arguments)["days"] in (1, 2)


def test_a_tools_faults_are_named_in_the_callers_words(server: RunningServer):
    wrong = {"input": "Hi", "tools": [{**TOOL, "name": "no spaces"}]}
    assert server.error("/v1/responses", 400, json=wrong)["param"] == "tools[0].name"
    wrong = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    wrong |= {"tools": [{**ANTHROPICS_TOOL, "input_schema": {"type": "string"}}]}
    said = server.post("/v1/messages", json=wrong).json()["error"]
    assert said["type"] == "invalid_request_error"
    assert "tools[0].input_schema" in said["message"]


def test_a_response_is_parsed_into_a_model(server: RunningServer, openais: openai.OpenAI):
    asked: Any = {"model": MODEL, "input": "Tell me about Paris.", "temperature": 0, "max_output_tokens": 60}
    assert isinstance(openais.responses.parse(**asked, text_format=City).output_parsed, City)

    async def run() -> None:
        async with server.async_client() as client:
            parsed = await client.responses.parse(**asked, text_format=City)
            assert isinstance(parsed.output_parsed, City)
            async with client.responses.stream(**asked, text_format=City) as stream:
                final = await stream.get_final_response()
            assert final.output_parsed == parsed.output_parsed

    asyncio.run(run())


def test_a_message_uses_a_tool_and_takes_its_result(anthropics: anthropic.Anthropic):
    turns: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {
        "model": MODEL,
        "max_tokens": 80,
        "tools": [ANTHROPICS_TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    message = anthropics.messages.create(**asked, messages=turns)
    (use,) = message.content
    assert (use.type, use.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
    assert use.input["city"] in ("Paris", "Rome")
    with anthropics.messages.stream(**asked, messages=turns) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    asked |= {"max_tokens": 8, "tool_choice": {"type": "none"}}
    assert anthropics.messages.create(**asked, messages=turns).content[0].type == "text"
    count = anthropics.messages.count_tokens
    plain = count(model=MODEL, messages=turns).input_tokens
    assert count(model=MODEL, messages=turns, tools=[ANTHROPICS_TOOL]).input_tokens > plain


def test_a_message_is_parsed_into_a_model(anthropics: anthropic.Anthropic):
    parsed = anthropics.messages.parse(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "Tell me about Rome."}],
        output_format=City,
        extra_body={"temperature": 0},
    )
    assert isinstance(parsed.parsed_output, City)
