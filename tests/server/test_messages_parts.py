"""/v1/messages without a server: the way to a chat, the events of a draft, the shape of errors."""

from typing import Any

import pytest

from quire.core.errors import InvalidRequest
from quire.server.errors import ApiError, anthropic_body, speaks_anthropic
from quire.server.messages import MessageBuilder, chat_fields, chat_messages
from quire.server.protocol.base import Usage
from quire.server.protocol.messages import MessageRequest

USAGE: Usage = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 4},
}
HI = [{"role": "user", "content": "Hi"}]
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def document(kind: str, **source: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": kind, **source}}


def fields(messages: Any = HI, **more: Any) -> dict[str, Any]:
    return chat_fields(MessageRequest(messages=messages, **{"max_tokens": 5, **more}))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


# The way to a chat


def test_fields_get_the_names_that_chats_have_for_them():
    got = fields(
        system=[{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "brief."}],
        stop_sequences=["."],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
    )
    assert got["messages"][0] == {"role": "system", "content": "Be\nbrief."}
    assert got["messages"][1] == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert (got["max_completion_tokens"], got["stop"], got["user"]) == (5, ["."], "me")
    assert (got["temperature"], got["top_p"], got["top_k"]) == (0.5, 0.9, 3)
    assert got["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}
    older = fields(output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert older["response_format"] == got["response_format"]
    assert "tools" not in got
    assert "continue_final_message" not in got
    assert fields(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}


def test_documents_of_text_become_text():
    plain = {
        **document("text", media_type="text/plain", data="Body"),
        "title": "Title",
        "context": "From 1999.",
    }
    parts = document("content", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    said = [{"role": "user", "content": [plain, parts, {"type": "text", "text": "Hm?"}]}]
    content = fields(said)["messages"][0]["content"]
    assert [part["text"] for part in content] == ["Title\nFrom 1999.\nBody", "a\nb", "Hm?"]
    pdf = document("base64", media_type="application/pdf", data="JVBER")
    with pytest.raises(ApiError, match=r"application/pdf.*send their text"):
        fields([{"role": "user", "content": [pdf]}])


def test_tools_their_uses_and_their_results_become_calls():
    conversation = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Adding."},
                USE,
                {**USE, "id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT,
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "user", "content": "Answer!"},
    ]
    got = fields(
        conversation,
        tools=[ADD],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    )
    _, assistant, *rest = got["messages"]
    assert (assistant["reasoning_content"], assistant["content"]) == ("Hm.", "Adding.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert rest == [
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "name": "add", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}, {"type": "text", "text": "Answer!"}]},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert got["tools"] == [{"type": "function", "function": function}]
    assert got["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert got["parallel_tool_calls"] is False
    assert fields(tools=[ADD], tool_choice={"type": "any"})["tool_choice"] == "required"
    assert fields(tools=[ADD])["tool_choice"] == "auto"


class Piece(str):
    """Is joined with others, and never added to what came before: that would copy it each time."""

    def __radd__(self, other: str) -> str:
        raise AssertionError("added")

    __add__ = __radd__


def test_the_texts_of_one_turn_are_joined_once():
    text, thought = Piece("a"), Piece("b")
    blocks = [{"type": "text", "text": text}, {"type": "thinking", "thinking": thought}]
    turns = chat_messages([*HI, *[{"role": "assistant", "content": blocks * 2}] * 2], None)
    assert turns[1:] == [{"role": "assistant", "content": "aaaa", "reasoning_content": "bbbb"}]


def test_an_answer_that_the_caller_began_is_continued():
    got = fields([*HI, {"role": "assistant", "content": "He"}])
    assert got["messages"][-1] == {"role": "assistant", "content": "He"}
    assert (got["continue_final_message"], got["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [document("base64", data="x")]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [document("url", url="x")]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [document("text", data=5)]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [document("content", content=[document("text")])]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tools": [ADD], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
    ids=str,
)
def test_what_cannot_be_taken_is_refused_by_name(asked: dict[str, Any], param: str):
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        fields(**asked)
    assert caught.value.param == param
    assert param.split(".")[0] in str(caught.value)


# Events


def test_thoughts_text_and_calls_are_blocks_with_anthropics_events():
    draft = MessageBuilder("msg_1", "m", 50)
    events = draft.begin(USAGE) + draft.take({"role": "assistant", "content": ""})
    events += draft.take({"reasoning_content": "Hm."}) + draft.take({"content": "Hi"})
    events += draft.take({"content": "!"})
    call = {"index": 0, "id": "t1", "function": {"name": "add", "arguments": ""}}
    events += draft.take({"tool_calls": [call]})
    for piece in ('{"a"', ": 1}"):
        events += draft.take({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
    events += draft.end("tool_calls", None, USAGE)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds(events) == [
        "message_start",
        block[0],
        "ping",
        *block[1:],
        *(block[0], block[1], block[1], block[2]),
        *(block[0], block[1], block[1], block[2]),
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert [event["index"] for event in events if "index" in event] == [0] * 3 + [1] * 4 + [2] * 4
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert draft.message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Hi!"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    ]
    assert draft.message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }


@pytest.mark.parametrize(
    ("finish", "stop", "max_tokens", "said"),
    [
        ("stop", None, 50, ("end_turn", None)),
        ("stop", 2, 50, ("end_turn", None)),
        ("stop", "END", 50, ("stop_sequence", "END")),
        ("length", None, 2, ("max_tokens", None)),
        ("length", None, 50, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_to_stop_is_anthropics(finish: str, stop: Any, max_tokens: int, said: tuple):
    draft = MessageBuilder("msg_1", "m", max_tokens)
    draft.take({"content": "Hi"})
    draft.end(finish, stop, USAGE)
    assert (draft.message["stop_reason"], draft.message["stop_sequence"]) == said


def test_arguments_that_a_limit_cut_off_can_still_be_seen():
    draft = MessageBuilder("msg_1", "m", 2)
    draft.take({"tool_calls": [{"index": 0, "id": "t1", "function": {"name": "f", "arguments": '{"a'}}]})
    draft.end("length", None, USAGE)
    assert draft.message["content"][0]["input"] == {"raw_arguments": '{"a'}
    assert draft.message["stop_reason"] == "max_tokens"


# Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_kinds(status: int, kind: str):
    body = anthropic_body(ApiError(status, "no", param="system"), "req-1")
    assert body == {"type": "error", "error": {"type": kind, "message": "system: no"}, "request_id": "req-1"}


def test_only_its_own_paths_speak_anthropics_dialect():
    assert speaks_anthropic("/v1/messages")
    assert speaks_anthropic("/v1/messages/count_tokens")
    assert not speaks_anthropic("/v1/messagesX")
    assert not speaks_anthropic("/v1/responses")
