"""Streams byte for byte: every dialect's events as they were written down, apart from ids and times."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import EngineDead
from tests.server.scripted import ScriptedEngine, logprobs, normalised, posted, scripted_app, update

FOLDER = Path(__file__).parent / "transcripts"
HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
PLAIN = ("Hel", 'lo "you"\n', "\\ t\ta", "ß😀", "é</s>", "")
CALLING: tuple[str, ...] = (
    "<think>",
    "It rains",
    "?</thi",
    "nk>\n\n",
    "Let me ",
    "see.\n<tool",
    "_call>\n",
    '{"name": "get_wea',
)
CALLING += ('ther", "argu', 'ments": {"ci', 'ty": "Ber', 'lin"}}', "\n</tool_call>", "")


def plain(*texts: str, **last: Any) -> list[list[Any]]:
    """A step for each text; the last ends the sequence."""
    *first, end = texts
    return [[update(text)] for text in first] + [[update(end, **{"finish_reason": "stop", **last})]]


def split_character() -> list[list[Any]]:
    """A step whose token completes no character shows nothing."""
    whole = update("😀").token_ids
    return [[update("a")], [update(whole[:2])], [update(whole[2:])], [update("b", finish_reason="length")]]


def two_answers() -> list[list[Any]]:
    first, second = plain(*PLAIN), plain("Other ", "words", finish_reason="length")
    for (one,) in second:
        one.index = 1
    return [a + b for a, b in zip(first[:2], second, strict=True)] + first[2:]


def two_prompts() -> list[list[Any]]:
    steps = two_answers()
    for step in two_answers():
        for one in step:
            one.request_id = "1"
        steps.append(step)
    return steps


def with_logprobs() -> list[list[Any]]:
    return [
        [update("He", **logprobs("He"))],
        [update("llo", **logprobs("llo"), finish_reason="stop", stop_reason=7)],
    ]


STREAM: dict[str, Any] = {"stream": True}
USAGE = {**STREAM, "stream_options": {"include_usage": True}}
ITEM = {"input": "Hi", **STREAM}
FLAT_TOOLS: list[dict[str, Any]] = [{"type": "function", **TOOL}]
INPUT_TOOLS = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
SAY: dict[str, Any] = {"messages": HI, "max_tokens": 50, **STREAM}
ARGUMENTS = ('{"ci', 'ty": "Ber', 'lin"}', "")
ARRAY = (
    '[{"name": "get_wea',
    'ther", "para',
    'meters": {"city": "B"}}',
    ', {"name": "b", "parameters": {}}]',
    "",
)
REPEATED = (', {"name": "get_weather", "parameters": {"ci', 'ty": "B"}}', ', {"name": "get_wea', "")
FUNCTION = {"type": "function", "function": {"name": TOOL["name"]}}
SCENES: dict[str, tuple[str, dict[str, Any], list[list[Any]]]] = {
    "chat": (CHAT, {"messages": HI, **STREAM}, plain(*PLAIN)),
    "chat_split": (CHAT, {"messages": HI, **STREAM}, split_character()),
    "chat_n": (CHAT, {"messages": HI, "n": 2, **STREAM}, two_answers()),
    "chat_usage": (CHAT, {"messages": HI, **USAGE}, plain(*PLAIN, num_cached=2)),
    "chat_batched": (CHAT, {"messages": HI, **USAGE}, [[step[0] for step in plain(*PLAIN)]]),
    "chat_stop": (CHAT, {"messages": HI, "stop": ["lo you", 'lo "you'], **STREAM}, plain(*PLAIN)),
    "chat_logprobs": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, **STREAM}, with_logprobs()),
    "chat_tools": (CHAT, {"messages": HI, "tools": TOOLS, **USAGE}, plain(*CALLING)),
    "chat_tools_n": (CHAT, {"messages": HI, "tools": TOOLS, "n": 2, **STREAM}, two_answers()),
    "chat_thoughts": (CHAT, {"messages": HI, **STREAM}, plain(*CALLING, finish_reason="length")),
    "chat_named": (
        CHAT,
        {"messages": HI, "tools": TOOLS, "tool_choice": FUNCTION, **STREAM},
        plain(*ARGUMENTS),
    ),
    "chat_required": (
        CHAT,
        {"messages": HI, "tools": TOOLS, "tool_choice": "required", **USAGE},
        plain(*ARRAY),
    ),
    "chat_repeats": (
        CHAT,
        {"messages": HI, "tools": TOOLS, "tool_choice": "required", **USAGE},
        plain('[{"name": "get_weather", "parameters": {"city": "B"}}', *REPEATED),
    ),
    "chat_functions": (CHAT, {"messages": HI, "functions": [TOOL], **USAGE}, plain(*CALLING)),
    "chat_copies": (CHAT, {"messages": HI, "n": 2, "temperature": 0, **USAGE}, plain("Hel", "lo")),
    "completions_copies": (
        COMPLETIONS,
        {"prompt": ["Hi", "Ho"], "n": 2, "temperature": 0, **USAGE},
        [[update("Hel"), update("Hal", request=1)], [update("lo", finish_reason="stop")]]
        + [[update("", request=1, finish_reason="length")]],
    ),
    "completions": (COMPLETIONS, {"prompt": "Hi", **STREAM}, plain(*PLAIN)),
    "completions_split": (COMPLETIONS, {"prompt": "Hi", **STREAM}, split_character()),
    "completions_many": (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, **USAGE}, two_prompts()),
    "completions_echo": (COMPLETIONS, {"prompt": "Hi", "echo": True, **STREAM}, plain(*PLAIN)),
    "completions_logprobs": (COMPLETIONS, {"prompt": "Hi", "logprobs": 2, **STREAM}, with_logprobs()),
    "responses": ("/v1/responses", {**ITEM, "tools": FLAT_TOOLS}, plain(*CALLING)),
    "responses_plain": ("/v1/responses", ITEM, plain(*PLAIN)),
    "responses_logprobs": (
        "/v1/responses",
        {**ITEM, "include": ["message.output_text.logprobs"]},
        with_logprobs(),
    ),
    "messages": ("/v1/messages", {**SAY, "tools": INPUT_TOOLS}, plain(*CALLING)),
    "messages_stop": ("/v1/messages", {**SAY, "stop_sequences": ['lo "you']}, plain(*PLAIN)),
}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
PLAIN_SCENES = ("chat", "chat_split", "chat_n", "chat_usage", "chat_batched", "chat_stop", "chat_logprobs")


def stream_of(name: str, fault: Exception | None = None) -> str:
    path, body, script = SCENES[name]
    engine = ScriptedEngine(script if fault is None else script[:3], fault)
    app = scripted_app(engine, **({} if name in PLAIN_SCENES else PARSERS))
    status, pieces = asyncio.run(posted(app, path, body))
    assert status == 200
    return normalised(b"".join(pieces))


@pytest.mark.parametrize("name", SCENES)
def test_a_stream_is_the_same_byte_for_byte(name: str):
    assert stream_of(name) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["chat", "completions", "responses", "messages"])
def test_a_stream_that_breaks_off_ends_with_its_dialects_error(name: str):
    shown = stream_of(name, EngineDead("the engine died"))
    assert shown == (FOLDER / f"{name}_fault.txt").read_text()


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
LONG = "x" * 5000
TALK: dict[str, Any] = {"messages": HI}
SAID: dict[str, Any] = {"messages": HI, "max_tokens": 5}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(
        (CHAT, {**TALK, name: value})
        for name, value in [
            ("temperature", 101.0),
            ("top_p", 0.0),
            ("n", 0),
            ("seed", 2**65),
            ("min_tokens", -1),
            ("stop", [""]),
            ("max_tokens", 0),
            ("max_completion_tokens", 0),
            ("logit_bias", {"a": 1.0}),
            ("logit_bias", {"1": 101.0}),
            ("top_logprobs", 2),
            ("allowed_token_ids", []),
            ("use_beam_search", True),
            ("length_penalty", 2.0),
            ("stream_options", {"include_usage": True}),
            ("functions", [{"name": "a b"}]),
            ("function_call", "x"),
            ("function_call", {"name": "f"}),
            ("chat_template", "{{ 1 }}"),
            ("response_format", {"type": "xml"}),
            ("response_format", {"type": "json_schema"}),
            ("structured_outputs", {"json": {}, "regex": "a"}),
            ("structured_outputs", {"other": 1}),
            ("regex", ""),
            ("guided_choice", []),
            ("guided_json", "{"),
            ("truncate_prompt_tokens", 0),
            ("min_tokens", 5000),
            ("chat_template_kwargs", {"messages": 1}),
            ("tools", [{"type": 5}]),
            ("tool_choice", "required"),
            ("tools", [{"type": "function", "function": {"name": "a b"}}]),
            ("messages", []),
            ("messages", [{"role": 5}]),
            ("messages", [{"role": "user", "content": LONG}]),
            ("messages", [{"role": "user", "content": [{"type": "image"}]}]),
            ("model", "other"),
            ("temperature", "hot"),
            ("n", 2.5),
            ("user", 5),
        ]
    ),
    (CHAT, {**TALK, "logprobs": True, "top_logprobs": 21}),
    (CHAT, {**TALK, "max_tokens": 3, "min_tokens": 4}),
    (CHAT, {**TALK, "max_completion_tokens": 3, "min_tokens": 4}),
    (CHAT, {**TALK, "best_of": 2, "n": 3}),
    (CHAT, {**TALK, "best_of": 3, "stream": True}),
    (CHAT, {**TALK, "n": 17, "temperature": 0.0}),
    (CHAT, {**TALK, "n": 2, "best_of": 3, "temperature": 0.0}),
    (CHAT, {**TALK, "functions": [TOOL], "tools": TOOLS}),
    (CHAT, {**TALK, "use_beam_search": True, "n": 40}),
    (CHAT, {**TALK, "use_beam_search": True, "stop": "a", "best_of": 2}),
    (CHAT, {**TALK, "use_beam_search": True, "stream": True, "n": 2, "temperature": 0.0}),
    (CHAT, {**TALK, "regex": "a", "grammar": 'start: "a"'}),
    (CHAT, {**TALK, "prompt_logprobs": 1, "stream": True}),
    (CHAT, {**TALK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
    (CHAT, {**TALK, "tools": [*TOOLS, {"type": "web"}], "tool_choice": {"type": "web"}}),
    (CHAT, {}),
    *(
        (COMPLETIONS, {"prompt": "Hi", **fields})
        for fields in [
            {"max_tokens": 0},
            {"logprobs": 21},
            {"prompt": []},
            {"prompt": LONG},
            {"prompt": ["a", LONG]},
            {"prompt": [5, "a"]},
            {"suffix": "a"},
            {"temperature": -1},
            {"stop": [""]},
            {"best_of": 2, "stream": True},
            {"response_format": {"type": "xml"}},
        ]
    ),
    *(
        ("/v1/responses", {"input": "Hi", **fields})
        for fields in [
            {"max_output_tokens": 0},
            {"temperature": 101.0},
            {"top_logprobs": 21},
            {"stop": [""]},
            {"input": LONG},
            {"input": []},
            {"input": [{"type": "message", "role": "x", "content": "a"}]},
            {"background": True, "store": False},
            {"text": {"format": {"type": "xml"}}},
            {"text": {"format": {"type": "json_schema"}}},
            {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}, "strict": "yes"}}},
            {"tools": [{"type": "web"}], "tool_choice": "required"},
            {"tools": [{"type": "web"}], "tool_choice": {"type": "web"}},
            {"tools": [{"type": "function"}]},
            {"tools": [{**FLAT_TOOLS[0], "name": "a b"}]},
            {"tools": [{**FLAT_TOOLS[0], "strict": 5}]},
            {"tools": [{**FLAT_TOOLS[0], "parameters": {"type": "array"}}]},
            {"tool_choice": "x"},
            {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "x"}},
            {"max_output_tokens": 3, "min_tokens": 4},
            {"previous_response_id": "x"},
            {"top_k": -5},
            {"truncation": "x"},
            {"chat_template_kwargs": {"messages": 1}},
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        ]
    ),
    *(
        ("/v1/messages", {**SAID, **fields})
        for fields in [
            {"max_tokens": 0},
            {"temperature": 101.0},
            {"stop_sequences": [""]},
            {"messages": []},
            {"min_tokens": 9},
            {"messages": [{"role": "user", "content": LONG}]},
            {"messages": [{"role": "x", "content": "a"}]},
            {"output_config": {"format": {"type": "xml"}}},
            {"tools": [{"name": "a"}]},
            {"tool_choice": {"type": "x"}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": "\ud800"}}}},
            {"tools": [{"name": "a b", "input_schema": {}}]},
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            {"tools": [{"name": "a", "input_schema": {}, "strict": 5}]},
            {"tools": [{"type": "web"}]},
            {"top_k": -5},
            {"tools": INPUT_TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            {"mcp_servers": [1]},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"max_tokens": "many"},
            {"tool_choice": {"type": "any"}},
            {"repetition_penalty": -1.0},
            {"truncate_prompt_tokens": 0},
        ]
    ),
    ("/v1/messages", {"messages": HI}),
    ("/tokenize", {}),
    ("/tokenize", {"messages": HI, "tools": [{"type": 5}]}),
    ("/detokenize", {"tokens": [300]}),
]


def refusals() -> str:
    """One line for each request that is refused: what it was, the status and the body."""
    lines = []
    app = scripted_app(ScriptedEngine([], EngineDead("not refused")), **PARSERS)
    for path, body in REFUSED:
        status, pieces = asyncio.run(posted(app, path, body))
        shown = json.dumps(body)[:200]
        lines.append(f"{path} {shown}\n{status} {b''.join(pieces).decode()}\n")
    return "\n".join(lines)


def test_every_dialect_names_its_own_field_in_an_error():
    assert refusals() == (FOLDER / "refusals.txt").read_text()


@pytest.mark.parametrize("streams", [True, False])
def test_a_fault_that_the_engine_finds_is_named_in_the_dialects_words_too(streams: bool):
    """A grammar that does not compile is known only in the engine, after the request was submitted."""
    for path, body, param in (
        (CHAT, {"messages": HI}, "response_format"),
        ("/v1/responses", {"input": "Hi"}, "text.format"),
    ):
        engine = ScriptedEngine([[update("", error="no such keyword", param="response_format")]])
        app = scripted_app(engine, **PARSERS)
        status, pieces = asyncio.run(posted(app, path, {**body, "stream": streams}))
        assert status == 400
        assert json.loads(b"".join(pieces))["error"]["param"] == param
    engine = ScriptedEngine([[update("", error="no such keyword", param="response_format")]])
    app = scripted_app(engine, **PARSERS)
    status, pieces = asyncio.run(posted(app, "/v1/messages", {**SAID, "stream": streams}))
    assert status == 400
    assert json.loads(b"".join(pieces))["error"]["message"] == "output_config.format: no such keyword"
