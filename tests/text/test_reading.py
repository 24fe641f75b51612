"""Transcripts of several model families, read as thoughts, content and calls, however they are cut."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, Reasoning, merged
from quire.text.reader import AnswerReader, RepeatFilter
from quire.text.reasoning import guessed_reasoning, reasoning_parser
from quire.text.tool_formats import guessed_tool_parser, tool_parser
from quire.text.tool_parser import JsonArrayParser, NamedParser

FOLDER = Path(__file__).parent / "transcripts"
TOOLS = ("get_weather", "search", "now", "write_file", "plan", "say", "f")
FORMATS = ("hermes", "llama3_json", "json_array", "reasoning")
TRANSCRIPTS = [
    pytest.param(form, one, id=f"{form}: {one['title']}")
    for form in FORMATS
    for one in json.loads((FOLDER / f"{form}.json").read_text(encoding="utf-8"))
]


def reader(form: str, transcript: dict[str, Any] | None = None) -> AnswerReader:
    transcript = transcript or {}
    reasoning = transcript.get("reasoning_parser")
    tools: Any = None
    if form == "json_array":
        tools = JsonArrayParser()
    elif form != "reasoning":
        tools = tool_parser(form, TOOLS)
    return AnswerReader(reasoning_parser(reasoning, transcript.get("prompt")) if reasoning else None, tools)


def read(reader: AnswerReader, parts: list[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return merged([*pieces, *reader.finish()])


def calls_in(pieces: list[Piece]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            assert piece.index == len(found)
            found.append({"name": piece.name, "arguments": ""})
        elif isinstance(piece, Arguments):
            assert piece.index == len(found) - 1
            found[-1]["arguments"] += piece.text
        elif isinstance(piece, CallEnd):
            assert piece.index == len(found) - 1
    return found


@pytest.mark.parametrize(("form", "transcript"), TRANSCRIPTS)
def test_a_whole_transcript_is_read_as_it_should_be(form: str, transcript: dict[str, Any]):
    answer = reader(form, transcript).whole(transcript["text"])
    assert answer.content == transcript["content"]
    assert answer.reasoning == transcript.get("reasoning", "")
    found = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    assert found == transcript.get("calls", [])


@pytest.mark.parametrize(("form", "transcript"), TRANSCRIPTS)
def test_letter_by_letter_gives_the_same_as_at_once(form: str, transcript: dict[str, Any]):
    one = reader(form, transcript)
    pieces = read(one, list(transcript["text"]))
    assert pieces == read(reader(form, transcript), [transcript["text"]])
    wanted = transcript.get("streamed_calls", transcript.get("calls", []))
    assert calls_in(pieces) == wanted
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert content == transcript.get("streamed_content", transcript["content"])
    if form in ("hermes", "llama3_json"):
        assert one.has_calls == bool(transcript["calls"])


@given(st.data())
def test_however_a_transcript_is_cut_it_reads_the_same(data: st.DataObject):
    form, transcript = data.draw(st.sampled_from([one.values for one in TRANSCRIPTS]))
    text = transcript["text"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader(form, transcript), parts) == read(reader(form, transcript), [text])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<tool", "</to", ";", "[", "]"),
    *(
        '{"name": "now", ',
        '"arguments": {',
        '"parameters": {',
        '"name": "f"',
        '"a": "\\"}"',
        "}",
        "{",
        "}}",
        ",",
    ),
    *(
        '"',
        "\\",
        "\\u00e9",
        "null",
        "12",
        " ",
        "\n",
        "é",
        "😀",
        "words ",
        ":",
        "<",
        '{"name": "now", "parameters": {}}',
    ),
]


@given(
    st.sampled_from(["hermes", "llama3_json", "json_array", "qwen3", "deepseek_r1"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(0, 120), max_size=10),
)
def test_nonsense_never_raises_is_never_lost_and_reads_the_same_in_any_cuts(
    form: str, fragments: list[str], cuts: list[int]
):
    text = "".join(fragments)
    made = {"reasoning_parser": form} if form in ("qwen3", "deepseek_r1") else {}
    form = "reasoning" if made else form
    places = sorted(min(cut, len(text)) for cut in cuts)
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    pieces = read(reader(form, made), parts)
    assert pieces == read(reader(form, made), [text])
    if not any(isinstance(piece, (CallBegin, Reasoning)) for piece in pieces) and form != "reasoning":
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text


def test_arguments_come_as_they_are_written_and_the_name_first():
    one = reader("hermes")
    assert one.feed('<tool_call>{"name": "f", "argu') == []
    assert one.feed('ments": {"a') == [CallBegin(0, "f"), Arguments(0, '{"a')]
    assert one.feed('": 1') == [Arguments(0, '": 1')]
    assert one.feed("}}</tool_call>")[0] == Arguments(0, "}")


def test_plain_text_is_passed_on_at_once():
    one = reader("hermes")
    assert one.feed("Hello there") == [Content("Hello there")]
    assert one.feed(" you") == [Content(" you")]


def test_a_forced_call_begins_with_its_arguments():
    one = AnswerReader(tools=NamedParser("f"))
    assert one.feed("\n ") == []
    assert one.feed('{"a":') == [CallBegin(0, "f"), Arguments(0, '{"a":')]
    assert not one.has_calls
    assert one.feed("1}") == [Arguments(0, "1}")]
    assert one.finish() == [CallEnd(0, "")]
    assert one.has_calls
    cut_short = AnswerReader(tools=NamedParser("f")).whole('{"a": "b')
    assert [(call.name, call.arguments) for call in cut_short.calls] == [("f", '{"a": "b')]


REPEATING = """[{"name": "a", "parameters": {"x": 1}}, {"name": "a", "parameters": {"x": 1}},
 {"name": "a", "parameters": {"x": 12}}, {"name": "b", "parameters": {"x": 12}}, {"name": "b", "parameters": {"x": 12}},
 {"name": "b", "parameters": {"x": 12}}, {"name": "a", "parameters": {"x": 1}}]"""


@pytest.mark.parametrize("size", [1, 7, len(REPEATING)])
def test_a_call_that_repeats_the_one_before_is_dropped(size: int):
    parts = [REPEATING[at : at + size] for at in range(0, len(REPEATING), size)]
    pieces = read(AnswerReader(tools=JsonArrayParser(), repeats=RepeatFilter()), parts)
    expected = [("a", '{"x": 1}'), ("a", '{"x": 12}'), ("b", '{"x": 12}'), ("a", '{"x": 1}')]
    assert [(call["name"], call["arguments"]) for call in calls_in(pieces)] == expected
    assert [piece.index for piece in pieces if isinstance(piece, CallBegin)] == [0, 1, 2, 3]


def test_a_repetition_that_a_limit_cuts_off_is_dropped_and_another_call_is_not():
    begun = '[{"name": "a", "parameters": {"x": 1}}, {"name": "a", "parameters": {"x"'
    for text, expected in ((begun, ["a"]), (begun + ": 2", ["a", "a"])):
        reader = AnswerReader(tools=JsonArrayParser(), repeats=RepeatFilter())
        assert [call.name for call in reader.whole(text).calls] == expected
        assert reader.has_calls


def test_calls_beyond_the_limit_are_dropped():
    one = AnswerReader(tools=tool_parser("hermes", TOOLS), max_calls=1)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert len(one.whole(call * 3).calls) == 1


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% for m in messages %}…", None, None),
        ("{%- if tools %} within <tool_call></tool_call> … enable_thinking </think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>", None, None),
        ('Environment: ipython … {"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("<｜Assistant｜> … content.split('</think>')", None, "deepseek_r1"),
    ],
)
def test_a_template_shows_its_formats(template: str, tools: str | None, reasoning: str | None):
    assert guessed_tool_parser(template) == tools
    assert guessed_reasoning(template) == reasoning
