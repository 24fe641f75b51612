"""/v1/responses without a server: items, the way to a chat, the events of a draft, what is kept."""

import asyncio
from typing import Any

import pytest

from quire.core.errors import FieldName, InvalidRequest
from quire.core.sampling import SamplingParams
from quire.server.chat import chat_tools
from quire.server.errors import ApiError
from quire.server.protocol.base import Usage
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.protocol.responses import ResponseRequest
from quire.server.responses.builder import ResponseBuilder, new_response
from quire.server.responses.convert_request import chat_fields, chat_messages, read_items, refuse_unsupported
from quire.server.responses.endpoints import drop_oldest_turns
from quire.server.stored import check_encodable
from quire.server.translation import renamed_errors

USAGE: Usage = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def fields(given: Any = "Hi", **more: Any) -> dict[str, Any]:
    body = ResponseRequest(input=given, **more)
    refuse_unsupported(body)
    return chat_fields(body, read_items(body.input))


def draft(**asked: Any) -> ResponseBuilder:
    body = ResponseRequest(input="Hi", **asked)
    return ResponseBuilder(new_response(body, "resp_1", "m", True, SamplingParams(temperature=0.5)))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# Items


def test_a_text_is_a_message_of_the_user():
    (item,) = read_items("Hi")
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["content"] == [{"type": "input_text", "text": "Hi"}]
    assert item["id"].startswith("msg_")
    assert chat_messages([item], "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_turn_of_reasoning_text_and_calls_is_one_message():
    items = read_items(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "x", "text": "Hm."}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me add."}],
            },
            CALL,
            {**CALL, "call_id": "c2"},
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"role": "assistant", "content": "3 and 4."},
        ]
    )
    user, assistant, *rest = chat_messages(items)
    assert user["content"] == [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    assert assistant["content"] == "Let me add."
    assert assistant["reasoning_content"] == "Hm."
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert rest == [
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "4"},
        {"role": "assistant", "content": "3 and 4."},
    ]


def test_reasoning_that_nobody_can_read_is_left_out():
    items = read_items([{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}])
    assert chat_messages(items) == []


def test_what_comes_out_can_be_sent_back():
    made = draft()
    made.take({"reasoning_content": "Hm."})
    made.take({"content": "Adding."})
    made.take({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "add", "arguments": "{}"}}]})
    made.end("tool_calls", None, USAGE)
    (message,) = chat_messages(read_items(made.response["output"]))
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Adding.")
    assert message["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize(
    "item",
    [
        "Hi",
        {"role": "robot", "content": "Hi"},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1"},
        {**CALL, "arguments": None},
        {**CALL, "name": None},
        {"type": "reasoning", "summary": "x"},
        OUTPUT,
    ],
    ids=str,
)
def test_items_that_cannot_be_taken_are_refused_by_their_place(item: Any):
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        chat_messages(read_items([{"role": "user", "content": "Hi"}, item]))
    assert caught.value.param == "input"
    if item != OUTPUT:
        assert "input[1]" in str(caught.value)


# The way to a chat


def test_fields_get_the_names_that_chats_have_for_them():
    got = fields(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        user="me",
        seed=3,
        top_k=4,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
    )
    assert got["max_completion_tokens"] == 5
    assert (got["temperature"], got["top_p"], got["seed"], got["top_k"]) == (0.5, 0.9, 3, 4)
    assert (got["logprobs"], got["top_logprobs"]) == (True, 0)
    assert got["chat_template_kwargs"] == {"reasoning_effort": "low"}
    schema = {"name": "x", "schema": {"type": "object"}, "strict": True}
    assert got["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert fields(text={"format": {"type": "text"}})["response_format"] is None
    assert fields(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert fields(reasoning={"effort": "none"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "tools" not in fields()


def test_tools_and_choices_nest_as_chats_want_them():
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    got = fields(tools=[ADD], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False)
    assert got["tools"] == [{"type": "function", "function": function}]
    assert got["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert got["parallel_tool_calls"] is False
    assert fields(tools=[ADD])["tool_choice"] == "auto"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    got = fields(tools=[ADD, {**ADD, "name": "sub"}], tool_choice=allowed)
    plan = chat_tools(ChatCompletionRequest.model_validate(got))
    assert plan is not None
    assert plan.forced is not None
    assert [tool["function"]["name"] for tool in plan.shown] == ["add"]


def test_tools_of_other_types_are_left_out_with_a_warning():
    tools = [{"type": "namespace", "name": "mcp", "tools": []}, ADD, {"type": "web_search"}]
    plan = chat_tools(ChatCompletionRequest.model_validate(fields(tools=tools, tool_choice="auto")))
    assert plan is not None
    assert [tool["function"]["name"] for tool in plan.shown] == ["add"]
    assert [warning.split(" are")[0] for warning in plan.warnings] == [
        "tools of type 'namespace'",
        "tools of type 'web_search'",
    ]
    assert plan.warnings[1].endswith("tools[2]")
    plan = chat_tools(ChatCompletionRequest.model_validate(fields(tools=[{"type": "local_shell"}])))
    assert plan is not None
    assert (plan.shown, len(plan.warnings)) == ((), 1)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "lark"}}}, "text.format"),
        ({"given": []}, "input"),
        ({"given": None}, "input"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(asked: dict[str, Any], param: str):
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        chat_tools(ChatCompletionRequest.model_validate(fields(**asked)))
    assert caught.value.param == param


def test_errors_speak_of_the_fields_that_the_caller_sent():
    names = {"max_completion_tokens": "max_output_tokens", ".function.": "."}
    error = InvalidRequest("{param}={value} is too few", "max_completion_tokens", value=0)
    renamed = error.renamed(names)
    assert (str(renamed), renamed.param) == ("max_output_tokens=0 is too few", "max_output_tokens")
    other = InvalidRequest(
        "{param}={value} is more than {limit}",
        "min_tokens",
        value=5,
        limit=FieldName("max_completion_tokens"),
    )
    assert str(other) == "min_tokens=5 is more than max_completion_tokens"
    assert str(other.renamed(names)) == "min_tokens=5 is more than max_output_tokens"
    assert InvalidRequest("n=0", "n").renamed({"messages": "input"}).param == "n"
    assert (
        str(InvalidRequest("{param} is 5", "tools[0].function.name").renamed(names)) == "tools[0].name is 5"
    )
    quoting = InvalidRequest("the text '{a} {' is no grammar", "regex")
    assert str(quoting.renamed({"regex": "pattern"})) == "the text '{a} {' is no grammar"
    with pytest.raises(ApiError) as caught, renamed_errors({"prompt": "messages"}):
        raise ApiError(400, "the prompt is too long", param="prompt", code="x")
    assert (caught.value.param, caught.value.code) == ("messages", "x")


def test_what_cannot_be_written_as_json_is_refused_before_any_work():
    for value, said in (("\ud800", "half"), ([], "deeply")):
        for _ in range(100_000 if value == [] else 0):
            value = [value]
        with pytest.raises(InvalidRequest, match=said):
            check_encodable(value)


# Events


def test_a_text_has_its_events_in_openais_order():
    made = draft()
    events = made.begin(USAGE) + made.take({"role": "assistant", "content": ""})
    events += made.take({"content": "Hi"}, [{"token": "Hi"}]) + made.take({"content": "!"})
    events += made.take({}) + made.end("stop", None, USAGE)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []
    assert events[3]["part"]["logprobs"] == []
    assert events[4]["logprobs"] == [{"token": "Hi"}]
    assert events[6]["text"] == "Hi!"
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    response = events[-1]["response"]
    assert response == made.response
    assert response["output"][0]["content"][0]["text"] == "Hi!"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert (response["status"], response["temperature"]) == ("completed", 0.5)


def test_reasoning_and_calls_are_items_of_their_own():
    made = draft()
    made.begin(USAGE)
    events = made.take({"reasoning_content": "Hm"}, [{"token": "Hm"}]) + made.take({"content": "So:"})
    for index in (0, 1):
        name = {"name": "add", "arguments": ""}
        events += made.take({"tool_calls": [{"index": index, "id": f"c{index}", "function": name}]})
        events += made.take({"tool_calls": [{"index": index, "function": {"arguments": "{}"}}]})
    events += made.end("tool_calls", None, USAGE)
    reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta"]
    reasoning += ["reasoning_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta"]
    call += ["function_call_arguments.done", "output_item.done"]
    text = [kind.replace("reasoning", "output") for kind in reasoning]
    assert kinds(events) == [*reasoning, *text, *call, *call, "completed"]
    assert [event["output_index"] for event in events[:-1]] == [0] * 6 + [1] * 6 + [2] * 4 + [3] * 4
    output = made.response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert (output[3]["call_id"], output[3]["arguments"], output[3]["status"]) == ("c1", "{}", "completed")


def test_a_whole_answer_and_a_stream_of_it_become_the_same_response():
    calls = [{"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
    at_once, in_pieces = draft(), draft()
    at_once.take({"reasoning_content": "Hm.", "content": "Hi!", "tool_calls": calls})
    for delta in (
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "Hi"},
        {"content": "!"},
    ):
        in_pieces.take(delta)
    for call in calls:
        in_pieces.take({"tool_calls": [call]})
    for one in (at_once, in_pieces):
        one.end("tool_calls", None, USAGE)
        for item in one.response["output"]:
            item["id"] = ""
    assert at_once.response == in_pieces.response


def test_logprobs_wait_for_their_text_and_calls_have_none():
    made = draft()
    made.take({"content": ""}, ["1"])  # half a character
    events = made.take({"content": "é"}, ["2"]) + made.take({}, ["end"])
    made.end("stop", None, USAGE)
    assert [event["logprobs"] for event in events if "delta" in event] == [["1", "2"], ["end"]]
    assert made.response["output"][0]["content"][0]["logprobs"] == ["1", "2", "end"]
    made = draft()
    made.take({"content": ""}, ["<tool_call>"])
    made.take({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}, ["{}"])
    made.end("tool_calls", None, USAGE)
    assert [item["type"] for item in made.response["output"]] == ["function_call"]
    made = draft()
    made.take({}, ["end"])
    made.end("stop", None, USAGE)
    assert made.response["output"][0]["content"][0]["logprobs"] == ["end"]


def test_a_cut_answer_is_incomplete_and_says_why():
    made = draft()
    made.take({"content": "Hi"})
    assert kinds(made.end("length", None, USAGE))[-1] == "incomplete"
    assert made.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made.response["output"][0]["status"] == "incomplete"


def test_silence_is_an_empty_message():
    made = draft()
    assert "output_item.done" in kinds(made.end("stop", None, USAGE))
    assert made.response["output"][0]["content"][0]["text"] == ""


def test_a_fault_ends_the_stream_with_a_failed_response():
    made = draft()
    made.take({"content": "Hi"})
    (event,) = made.fail(ApiError(500, "the engine died"))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    assert event["response"]["output"][0]["status"] == "incomplete"
    assert kinds(draft().fail(ApiError(500, "at once"))) == ["created", "in_progress", "failed"]


# Truncation


def test_the_oldest_turns_are_dropped_and_no_more_than_needed():
    items = read_items([{"role": "system", "content": "Be brief."}])
    for _ in range(8):
        items += read_items(
            [{"role": "user", "content": "Q"}, CALL, OUTPUT, {"role": "assistant", "content": "A"}]
        )

    async def count(some: list[Any]) -> int:
        return len(some)

    def kept(room: int) -> list[Any]:
        return asyncio.run(drop_oldest_turns(items, room, count))

    assert kept(33) == items
    for turns in range(1, 8):
        assert kept(1 + turns * 4) == [items[0], *items[-4 * turns :]]
        assert kept(4 + turns * 4) == kept(1 + turns * 4)
    assert kept(1) == [items[0], *items[-4:]]  # the last turn stays, to be refused as too long
    assert asyncio.run(drop_oldest_turns(items[:3], 1, count)) == items[:3]
