"""Calls of tools and thoughts through the official client, against the real server and the real model."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from quire.server.tools import MAX_CALLS
from tests.server.running import MODEL, RunningServer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER, TIME],
    "temperature": 0,
    "max_tokens": 200,
}
TRANSCRIPT = (
    'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_a_request_of_codex_is_served_without_the_tools_of_openais_own_servers(server: RunningServer):
    function = {"type": "function", **WEATHER["function"], "strict": False}
    others = [
        {"type": "namespace", "name": "mcp__files", "tools": [function]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "local_shell"},
        {"type": "computer_use_preview", "display_width": 1},
    ]
    body = {
        "input": "Hi",
        "max_output_tokens": 2,
        "tools": [*others, function],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
    }
    response = server.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    warnings = response.headers.get_list("warning", split_commas=False)
    assert [re.findall("type '(.+)' are", warning) for warning in warnings] == [
        [tool["type"]] for tool in others
    ]
    assert "response.incomplete" in response.text
    chat = {"messages": ASK["messages"], "max_tokens": 2, "tools": others}
    response = server.post("/v1/chat/completions", json=chat)
    assert response.status_code == 200, response.text
    assert len(response.headers.get_list("warning")) == len(others)


def checked(name: str, arguments: str) -> dict[str, Any]:
    """The arguments, which must be what the tool's schema wants."""
    read = json.loads(arguments)
    if name == "get_weather":
        assert set(read) == {"city", "unit"}
        assert read["unit"] in ("celsius", "kelvin")
    else:
        assert (name, set(read)) == ("get_time", {"zone"})
        assert read["zone"] in ("CET", "UTC")
    return read


def put_together(chunks: Iterator[Any]) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of a stream, after a look at the shape of its deltas."""
    content, calls, ids, reason = "", [], [], ""
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                ids.append(call.id)
                calls.append((call.function.name, call.function.arguments))
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                name, arguments = calls[call.index]
                calls[call.index] = (name, arguments + call.function.arguments)
    assert len(set(ids)) == len(calls)
    assert all(one.startswith("call_") for one in ids)
    return content, calls, reason


def test_a_required_call_is_made_whole_and_streamed_alike(client: openai.OpenAI):
    choice = client.chat.completions.create(**ASK, tool_choice="required").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
    assert calls
    for call in calls:
        checked(*call)
    stream = client.chat.completions.create(**ASK, tool_choice="required", stream=True)
    assert put_together(stream) == ("", calls, "tool_calls")


def test_required_calls_end_and_do_not_repeat(client: openai.OpenAI):
    """A bias makes the model go on with the same call for as long as it may."""
    ask = {**ASK, "tools": [TIME], "max_tokens": 600, "tool_choice": "required"}
    choice = client.chat.completions.create(**ask).choices[0]
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
    assert choice.finish_reason == "tool_calls"
    assert len(calls) <= MAX_CALLS
    assert all(before != after for before, after in pairwise(calls))


def test_a_call_that_max_tokens_cut_off_is_accepted_back(server: RunningServer, client: openai.OpenAI):
    choice = client.chat.completions.create(**{**ASK, "max_tokens": 6}, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    with pytest.raises(ValueError, match=r".*"):
        json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "The call was cut off."}
    messages = [*ASK["messages"], choice.message, result]
    again = client.chat.completions.create(**{**ASK, "messages": messages, "max_tokens": 2})
    assert again.choices[0].finish_reason
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Pa'},
        {"type": "function_call_output", "call_id": "c", "output": "cut off"},
    ]
    response = server.post("/v1/responses", json={"input": items, "max_output_tokens": 2})
    assert response.status_code == 200, response.text
    tools = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]
    forced = {"type": "tool", "name": "get_weather"}
    body = {"max_tokens": 6, "tools": tools, "tool_choice": forced, "messages": ASK["messages"]}
    message = server.post("/v1/messages", json=body).json()
    assert (message["stop_reason"], message["content"][-1]["type"]) == ("max_tokens", "tool_use")
    result = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": "cut off"}
    answered = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    body |= {"messages": [*ASK["messages"], *answered], "tool_choice": {"type": "auto"}}
    response = server.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text


def test_a_named_call_is_made_whole_and_streamed_alike(client: openai.OpenAI):
    choice = client.chat.completions.create(**ASK, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert checked(call.function.name, call.function.arguments)["city"] == "Paris"
    num_pieces: list[int] = []
    # as they are written; a server that is held up sends some together
    while not num_pieces or max(num_pieces) <= 5:
        assert len(num_pieces) < 5, num_pieces
        chunks = list(client.chat.completions.create(**ASK, tool_choice=NAMED, stream=True))
        assert put_together(iter(chunks)) == ("", [("get_weather", call.function.arguments)], "tool_calls")
        num_pieces.append(sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks))


def test_the_clients_own_stream_helper_sees_the_call(client: openai.OpenAI):
    with client.chat.completions.stream(**ASK, tool_choice=NAMED) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    checked(call.function.name, call.function.arguments)


def test_without_parallel_calls_there_is_one(client: openai.OpenAI):
    ask = {**ASK, "temperature": 1.5, "max_tokens": 150}
    for seed in range(3):
        answer = client.chat.completions.create(
            **ask, seed=seed, tool_choice="required", parallel_tool_calls=False
        )
        assert len(answer.choices[0].message.tool_calls or ()) == 1


def test_several_choices_call_each_for_itself_and_have_logprobs(client: openai.OpenAI):
    ask = {**ASK, "temperature": 1.2, "seed": 3, "n": 3, "tool_choice": NAMED, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    streamed: list[list[Any]] = [[], [], []]
    for chunk in client.chat.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index].append(chunk)
    for choice, chunks in zip(whole.choices, streamed, strict=True):
        (call,) = choice.message.tool_calls
        checked(call.function.name, call.function.arguments)
        assert put_together(iter(chunks))[1] == [(call.function.name, call.function.arguments)]
        tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        assert tokens == choice.logprobs.content
        written = b"".join(bytes(token.bytes) for token in tokens).decode()
        assert written.startswith(call.function.arguments)


def test_a_call_that_is_cut_short_says_length(client: openai.OpenAI):
    choice = client.chat.completions.create(**{**ASK, "max_tokens": 4}, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")


def forced(text: str) -> dict[str, Any]:
    """Makes the model write this text, of its own free will as far as the rest of the server can tell."""
    return {"structured_outputs": {"regex": re.escape(text)}}


def test_auto_reads_the_calls_that_the_model_writes(client: openai.OpenAI):
    settings = {**ASK, "tool_choice": "auto", "extra_body": forced(TRANSCRIPT)}
    wanted = [("get_weather", '{"city": "Paris {\\"}"}'), ("get_time", "{}")]
    choice = client.chat.completions.create(**settings).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Sure.", "tool_calls")
    assert [(one.function.name, one.function.arguments) for one in choice.message.tool_calls] == wanted
    stream = client.chat.completions.create(**settings, stream=True)
    assert put_together(stream) == ("Sure.", wanted, "tool_calls")
    one = client.chat.completions.create(**settings, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in one.message.tool_calls] == ["get_weather"]
    hidden = client.chat.completions.create(**{**settings, "tool_choice": "none"}).choices[0]
    assert (hidden.message.content, hidden.message.tool_calls) == (TRANSCRIPT, None)


def test_the_model_is_told_of_tools_calls_and_results(client: openai.OpenAI, server: RunningServer):
    def tokens(**fields: Any) -> str:
        body = {"messages": ASK["messages"], **fields}
        ids = server.post("/tokenize", json=body).json()["tokens"]
        return server.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    assert "get_weather" not in tokens()
    assert '"name": "get_weather"' in tokens(tools=[WEATHER])
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
    }
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "31 degrees and sunny"},
    ]
    told = tokens(messages=history, tools=[WEATHER])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in told
    assert "<tool_response>\n31 degrees and sunny\n</tool_response>" in told
    answer = client.chat.completions.create(**{**ASK, "messages": history, "max_tokens": 60})
    assert answer.choices[0].message.content


def test_a_response_format_leaves_the_choice_between_calls_and_an_answer(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "sky", "schema": {**schema, "additionalProperties": False}},
    }
    for seed in range(2):
        choice = client.chat.completions.create(
            **{**ASK, "temperature": 1, "seed": seed}, response_format=form
        ).choices[0]
        if choice.message.tool_calls:
            for one in choice.message.tool_calls:
                checked(one.function.name, one.function.arguments)
        else:
            assert set(json.loads(choice.message.content)) == {"sunny"}
    called = client.chat.completions.create(**ASK, response_format=form, tool_choice=NAMED).choices[0]
    checked("get_weather", called.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": "all"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_tools_are_a_400_that_names_the_place(server: RunningServer, fields: dict, param: str):
    error = server.chat_error(**fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_schema_that_no_grammar_can_hold_is_a_400_about_the_tools(server: RunningServer):
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/x"}}},
    }
    error = server.chat_error(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert error["param"] == "tools"


def test_a_server_for_other_formats_reads_thoughts_and_llamas_calls(start_server):
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "llama3_json", "--enable-auto-tool-choice")
    server = start_server(*flags)
    server.wait_for_line("llama3_json (as asked)", "qwen3")
    client = server.client()
    call = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    text = f"<think>\nThe user wants to know.\n</think>\n\n{call}; {call}"
    settings = {**ASK, "extra_body": forced(text)}
    choice = client.chat.completions.create(**settings)
    message, usage = choice.choices[0].message, choice.usage
    assert message.reasoning_content == "The user wants to know."
    assert [one.function.arguments for one in message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert 5 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    num_pieces: list[int] = []
    while not num_pieces or max(num_pieces) <= 2:
        assert len(num_pieces) < 5, num_pieces  # tokens that arrive together are one piece
        chunks = list(client.chat.completions.create(**settings, stream=True))
        thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
        assert "".join(thoughts) == "The user wants to know."
        num_pieces.append(sum(map(bool, thoughts)))
    assert put_together(iter(chunks)) == ("", [("get_weather", '{"city": "Paris"}')] * 2, "tool_calls")
