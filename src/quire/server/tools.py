"""The tools of a request: checked, shown in its prompt, and turned into a grammar and a parser for its answer.

Requests with OpenAI's older names for tools, `functions` and `function_call`, are made requests with tools, and their
answers get the older names back.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import InvalidRequest
from quire.core.structured import StructuredOutput, nests_deeper
from quire.grammar.matcher import WHITESPACE
from quire.server.protocol.completions import ChatCompletionRequest, ChatDelta, ChatMessage
from quire.server.schemas import served_schema
from quire.text.tool_formats import HERMES_CLOSE, HERMES_OPEN, tool_parser
from quire.text.tool_parser import JsonArrayParser, NamedParser, ToolParser

MAX_TOOLS = 128
MAX_BYTES = 256 * 1024  # of all of them as JSON
MAX_DEPTH = 100  # brackets within brackets
MAX_CALLS = 16  # of an answer that a grammar forces: small models go on until a limit
Tools = Sequence[dict[str, Any]]
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = "'auto', 'none', 'required', {'type': 'function', 'function': {'name': '…'}} or allowed_tools"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A request's tools and tool_choice, resolved."""

    shown: tuple[dict[str, Any], ...] = ()  # to the model
    forced: StructuredOutput | None = None  # the answer must be calls, of this form
    forced_name: str | None = None  # and of this tool: the answer is its arguments alone
    max_calls: int | None = None
    warnings: tuple[str, ...] = ()  # about tools that were left out

    def parser_maker(self, parser_name: str | None) -> Callable[[], ToolParser] | None:
        """The factory of each answer's parser; None if an answer can hold no calls."""
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
        """The grammar of the whole text, where `answer` is the one for content without calls."""
        if self.forced is not None:
            return self.forced  # there will be no content
        if answer is None or not self.shown or parser_name != "hermes":
            return answer
        return answer_or_calls_form(answer, self.shown, self.max_calls)


def tool_plan(body: ChatCompletionRequest) -> ToolPlan:
    """InvalidRequest names what is wrong: `tools[0].function.name`."""
    tools, warnings = served_tools(body.tools)
    choice = body.tool_choice
    if choice is None or (choice == "auto" and warnings):
        choice = "auto" if tools else "none"
    elif not tools and choice != "none":
        left_out = f" ({warnings[0]})" if warnings else ""
        raise InvalidRequest(
            f"tool_choice needs tools{left_out}: send them, or leave tool_choice out", "tool_choice"
        )
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice.get("allowed_tools"), tools, warnings)
    return replace(_chosen(choice, tools, body.parallel_tool_calls, warnings), warnings=warnings)


def _chosen(
    choice: str | dict[str, Any],
    tools: tuple[dict[str, Any], ...],
    parallel: bool | None,
    warnings: tuple[str, ...],
) -> ToolPlan:
    max_calls = 1 if parallel is False else None
    match choice:
        case "none":
            return ToolPlan()
        case "auto":
            return ToolPlan(tools, max_calls=max_calls)
        case "required":
            return ToolPlan(tools, calls_form(tools, max_calls), max_calls=max_calls)
        case {"type": "function", "function": {"name": str(name)}}:
            function = _function_named(name, tools, warnings)
            return ToolPlan(tools, arguments_form(function), name)
        case {"type": str(kind)} if kind != "function":
            raise InvalidRequest(
                f"tool_choice has the type {_shown(kind)}, and only tools of type 'function' are served: give "
                f"{_CHOICES}",
                "tool_choice",
            )
    raise InvalidRequest(f"tool_choice is {_shown(choice)}: give {_CHOICES}", "tool_choice")


def _allowed(
    allowed: Any, tools: tuple[dict[str, Any], ...], warnings: tuple[str, ...]
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """The mode of `allowed_tools`, and the tools that it leaves. Entries of types that are not served are skipped."""
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as listed}:
            pass
        case _:
            raise InvalidRequest(
                "tool_choice of type allowed_tools needs allowed_tools with a mode, 'auto' or 'required', and at "
                "least one of the tools by name",
                "tool_choice",
            )
    names: set[str] = set()
    for entry in listed:
        match entry:
            case {"type": "function", "function": {"name": str(name)}}:
                names.add(_function_named(name, tools, warnings)["name"])
            case {"type": str(kind)} if kind != "function":
                pass
            case _:
                raise InvalidRequest(
                    f"tool_choice allows {_shown(entry)}: give {{'type': 'function', 'function': {{'name': '…'}}}}",
                    "tool_choice",
                )
    if not names:
        raise InvalidRequest("tool_choice allows no tool of type 'function': name one", "tool_choice")
    return mode, tuple(tool for tool in tools if tool["function"]["name"] in names)


def served_tools(
    tools: list[dict[str, Any]] | None,
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The tools of type `function`, checked, and a warning for each other type: clients also send tools that only
    OpenAI's own servers run."""
    own: dict[str, dict[str, Any]] = {}
    other: dict[str, list[str]] = {}
    for index, tool in enumerate(tools or ()):
        path, kind = f"tools[{index}]", tool.get("type")
        if isinstance(kind, str) and kind != "function":
            other.setdefault(kind, []).append(path)
        else:
            own[path] = tool
    warnings = tuple(
        f"tools of type {_shown(kind)} are left out, since only 'function' is served: {', '.join(paths)}"
        for kind, paths in other.items()
    )
    return _checked_tools(own), warnings


def _checked_tools(tools: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """`tools` by their paths in the request."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools)} tools, and {MAX_TOOLS} are allowed: send fewer", "tools"
        )
    _check_size(list(tools.values()))
    names: set[str] = set()
    for path, tool in tools.items():
        name = _checked_name(tool, path)
        if name in names:
            raise InvalidRequest(
                f"{{param}}: there is a tool {name!r} already: give each a name of its own",
                f"{path}.function.name",
            )
        names.add(name)
    return tuple(tools.values())


def _checked_name(tool: dict[str, Any], path: str) -> str:
    if tool.get("type") != "function":
        raise _wrong(f"{path}.type", f"is {_shown(tool.get('type'))}: only 'function' is supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{path}.function", "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{path}.function.name",
            f"is {_shown(name)}: give 1 to 64 letters, digits, underscores and dashes",
        )
    for key, kinds, wanted in (
        ("parameters", dict, "a JSON schema, an object"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(key), (kinds, type(None))):
            raise _wrong(f"{path}.function.{key}", f"must be {wanted}")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise _wrong(f"{path}.function.parameters", f"has type {_shown(kind)}: arguments are an 'object'")
    return name


def _check_size(tools: list[dict[str, Any]]) -> None:
    if nests_deeper(list(tools), MAX_DEPTH):
        raise InvalidRequest(f"tools nest deeper than {MAX_DEPTH} levels: send flatter ones", "tools")
    try:
        num_bytes = len(json.dumps(tools, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise InvalidRequest("tools hold half of a character: send valid Unicode", "tools") from None
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"the tools take {num_bytes} bytes, more than {MAX_BYTES}: shorten them", "tools"
        )


def _function_named(
    name: str, tools: tuple[dict[str, Any], ...], warnings: tuple[str, ...]
) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            function: dict[str, Any] = tool["function"]
            return function
    known = ", ".join(tool["function"]["name"] for tool in tools)
    raise InvalidRequest(
        f"tool_choice names {name[:64]!r}, and the tools are {known}: name one of them"
        + "".join(f" ({warning})" for warning in warnings),
        "tool_choice",
    )


def _wrong(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}} {problem}", param)


def _shown(value: Any) -> str:
    return repr(value)[:80]


# ---------------------------------------------------------------------- grammars of calls


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments, as the grammar gets it; without one, there are none."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    made: dict[str, Any] = served_schema(schema, bool(function.get("strict")), "tools")[0]
    return made


def arguments_form(function: dict[str, Any]) -> StructuredOutput:
    """One call's arguments, and nothing else."""
    return StructuredOutput.json(parameters_of(function), strict=bool(function.get("strict")), param="tools")


def calls_form(tools: Tools, max_calls: int | None) -> StructuredOutput:
    """An array of calls."""
    calls, defined = _call_schemas(tools, "parameters")
    schema: dict[str, Any] = {"$defs": defined, "type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema["maxItems"] = max_calls or MAX_CALLS
    return StructuredOutput.json(schema, strict=_all_strict(tools), param="tools")


def answer_or_calls_form(answer: StructuredOutput, tools: Tools, max_calls: int | None) -> StructuredOutput:
    """Calls as Hermes writes them, or JSON by the answer's own form. Other forms are left as they are."""
    if answer.kind not in ("json_schema", "json_object"):
        return answer
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    calls, defined = _call_schemas(tools, "arguments")
    more = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if max_calls is None else ""
    lines = (
        "start: answer | calls",
        f"answer: %json {_with_options(schema, answer.strict)}",
        f"calls: call {more}",
        f"call: {json.dumps(HERMES_OPEN)} NEWLINE object NEWLINE {json.dumps(HERMES_CLOSE)}",
        f"object: %json {_with_options({'$defs': defined, 'anyOf': calls}, _all_strict(tools))}",
        r"NEWLINE: /\n/",
    )
    return StructuredOutput("grammar", "\n".join(lines), param=answer.param)


def _call_schemas(tools: Tools, key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A schema for each tool's calls, and the definitions that these refer to."""
    calls, defined = [], {}
    for index, tool in enumerate(tools):
        function, definition = tool["function"], f"tool_{index}"
        defined[definition] = _moved(parameters_of(function), f"#/$defs/{definition}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/{definition}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return calls, defined


def _all_strict(tools: Tools) -> bool:
    return all(tool["function"].get("strict") for tool in tools)


def _with_options(schema: Any, strict: bool) -> str:
    """A schema within a grammar, with the options that a schema on its own would be compiled with."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps({**schema, "x-guidance": options})


def _moved(schema: Any, pointer: str) -> Any:
    """A schema that stands at `pointer` within another: its references to itself are adapted."""
    if isinstance(schema, list):
        return [_moved(inner, pointer) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: pointer + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, pointer)
        for key, value in schema.items()
    }


# ---------------------------------------------------------------------- functions

# What errors call a chat's fields where the request has the older ones.
FUNCTION_NAMES = {"tools": "functions", "tool_choice": "function_call", ".function.": "."}


def with_tools(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """The same request with tools. An answer then has one call at most."""
    messages = _with_tool_calls(body.messages)
    if body.functions is None and body.function_call is None:
        return body.model_copy(update={"messages": messages})
    for name in ("tools", "tool_choice"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"functions and {name} are names for the same: send tools alone", name)
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    choice: Any = body.function_call
    match choice:
        case {"name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case None | "auto" | "none":
            pass
        case _:
            raise InvalidRequest(
                f"function_call is {choice!r:.80}: give 'auto', 'none' or {{'name': '…'}}", "function_call"
            )
    fields = {"messages": messages, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    return body.model_copy(update=fields)


def _with_tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls get ids by their place: a function's message answers the call before it."""
    made: list[dict[str, Any]] = []
    call_id = ""
    for index, message in enumerate(messages):
        if isinstance(message.get("function_call"), dict):
            call_id = f"call_{index}"
            call = {"id": call_id, "type": "function", "function": message["function_call"]}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            made.append({"content": None, **rest, "tool_calls": [call]})
        elif message.get("role") == "function":
            made.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            made.append(message)
    return made


def function_message(message: ChatMessage) -> ChatMessage:
    """A message of an answer, its call under the older name."""
    calls = message.pop("tool_calls", None)
    if calls:
        message["function_call"] = calls[0]["function"]
    return message


def function_delta(delta: ChatDelta) -> ChatDelta:
    """A delta of an answer, its part of the call under the older name."""
    calls = delta.pop("tool_calls", None)
    if calls:
        delta["function_call"] = calls[0]["function"]
    return delta


def function_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
