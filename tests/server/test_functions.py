"""OpenAI's older names for tools, and several answers of a greedy request."""

import json
import warnings
from typing import Any

import openai
import pytest

from quire.core.errors import InvalidRequest
from quire.server.chat import chat_tools
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.tools import with_tools
from tests.server.running import MODEL, RunningServer

PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city now", "parameters": PLACE}
HI = [{"role": "user", "content": "What is the weather in Paris?"}]


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(**{"messages": HI, **fields})


def test_functions_are_tools_with_one_call_at_most():
    body = with_tools(request(functions=[WEATHER], function_call={"name": "get_weather"}))
    plan = chat_tools(body)
    assert plan is not None
    assert (plan.shown, plan.forced_name) == (({"type": "function", "function": WEATHER},), "get_weather")
    plan = chat_tools(with_tools(request(functions=[WEATHER])))
    assert plan is not None
    assert (plan.forced, plan.max_calls) == (None, 1)
    plan = chat_tools(with_tools(request(functions=[WEATHER], function_call="none")))
    assert plan is not None
    assert plan.shown == ()


def test_a_functions_message_answers_the_call_before_it():
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    asked = {"role": "assistant", "content": None, "function_call": call}
    told = {"role": "function", "name": "get_weather", "content": "Rain"}
    _, made, answer = with_tools(request(messages=[*HI, asked, told])).messages
    assert (made["tool_calls"][0]["function"], "function_call" in made) == (call, False)
    assert (answer["role"], answer["tool_call_id"]) == ("tool", made["tool_calls"][0]["id"])
    assert asked["function_call"] == call  # the request's own


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [WEATHER], "function_call": {"name": "f"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
        ({"functions": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ],
    ids=str,
)
def test_wrong_functions_are_refused_under_their_names(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        chat_tools(with_tools(request(**fields)))
    assert caught.value.param == param


def test_reading_the_older_fields_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert request().functions is None
        assert request().function_call is None


# ---------------------------------------------------------------------- a server


def _client_fields(**fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 60}
    return {**asked, "functions": [WEATHER], "function_call": {"name": "get_weather"}, **fields}


def test_a_function_is_called_whole_and_streamed_and_its_result_is_taken(server: RunningServer):
    client: openai.OpenAI = server.client()
    choice = client.chat.completions.create(**_client_fields()).choices[0]
    call = choice.message.function_call
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    names, arguments, reasons = [], "", []
    for chunk in client.chat.completions.create(**_client_fields(stream=True)):
        delta = chunk.choices[0].delta
        assert delta.tool_calls is None
        if delta.function_call is not None:
            names += [delta.function_call.name] if delta.function_call.name else []
            arguments += delta.function_call.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (names, arguments) == (["get_weather"], call.arguments)
    assert (reasons[-1], set(reasons[:-1])) == ("function_call", {None})
    result = {"role": "function", "name": "get_weather", "content": "Rain, 12 degrees"}
    messages = [*HI, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**_client_fields(messages=messages, function_call="none"))
    assert answer.choices[0].message.content
    assert answer.choices[0].message.function_call is None


def test_several_greedy_answers_are_computed_once(server: RunningServer):
    client: openai.OpenAI = server.client()
    asked = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 8}
    server.wait_idle()  # clients that left before are counted by now
    before = server.metric("generation_tokens_total")
    one = client.chat.completions.create(**asked)
    server.wait_metric(before + one.usage.completion_tokens, "generation_tokens_total")
    three = client.chat.completions.create(**asked, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert {choice.message.content for choice in three.choices} == {one.choices[0].message.content}
    assert three.usage.completion_tokens == one.usage.completion_tokens
    server.wait_metric(before + 2 * one.usage.completion_tokens, "generation_tokens_total")
    texts = client.completions.create(model=MODEL, prompt=["One,", "Two,"], n=2, temperature=0, max_tokens=4)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    first, copy, other, _ = [choice.text for choice in texts.choices]
    assert first == copy
    assert first != other


def test_the_finish_reason_comes_behind_the_last_text(server: RunningServer):
    client: openai.OpenAI = server.client()
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 4, "stream": True}
    *_, last_text, end = client.chat.completions.create(messages=HI, **asked)
    assert (last_text.choices[0].finish_reason, end.choices[0].finish_reason) == (None, "length")
    assert last_text.choices[0].delta.content
    assert end.choices[0].delta.content is None
    *_, last_text, end = client.completions.create(prompt="One, two,", **asked)
    assert (last_text.choices[0].finish_reason, end.choices[0].finish_reason) == (None, "length")
    assert last_text.choices[0].text
    assert end.choices[0].text == ""
