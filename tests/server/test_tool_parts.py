"""Tools and thoughts without a server: what is refused, what a grammar is asked for, how answers are shown."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError, InvalidRequest
from quire.server.chat import ChatReply
from quire.server.generation import Change
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.schemas import served_schema
from quire.server.settings import ServerSettings
from quire.server.tools import MAX_BYTES, MAX_TOOLS, tool_plan
from quire.text.answer import AnswerSequence
from quire.text.reader import AnswerFormats, AnswerParsers, choose_formats
from quire.text.template import ChatTemplate
from quire.text.tool_formats import described, tool_parser
from tests.server.scripted import ScriptedEngine, posted, scripted_app, update

HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TRANSCRIPTS = Path(__file__).parents[1] / "text" / "transcripts"


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


SHELL = {"type": "custom", "custom": {"name": "sh"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=HI, **fields)


# What is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool("get weather")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool("b"), tool()]}, "tools[2].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(f"t{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(description="x" * MAX_BYTES)]}, "tools"),
        ({"tools": [tool(description="\ud800")]}, "tools"),
        ({"tools": [tool(parameters=json.loads('{"a":' * 200 + "1" + "}" * 200))]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"tool_choice": "always", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "sh"}}, "tools": [tool(), SHELL]},
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sh"}}, "tools": [tool(), SHELL]},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("sometimes", "get_weather"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("auto"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f"), "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [tool()]}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_tools_are_refused_by_place(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        tool_plan(request(**fields))
    assert caught.value.param == param


def test_names_of_parsers_that_nobody_knows_are_refused_at_the_start():
    assert ServerSettings(tool_call_parser="hermes", reasoning_parser="none")
    for wrong in ({"tool_call_parser": "hermis"}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError, match="choose one of"):
            ServerSettings(**wrong)


# What they come to


def test_without_a_choice_tools_are_offered_and_with_none_they_are_hidden():
    assert tool_plan(request(tools=[tool()])).shown == (tool(),)
    assert tool_plan(request(tools=[tool()])).forced is None
    assert tool_plan(request(tools=[tool()], tool_choice="none")).shown == ()
    assert tool_plan(request(tools=[tool()], parallel_tool_calls=False)).max_calls == 1
    assert tool_plan(request(tool_choice="none")).parser_maker("hermes") is None
    assert tool_plan(request(tools=[tool()])).parser_maker(None) is None


def test_allowed_tools_hide_the_others():
    tools = [tool(), tool("b"), tool("c")]
    plan = tool_plan(request(tools=tools, tool_choice=allowed("auto", "c", "get_weather")))
    assert (plan.shown, plan.forced) == ((tool(), tool("c")), None)
    plan = tool_plan(request(tools=[*tools, SHELL], tool_choice=allowed("required", "b")))
    assert plan.shown == (tool("b"),)
    assert plan.forced is not None
    assert "get_weather" not in plan.forced.text


def test_tools_of_types_that_are_not_served_are_left_out_with_a_warning():
    plan = tool_plan(request(tools=[SHELL, tool(), {"type": "web_search"}, SHELL], tool_choice="auto"))
    assert plan.shown == (tool(),)
    assert plan.warnings == (
        "tools of type 'custom' are left out, since only 'function' is served: tools[0], tools[3]",
        "tools of type 'web_search' are left out, since only 'function' is served: tools[2]",
    )
    choice = {"type": "function", "function": {"name": "sh"}}
    with pytest.raises(InvalidRequest, match=r"'sh', and the tools are get_weather.*'custom' are left out"):
        tool_plan(request(tools=[SHELL, tool()], tool_choice=choice))


def test_required_asks_for_an_array_of_calls():
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
        "$defs": {"node": {"type": "string"}},
    }
    plan = tool_plan(
        request(
            tools=[tool(), tool("walk", parameters=tree)], tool_choice="required", parallel_tool_calls=False
        )
    )
    assert plan.forced is not None
    schema = json.loads(plan.forced.text)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["get_weather", "walk"]
    moved = schema["$defs"]["tool_1"]
    assert moved["properties"]["next"] == {"$ref": "#/$defs/tool_1/$defs/node"}
    assert moved["properties"]["self"] == {"$ref": "#/$defs/tool_1"}
    assert not plan.forced.strict


def test_a_named_tool_asks_for_its_arguments_which_are_those_it_lists():
    choice = {"type": "function", "function": {"name": "get_weather"}}
    plan = tool_plan(request(tools=[tool(), tool("b")], tool_choice=choice))
    assert plan.forced is not None
    assert json.loads(plan.forced.text) == served_schema(CITY, False, "tools")[0]
    assert json.loads(plan.forced.text)["additionalProperties"] is False
    for parameters, closed in ((None, True), ({"type": "object"}, False), ({"$ref": "#/$defs/a"}, False)):
        plan = tool_plan(request(tools=[tool(parameters=parameters)], tool_choice=choice))
        assert plan.forced is not None
        assert ("additionalProperties" in json.loads(plan.forced.text)) == closed


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_its_forced_calls_repeat(stream: bool):
    call = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    other = call.replace("Rome", "Paris")
    steps = [[update(text)] for text in (f"[{call}", f", {other}", f", {other}", f", {call}", f", {call}]")]
    engine = ScriptedEngine([*steps, [update("", finish_reason="stop")]])
    body = {"messages": HI, "tools": [tool()], "tool_choice": "required", "stream": stream}
    status, pieces = asyncio.run(posted(scripted_app(engine), "/v1/chat/completions", body))
    assert status == 200
    shown = b"".join(pieces).decode()
    assert (shown.count('"name":"get_weather"'), shown.count('"finish_reason":"tool_calls"')) == (2, 1)
    assert [index for _, index in engine.stopped] == [0]


# How the model is told


def test_a_template_without_tools_is_told_in_words():
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    told = described(messages, [tool()])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert '"get_weather"' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\n42\n</tool_response>"
    as_llama = described(messages, [tool()], "llama3_json")
    assert as_llama[2]["content"] == '{"name": "f", "parameters": {"a": 1}}'
    assert "<tool_call>" not in as_llama[0]["content"]
    assert described(HI, None) == HI


def test_formats_are_chosen_by_name_or_by_the_template():
    silent, qwen = (
        ChatTemplate("{{ messages }}"),
        ChatTemplate("{% if tools %}<tool_call>{% endif %}</think>"),
    )
    assert choose_formats(silent, None, None) == AnswerFormats("hermes", None)
    assert choose_formats(qwen, None, None) == AnswerFormats("hermes", "qwen3")
    assert choose_formats(qwen, "none", "deepseek_r1") == AnswerFormats(None, "deepseek_r1")
    assert choose_formats(ChatTemplate("{{ tools }}"), "llama3_json", None).tools == "llama3_json"
    assert choose_formats(ChatTemplate("{{ tools }}"), None, None) == AnswerFormats()


# How answers are shown


class FakeGeneration:
    """The text of one answer, in given parts."""

    def __init__(self, parts: list[str], reason: str = "stop") -> None:
        self.sequence = AnswerSequence(0, None)
        self.answers = [self]
        self.sequences = self.best = [self.sequence]
        self.prompt_logprobs = None
        self._parts, self._reason = parts, reason

    @property
    def is_open(self) -> bool:
        return self.sequence.finish_reason is None

    def take(self) -> list[Change]:
        index = len(self.sequence.token_ids)
        self.sequence.add_text(self._parts[index])
        self.sequence.token_ids.append(index)
        last = index == len(self._parts) - 1
        self.sequence.finish_reason = self._reason if last else None
        return [Change(0, self.sequence, index, self._parts[index])]

    async def finish(self) -> None:
        while self.is_open:
            self.take()

    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": 1, "completion_tokens": len(self.sequence.token_ids), "total_tokens": 9}


def reply(parts: list[str], reading: AnswerParsers, reason: str = "stop", **fields: Any) -> ChatReply:
    generation: Any = FakeGeneration(parts, reason)
    return ChatReply("chatcmpl-1", request(**fields), "m", generation, None, reading)


def collected(one: ChatReply) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = []
    while one.generation.is_open:
        choices += [dict(choice) for chunk in one.take_chunks() for choice in chunk["choices"]]
    return choices


def accumulated(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """As OpenAI's clients put deltas together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"].startswith("call_")
                assert (call["type"], call["function"]["name"]) == ("function", call["function"]["name"])
                message["tool_calls"].append(
                    {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                )
            else:
                assert set(call) == {"index", "function"}
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_recorded_transcripts_stream_as_openai_streams_calls(form: str, size: int):
    names = ("get_weather", "search", "now", "write_file", "plan", "say", "f")
    for one in json.loads((TRANSCRIPTS / f"{form}.json").read_text(encoding="utf-8")):
        text = one["text"]
        reading = AnswerParsers(one.get("reasoning_parser"), None, lambda: tool_parser(form, names))
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        choices = collected(reply(parts, reading))
        message = accumulated(choices)
        assert message["tool_calls"] == one.get("streamed_calls", one["calls"])
        assert message["content"] == one.get("streamed_content", one["content"])
        assert message["reasoning_content"] == one.get("reasoning", "")
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] == ("tool_calls" if one["calls"] else "stop")
        assert set(reasons[:-1]) == {None}

        whole = asyncio.run(reply(parts, reading).whole())["choices"][0]
        assert (whole["message"]["content"] or "") == one["content"]
        found = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert found == one["calls"]
        assert (whole["message"]["content"] is None) == (bool(found) and not one["content"])
        assert whole["finish_reason"] == ("tool_calls" if found else "stop")


def test_an_answer_that_is_cut_short_says_so_and_keeps_its_forced_call():
    plan = tool_plan(
        request(tools=[tool()], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    )
    reading = AnswerParsers(make_tool_parser=plan.parser_maker(None))
    whole = asyncio.run(reply(['{"city": "Pa'], reading, "length").whole())["choices"][0]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'


def test_thoughts_are_counted():
    reading = AnswerParsers("qwen3", "<|im_start|>assistant\n")
    one = reply(["<think>", "Hm", "m."], reading)
    usage = asyncio.run(one.whole())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    plain = asyncio.run(reply(["Yes", "."], reading).whole())
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "reasoning_content" not in plain["choices"][0]["message"]


def test_deltas_keep_the_order_in_which_things_were_written():
    text = 'One.<tool_call>{"name": "f", "arguments": {}}</tool_call>\nTwo.'
    choices = collected(reply([text], AnswerParsers(make_tool_parser=lambda: tool_parser("hermes", ()))))
    keys = [tuple(choice["delta"]) for choice in choices]
    assert keys == [("role", "content"), ("content", "tool_calls"), ("content",), ()]
