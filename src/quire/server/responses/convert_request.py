"""Converts a request of the Responses API to the fields of a chat request: its settings, and the items of its input."""

import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quire.core.errors import InvalidRequest
from quire.server.chat import effort_variables
from quire.server.errors import ApiError, not_supported
from quire.server.protocol.responses import (
    ConversationInput,
    ConversationName,
    Item,
    ResponseInput,
    ResponseRequest,
)
from quire.server.translation import string_field

LOGPROBS = "message.output_text.logprobs"
# A chat request's fields and their names in this API, for errors.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    ".function.": ".",  # a tool's fields are flat
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_PARAM = "input"  # what errors name


def refuse_unsupported(body: ConversationInput) -> None:
    """Fields that would change the answer and are not served are refused by name, never dropped silently."""
    if body.prompt is not None:
        raise not_supported("prompt", "prompts are not kept here: send their text as instructions and input")
    if body.conversation is not None and body.previous_response_id is not None:
        raise InvalidRequest(
            "conversation and previous_response_id exclude each other: send one", "conversation"
        )


def conversation_id(body: ConversationInput) -> str | None:
    named = body.conversation
    return named.id if isinstance(named, ConversationName) else named


def prompt_fields(body: ResponseInput, items: Sequence[Item]) -> dict[str, Any]:
    """The fields of a chat request that make its prompt; `items` is the conversation up to here."""
    if not items:
        raise InvalidRequest("input is empty: send a text or at least one item", "input")
    tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    fields = body.extras() | {"model": body.model, "messages": chat_messages(items, body.instructions)}
    if variables := _template_variables(body):
        fields["chat_template_kwargs"] = variables
    if tools or body.tool_choice not in (None, "auto", "none"):
        fields |= {"tools": tools, "tool_choice": _chat_choice(body.tool_choice)}
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return fields


def chat_fields(body: ResponseRequest, items: Sequence[Item]) -> dict[str, Any]:
    """All fields of the chat request."""
    fields = prompt_fields(body, items) | {
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stop": body.stop,
        "user": body.user,
        "stream": body.stream,
        "response_format": _response_format(body),
    }
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return fields


def _chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Tools of other types stay as they are: chats leave them out with a warning."""
    if tool.get("type") != "function":
        return tool
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{path} needs a name", "tools")
    given = {
        name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": {"name": tool["name"], **given}}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """The choice as a chat says it: names are nested there."""
    match choice:
        case None:
            return "auto"
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": [*listed], **rest}:
            named = [_chat_choice(entry) if isinstance(entry, dict) else entry for entry in listed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": rest.get("mode"), "tools": named}}
    return choice


def _template_variables(body: ResponseInput) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return effort_variables(effort) | (body.chat_template_kwargs or {})


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """`text.format` is flat where a chat's `response_format` nests."""
    form = body.text.format if body.text is not None else None
    kind = form.get("type") if form is not None else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        given = {name: form[name] for name in ("name", "description", "schema", "strict") if name in form}
        if not isinstance(given.get("schema"), dict):
            raise InvalidRequest("text.format of type json_schema needs a schema", "text.format")
        return {"type": "json_schema", "json_schema": given}
    raise not_supported(
        "text.format", f"text.format has type {kind!r}: give 'text', 'json_object' or 'json_schema'"
    )


# ---------------------------------------------------------------------- items


def new_id(kind: str) -> str:
    """`msg`, `fc`, `fco` and `rs` are what OpenAI's ids of items begin with."""
    return f"{kind}_{uuid.uuid4().hex}"


FindItem = Callable[[str, str], Item]  # the item of an id; its path is for errors


def read_items(given: str | Sequence[Any] | None, find: FindItem | None = None) -> list[Item]:
    """Input as items in their plain form: each has an id and a type, content is a list of parts.

    `find` returns the items that the input refers to. Raises InvalidRequest for what has the wrong shape, and
    says so for what is not served: images, files, the items of hosted tools.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, f"{_PARAM}[{index}]", find) for index, item in enumerate(given)]


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
                if reasoning := _reasoning(item):  # empty where it is encrypted
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = reasoning
            case "function_call":
                names[item["call_id"]] = item["name"]
                _turn(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                messages.append(_output(item, names))
            case "compaction":
                _add_summary(messages, read_summary(item["encrypted_content"]))
    return messages


# ---------------------------------------------------------------------- compaction

_SUMMARY = "quire1."  # what the content of this server's items of type compaction begins with


def write_summary(text: str) -> str:
    """The content of an item of type compaction: opaque to clients, though nothing in it is secret from them."""
    return _SUMMARY + base64.b64encode(text.encode()).decode()


def read_summary(content: str, path: str = _PARAM) -> str:
    if content.startswith(_SUMMARY):
        with suppress(ValueError):
            return base64.b64decode(content.removeprefix(_SUMMARY), validate=True).decode()
    raise InvalidRequest.at(
        path,
        "has an encrypted_content that this server did not make: send what /v1/responses/compact returned",
    )


def _add_summary(messages: list[dict[str, Any]], summary: str) -> None:
    """User messages before it become one, so that roles alternate as many templates require."""
    first = len(messages)
    while first and messages[first - 1]["role"] == "user":
        first -= 1
    parts: list[dict[str, Any]] = []
    for message in messages[first:]:
        content = message["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    if parts:
        messages[first:] = [{"role": "user", "content": parts}]
    messages.append({"role": "assistant", "content": f"Summary of the conversation so far:\n{summary}"})


# ---------------------------------------------------------------------- reading


def _read(item: Any, path: str, find: FindItem | None) -> Item:
    if not isinstance(item, Mapping):
        raise InvalidRequest.at(path, f"must be an object, not {type(item).__name__}")
    is_reference = "id" in item and "role" not in item
    match item.get("type") or ("item_reference" if is_reference else "message"):
        case "message":
            return _read_message(item, path)
        case "function_call":
            return {
                "id": _id(item, "fc"),
                "type": "function_call",
                "call_id": string_field(item, "call_id", path),
                "name": string_field(item, "name", path),
                "arguments": _arguments(item, path),
                "status": "completed",
            }
        case "function_call_output":
            output = item.get("output")
            return {
                "id": _id(item, "fco"),
                "type": "function_call_output",
                "call_id": string_field(item, "call_id", path),
                "output": output
                if isinstance(output, str)
                else _parts(output, "input_text", f"{path}.output"),
                "status": "completed",
            }
        case "reasoning":
            return {
                "id": _id(item, "rs"),
                "type": "reasoning",
                "summary": _reasoning_parts(item.get("summary"), "summary_text", f"{path}.summary"),
                "content": _reasoning_parts(item.get("content"), "reasoning_text", f"{path}.content"),
            }
        case "file_search_call":  # what was found is left out: a later turn searches again
            given = item.get("queries")
            queries = [query for query in given if isinstance(query, str)] if isinstance(given, list) else []
            call_id = _id(item, "fs")
            return {"id": call_id, "type": "file_search_call", "queries": queries, "status": "completed"}
        case "item_reference" if find is not None:
            return find(string_field(item, "id", path), path)
        case "item_reference":
            raise not_supported(_PARAM, f"{path} refers to an item by its id: send the item itself")
        case "compaction":
            summary = string_field(item, "encrypted_content", path)
            read_summary(summary, path)
            return {"id": _id(item, "cmp"), "type": "compaction", "encrypted_content": summary}
        case other:
            raise not_supported(
                _PARAM,
                f"{path} has type {other!r}: only messages, function calls and their outputs, and reasoning "
                "are supported",
            )


def _read_message(item: Mapping[str, Any], path: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest.at(path, f"has role {role!r}: give {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "id": _id(item, "msg"),
        "type": "message",
        "role": role,
        "content": _parts(item.get("content"), kind, f"{path}.content"),
        "status": "completed",
    }


def _parts(content: Any, kind: str, path: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest.at(path, f"is a {type(content).__name__}: give a string or a list of text parts")
    return [_part(part, kind, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, kind: str, path: str) -> dict[str, Any]:
    part_type = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if part_type not in (*_TEXT_PARTS, "refusal"):
        raise not_supported(_PARAM, f"{path} has type {part_type!r}: only text parts are supported")
    text = string_field(part, "refusal" if part_type == "refusal" else "text", path)
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _reasoning_parts(parts: Any, kind: str, path: str) -> list[dict[str, str]]:
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise InvalidRequest.at(path, "must be a list of text parts")
    return [
        {"type": kind, "text": string_field(part, "text", f"{path}[{index}]")}
        for index, part in enumerate(parts)
    ]


def _arguments(item: Mapping[str, Any], path: str) -> str:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise InvalidRequest.at(path, "needs arguments: give them as a string of JSON")
    return arguments


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
    """One part is its text; several stay parts, so that chats join them by their own rule."""
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
            param=_PARAM,
        )
    content = output if isinstance(output, str) else _joined(output)
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content}
