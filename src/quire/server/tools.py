"""The tools of a request: checked, and what they mean for its prompt, its grammar and the reading of its answer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.core.errors import InvalidRequest
from quire.core.structured import StructuredOutput
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.tool_forms import answer_or_calls_form, arguments_form, calls_form, parameters_of
from quire.text.tools.forced import JsonArrayParser, NamedParser
from quire.text.tools.parser import ToolParser
from quire.text.tools.registry import tool_parser

MAX_TOOLS = 128
MAX_BYTES = 256 * 1024  # of all of them as JSON
MAX_DEPTH = 100  # brackets within brackets
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': '…'}}"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools and tool_choice come to."""

    shown: tuple[dict[str, Any], ...] = ()  # to the model
    forced: StructuredOutput | None = None  # the answer must be calls, of this form
    forced_name: str | None = None  # and of this tool: the answer is its arguments alone
    max_calls: int | None = None

    def parser_maker(self, parser_name: str | None) -> Callable[[], ToolParser] | None:
        """What makes a parser for each answer; None if an answer can hold no calls."""
        if self.forced_name is not None:
            name = self.forced_name
            return lambda: NamedParser(name)
        if self.forced is not None:
            return JsonArrayParser
        if not self.shown or parser_name is None:
            return None
        names = [tool["function"]["name"] for tool in self.shown]
        return lambda: tool_parser(parser_name, names)

    def form(self, answer: StructuredOutput | None, parser_name: str | None) -> StructuredOutput | None:
        """What the text must look like, where content without calls must look like `answer`."""
        if self.forced is not None:
            return self.forced  # there will be no content
        if answer is None or not self.shown or parser_name != "hermes":
            return answer
        return answer_or_calls_form(answer, self.shown, self.max_calls)


def tool_plan(body: ChatCompletionRequest) -> ToolPlan:
    """InvalidRequest names what is wrong: `tools[0].function.name`."""
    tools = checked_tools(body.tools)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    elif not tools and choice != "none":
        raise InvalidRequest("tool_choice needs tools: send them, or leave tool_choice out", "tool_choice")
    max_calls = 1 if body.parallel_tool_calls is False else None
    match choice:
        case "none":
            return ToolPlan()
        case "auto":
            return ToolPlan(tools, max_calls=max_calls)
        case "required":
            return ToolPlan(tools, calls_form(tools, max_calls), max_calls=max_calls)
        case {"type": "function", "function": {"name": str(name)}}:
            function = _function_named(name, tools)
            return ToolPlan(tools, arguments_form(function), name)
    raise InvalidRequest(f"tool_choice is {_shown(choice)}: give {_CHOICES}", "tool_choice")


def checked_tools(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    if not tools:
        return ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools)} tools, and {MAX_TOOLS} are allowed: send fewer", "tools"
        )
    _check_size(tools)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _checked_name(tool, f"tools[{index}]")
        if name in names:
            raise InvalidRequest(
                f"tools[{index}].function.name: there is a tool {name!r} already: give each a name of its own",
                f"tools[{index}].function.name",
            )
        names.add(name)
    return tuple(tools)


def _checked_name(tool: dict[str, Any], place: str) -> str:
    if tool.get("type") != "function":
        raise _wrong(f"{place}.type", f"is {_shown(tool.get('type'))}: only 'function' is supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{place}.function", "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{place}.function.name",
            f"is {_shown(name)}: give 1 to 64 letters, digits, underscores and dashes",
        )
    for key, kinds, wanted in (
        ("parameters", dict, "a JSON schema, an object"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(key), (kinds, type(None))):
            raise _wrong(f"{place}.function.{key}", f"must be {wanted}")
    kind = parameters_of(function).get("type", "object")
    if kind != "object":
        raise _wrong(f"{place}.function.parameters", f"has type {_shown(kind)}: arguments are an 'object'")
    return name


def _check_size(tools: list[dict[str, Any]]) -> None:
    level: list[Any] = list(tools)
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise InvalidRequest(f"tools nest deeper than {MAX_DEPTH} levels: send flatter ones", "tools")
    try:
        num_bytes = len(json.dumps(tools, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise InvalidRequest("tools hold half of a character: send valid Unicode", "tools") from None
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"the tools take {num_bytes} bytes, more than {MAX_BYTES}: shorten them", "tools"
        )


def _function_named(name: str, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            function: dict[str, Any] = tool["function"]
            return function
    known = ", ".join(tool["function"]["name"] for tool in tools)
    raise InvalidRequest(
        f"tool_choice names {name[:64]!r}, and the tools are {known}: name one of them", "tool_choice"
    )


def _wrong(place: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{place} {problem}", place)


def _shown(value: Any) -> str:
    return repr(value)[:80]
