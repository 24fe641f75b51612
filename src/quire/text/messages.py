"""Chat messages: validated, and normalised to the shape that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from quire.core.errors import FieldName, InvalidRequest

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # the same field in three dialects; the first is usual


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """New, plain messages; InvalidRequest names the path of an invalid value. The input is not modified.

    Content in text parts becomes one string, missing content an empty one, a tool call's arguments in JSON
    become the object that they encode, as templates expect.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise _wrong("messages", f"must be a list of messages, not {type(messages).__name__}")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not checked:
        raise _wrong("messages", "is empty: send at least one message")
    return checked


def plain(value: Any, path: str) -> Any:
    """A copy made of JSON's own types only: a template must not reach methods of richer objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)  # an enum's member, for instance
    raise _wrong(path, f"is a {type(value).__name__}: only JSON values can be used here")


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(path, f"must be an object with role and content, not {type(message).__name__}")
    checked = plain(message, path)
    if not isinstance(checked.get("role"), str) or not checked["role"]:
        raise _wrong(path, f"has role {checked.get('role')!r}: give 'system', 'user', 'assistant' or 'tool'")
    if "content" not in checked and "tool_calls" not in checked:
        raise _wrong(path, "has no content: give a string")
    checked["content"] = _text(checked.get("content"), f"{path}.content")
    if checked.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{path}.tool_calls")
    reasoning = next((checked[name] for name in _REASONING if checked.get(name) is not None), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(path, f"is a {type(content).__name__}: give a string or a list of text parts")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise _wrong(path, f"has type {kind!r}: only text parts are supported")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _wrong(path, "has no text: give {'type': 'text', 'text': '…'}")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _wrong(path, "must be a list of objects")
    for index, call in enumerate(calls):
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise _wrong(f"{path}[{index}]", f"has arguments that are not JSON ({error})") from error
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{path}[{index}]", "has no function with a name")
    return calls


def _wrong(path: str, problem: str) -> InvalidRequest:
    root = path.split("[")[0].split(".")[0]
    return InvalidRequest("{path} {problem}", root, path=FieldName(path), problem=problem)
