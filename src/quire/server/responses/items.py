"""Items: what a response's input is made of. Read into one plain form, and from that into chat messages."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.errors import InvalidRequest
from quire.server.errors import ApiError, not_supported
from quire.server.protocol.responses import Item

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_PLACE = "input"  # what errors name


def new_id(kind: str) -> str:
    """`msg`, `fc`, `fco` and `rs` are what OpenAI's ids of items begin with."""
    return f"{kind}_{uuid.uuid4().hex}"


def read_items(given: str | Sequence[Any] | None) -> list[Item]:
    """Input as items in their plain form: each has an id and a type, content is a list of parts.

    Raises InvalidRequest for what has the wrong shape, and says so for what is not served: images, files,
    the items of hosted tools.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, f"{_PLACE}[{index}]") for index, item in enumerate(given)]


def chat_messages(items: Sequence[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """Items in their plain form as a chat's messages.

    Reasoning, text and calls of one turn become one assistant message; an output must follow its call.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _turn(messages, "content", "tool_calls")["content"] = _joined(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _joined(item["content"])})
            case "reasoning":
                if said := _reasoning(item):  # what is encrypted is not ours to read
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = said
            case "function_call":
                names[item["call_id"]] = item["name"]
                _turn(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                messages.append(_output(item, names))
    return messages


# ---------------------------------------------------------------------- reading


def _read(item: Any, place: str) -> Item:
    if not isinstance(item, Mapping):
        raise _wrong(place, f"must be an object, not {type(item).__name__}")
    match item.get("type", "message"):
        case "message":
            return _read_message(item, place)
        case "function_call":
            return {
                "id": _id(item, "fc"),
                "type": "function_call",
                "call_id": _string(item, "call_id", place),
                "name": _string(item, "name", place),
                "arguments": _arguments(item, place),
                "status": "completed",
            }
        case "function_call_output":
            output = item.get("output")
            return {
                "id": _id(item, "fco"),
                "type": "function_call_output",
                "call_id": _string(item, "call_id", place),
                "output": output
                if isinstance(output, str)
                else _parts(output, "input_text", f"{place}.output"),
                "status": "completed",
            }
        case "reasoning":
            return {
                "id": _id(item, "rs"),
                "type": "reasoning",
                "summary": _reasoning_parts(item.get("summary"), "summary_text", f"{place}.summary"),
                "content": _reasoning_parts(item.get("content"), "reasoning_text", f"{place}.content"),
            }
        case "item_reference":
            raise not_supported(_PLACE, f"{place} refers to an item by its id: send the item itself")
        case other:
            raise not_supported(
                _PLACE,
                f"{place} has type {other!r}: only messages, function calls and their outputs, and reasoning "
                "are supported",
            )


def _read_message(item: Mapping[str, Any], place: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(place, f"has role {role!r}: give {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "id": _id(item, "msg"),
        "type": "message",
        "role": role,
        "content": _parts(item.get("content"), kind, f"{place}.content"),
        "status": "completed",
    }


def _parts(content: Any, kind: str, place: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise _wrong(place, f"is a {type(content).__name__}: give a string or a list of text parts")
    return [_part(part, kind, f"{place}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, kind: str, place: str) -> dict[str, Any]:
    found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if found == "refusal":
        return {"type": kind, "text": _string(part, "refusal", place)} | _annotations(kind)
    if found not in _TEXT_PARTS:
        raise not_supported(_PLACE, f"{place} has type {found!r}: only text parts are supported")
    return {"type": kind, "text": _string(part, "text", place)} | _annotations(kind)


def _annotations(kind: str) -> dict[str, Any]:
    return {"annotations": []} if kind == "output_text" else {}


def _reasoning_parts(parts: Any, kind: str, place: str) -> list[dict[str, str]]:
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _wrong(place, "must be a list of text parts")
    return [
        {"type": kind, "text": _string(part, "text", f"{place}[{index}]")} for index, part in enumerate(parts)
    ]


def _arguments(item: Mapping[str, Any], place: str) -> str:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise _wrong(place, "needs arguments: give them as a string of JSON")
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _wrong(place, f"has arguments that are not JSON ({error})") from None
    return arguments


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(place, f"needs {name}: give a string")
    return value


def _id(item: Mapping[str, Any], kind: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else new_id(kind)


# ---------------------------------------------------------------------- as messages


def _turn(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The last message, if it is the assistant's and has nothing of `taken` yet; otherwise a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in taken):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _joined(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """One part is its text; several go on as parts, so that chats join them by their own rule."""
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]


def _reasoning(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"] or item["summary"])


def _call(item: Item) -> dict[str, Any]:
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


def _output(item: Item, names: Mapping[str, str]) -> dict[str, Any]:
    call_id, output = item["call_id"], item["output"]
    if call_id not in names:
        raise ApiError(
            400,
            f"no function call has the call_id {call_id!r} of this function_call_output: send the call before it, "
            "or previous_response_id",
            param=_PLACE,
        )
    content = output if isinstance(output, str) else _joined(output)
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content}


def _wrong(place: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{place} {problem}", _PLACE)
