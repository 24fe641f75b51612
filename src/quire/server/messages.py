"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, translated to chats and back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.access import context_of
from quire.server.errors import THREAD_UNSUPPORTED, ApiError, anthropic_body, not_supported
from quire.server.protocol.base import Usage
from quire.server.protocol.messages import (
    Block,
    Message,
    MessageErrorBody,
    MessageEvent,
    MessageInput,
    MessageRequest,
    MessageUsage,
    TokenCount,
)
from quire.server.reply import ERRORS, REQUEST_ID, EventStream, JsonReply, answers
from quire.server.service import Service
from quire.server.translation import (
    TranslatedEvents,
    build_whole,
    call_input,
    num_prompt_tokens,
    string_field,
    translated_chat,
)

_TEXT_DELTAS = {
    "text": "text_delta",
    "thinking": "thinking_delta",
}  # by the block's type, which names its field too
_NOTHING: Usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": MessageErrorBody} for status, described in ERRORS.items()
}


def messages_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["messages"])

    @router.post("/v1/messages", responses={**answers(Message, MessageEvent), **_ERRORS})
    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answers a conversation, whole or in events, as Anthropic's API does."""
        request_id = context_of(request).request_id
        reply = await translated_chat(service, request, chat_fields(body), NAMES)
        message_id = f"msg_{reply.response_id.removeprefix('chatcmpl-')}"
        builder = MessageBuilder(message_id, reply.model, body.max_tokens, request_id)
        response: Response
        if body.stream:
            response = EventStream(TranslatedEvents(reply, builder, NAMES), reply.response_id)
        else:
            await build_whole(reply, builder, NAMES)
            response = JsonReply(builder.message)
        response.headers[REQUEST_ID] = request_id
        return response

    @router.post("/v1/messages/count_tokens", responses={**answers(TokenCount), **_ERRORS})
    async def count_tokens(body: MessageInput) -> Response:
        """How many tokens a message's prompt would have."""
        count: TokenCount = {"input_tokens": await num_prompt_tokens(service, prompt_fields(body), NAMES)}
        return JsonReply(count)

    return router


class MessageBuilder:
    """Takes a chat's deltas in their order: reasoning, text and calls each become a block."""

    def __init__(self, message_id: str, model: str, max_tokens: int, request_id: str = "") -> None:
        self.message: Message = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(_NOTHING),
        }
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._open: Block | None = None  # the block that grows
        self._call_index: int | None = None  # a chat's number for it, if it is a call
        self._arguments = ""  # of that call, as they are written
        self._pinged = False

    def begin(self, usage: Usage) -> list[MessageEvent]:
        self.message["usage"] = message_usage(usage)
        return [{"type": "message_start", "message": {**self.message, "content": []}}]

    def take(self, delta: dict[str, Any], _logprobs: Sequence[Any] = ()) -> list[MessageEvent]:
        """A delta of a chat."""
        events: list[MessageEvent] = []
        for kind, text in (("thinking", delta.get("reasoning_content")), ("text", delta.get("content"))):
            if text:
                events += self._in_block(kind)
                assert self._open is not None
                self._open[kind] += text
                events.append(self._delta({"type": _TEXT_DELTAS[kind], kind: text}))
        for call in delta.get("tool_calls") or ():
            events += self._call(call)
        return events

    def end(
        self, finish_reason: str | None, stop_reason: int | str | None, usage: Usage
    ) -> list[MessageEvent]:
        events = self._close()
        message = self.message
        message["usage"] = message_usage(usage)
        message["stop_reason"] = self._stop_reason(finish_reason, stop_reason)
        if message["stop_reason"] == "stop_sequence":
            message["stop_sequence"] = str(stop_reason)
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        events.append({"type": "message_delta", "delta": ended, "usage": message["usage"]})
        return [*events, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[MessageEvent]:
        return [dict(anthropic_body(error, self._request_id))]

    # ------------------------------------------------------------------ blocks

    def _in_block(self, kind: str) -> list[MessageEvent]:
        """Opens a block of text or reasoning, unless it is open already."""
        if self._open is not None and self._open["type"] == kind:
            return []
        # Anthropic signs reasoning to recognise it later; this server does not check it.
        signature = {"signature": ""} if kind == "thinking" else {}
        return [*self._close(), *self._started({"type": kind, kind: "", **signature})]

    def _call(self, call: dict[str, Any]) -> list[MessageEvent]:
        function, events = call.get("function") or {}, []
        if self._call_index is None or call["index"] != self._call_index:
            events += self._close()
            block = {"type": "tool_use", "id": call["id"], "name": function.get("name") or "", "input": {}}
            events += self._started(block)
            self._call_index, self._arguments = call["index"], ""
        if arguments := function.get("arguments"):
            self._arguments += arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _started(self, block: Block) -> list[MessageEvent]:
        self._open = block
        self.message["content"].append(block)
        index = len(self.message["content"]) - 1
        events = [{"type": "content_block_start", "index": index, "content_block": dict(block)}]
        if not self._pinged:
            self._pinged = True
            events.append({"type": "ping"})
        return events

    def _delta(self, delta: dict[str, str]) -> MessageEvent:
        index = len(self.message["content"]) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _close(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        if self._call_index is not None:
            self._open["input"] = call_input(self._arguments)
        self._open = self._call_index = None
        return [{"type": "content_block_stop", "index": len(self.message["content"]) - 1}]

    def _stop_reason(self, finish_reason: str | None, stop_reason: int | str | None) -> str:
        if finish_reason == "tool_calls":
            return "tool_use"
        if finish_reason == "length":
            full = self.message["usage"]["output_tokens"] < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "stop_sequence" if isinstance(stop_reason, str) else "end_turn"


def message_usage(usage: Usage) -> MessageUsage:
    details = usage.get("prompt_tokens_details")
    cached = details["cached_tokens"] if details else 0
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


# ---------------------------------------------------------------------- requests


# A chat request's fields and their names in this API, for errors.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}
_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def prompt_fields(body: MessageInput) -> dict[str, Any]:
    """The fields of a chat request that make its prompt."""
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise not_supported(name, f"{name} is not supported: leave it out")
    if body.thread is not None:
        message = "thread is not supported, conversations are not stored: send every message each time"
        raise ApiError(400, message, param="thread", code=THREAD_UNSUPPORTED)
    messages = chat_messages(body.messages, body.system)
    fields = body.extras() | {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":  # an answer that the caller began
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if variables := _template_variables(body):
        fields["chat_template_kwargs"] = variables
    if body.tools:
        fields["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
        fields |= _tool_choice(body.tool_choice)
    return fields


def chat_fields(body: MessageRequest) -> dict[str, Any]:
    """All fields of the chat request."""
    return prompt_fields(body) | {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.metadata.user_id if body.metadata is not None else None,
        "stream": body.stream,
        "response_format": _response_format(body),
    }


def chat_messages(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Any] | None
) -> list[dict[str, Any]]:
    """The conversation as a chat's messages. Neighbours of one role are one turn, as the API says."""
    turns: list[dict[str, Any]] = []
    if system:
        turns.append({"role": "system", "content": _texts(system, "system")})
    if not messages:
        raise InvalidRequest("messages is empty: send at least one message", "messages")
    names: dict[str, str] = {}  # of the tools, by the ids of their uses
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidRequest.at(path, f"has role {role!r}: give 'user' or 'assistant'")
        blocks = _blocks(message.get("content"), f"{path}.content")
        if role == "assistant":
            _add_assistant(turns, blocks, names, f"{path}.content")
        else:
            _add_user(turns, str(role), blocks, names, f"{path}.content")
    if turns[-1]["role"] == "assistant" and turns[-1].get("tool_calls"):
        raise InvalidRequest.at(
            f"messages[{len(messages) - 1}]", "uses a tool: send its tool_result after it"
        )
    for turn in turns:
        if turn["role"] == "assistant":
            turn |= {name: "".join(turn[name]) for name in ("content", "reasoning_content") if name in turn}
    return turns


# ---------------------------------------------------------------------- turns


def _add_user(
    turns: list[dict[str, Any]], role: str, blocks: list[Block], names: Mapping[str, str], path: str
) -> None:
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block["type"] == "tool_result" and role == "user":
            turns.append(_result(block, names, where))
        else:
            part = {"type": "text", "text": _text(block, where)}
            if turns[-1:] and turns[-1]["role"] == role and isinstance(turns[-1]["content"], list):
                turns[-1]["content"].append(part)
            else:
                turns.append({"role": role, "content": [part]})
    if not blocks:
        raise InvalidRequest.at(path, "is empty: give some text")


def _add_assistant(
    turns: list[dict[str, Any]], blocks: list[Block], names: dict[str, str], path: str
) -> None:
    """Texts are lists of pieces until all messages are read: adding each would copy what came before it."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": []})
    turn = turns[-1]
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        match block["type"]:
            case "thinking":
                turn.setdefault("reasoning_content", []).append(string_field(block, "thinking", where))
            case "redacted_thinking":
                pass  # encrypted
            case "tool_use":
                names[string_field(block, "id", where)] = string_field(block, "name", where)
                turn.setdefault("tool_calls", []).append(_call(block, where))
            case _:
                turn["content"].append(_text(block, where))


def _call(block: Block, path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest.at(path, "needs an input: give an object")
    try:
        written = json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest.at(path, "has an input that nests too deeply: send flatter values") from None
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": written}}


def _result(block: Block, names: Mapping[str, str], path: str) -> dict[str, Any]:
    """Chats have no mark for a tool that failed: its result says so in words."""
    use_id = string_field(block, "tool_use_id", path)
    if use_id not in names:
        raise InvalidRequest.at(path, f"has the tool_use_id {use_id!r}, which no tool_use before it has")
    text = _texts(block.get("content") or "", f"{path}.content")
    content = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "tool_call_id": use_id, "name": names[use_id], "content": content}


# ---------------------------------------------------------------------- blocks


def _blocks(content: Any, path: str) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest.at(path, f"is a {type(content).__name__}: give a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise InvalidRequest.at(f"{path}[{index}]", "must be an object with a type")
    return content


def _texts(content: Any, path: str) -> str:
    blocks = _blocks(content, path)
    return "\n".join(_text(block, f"{path}[{index}]") for index, block in enumerate(blocks))


def _text(block: Block, path: str) -> str:
    if block["type"] == "document":
        return _document(block, path)
    if block["type"] != "text":
        raise not_supported(
            path.split("[")[0].split(".")[0],
            f"{path} has type {block['type']!r}, which is not supported here: send text",
        )
    return string_field(block, "text", path)


def _document(block: Block, path: str) -> str:
    """The title, the context and the text of a document, one after another."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        media = source.get("media_type") if isinstance(source, Mapping) else None
        raise not_supported(
            path.split("[")[0].split(".")[0],
            f"{path}.source has type {kind!r}{f' ({media})' if media else ''}: only documents of text are supported: "
            "send their text, with a source of type 'text' or 'content'",
        )
    lines = [string_field(block, name, path) for name in ("title", "context") if block.get(name) is not None]
    if kind == "text":
        return "\n".join([*lines, string_field(source, "data", f"{path}.source")])
    blocks = _blocks(source.get("content"), f"{path}.source.content")
    nested = next((index for index, inner in enumerate(blocks) if inner["type"] == "document"), None)
    if nested is not None:
        raise InvalidRequest.at(f"{path}.source.content[{nested}]", "is a document in a document: send text")
    return "\n".join([*lines, _texts(blocks, f"{path}.source.content")])


# ---------------------------------------------------------------------- settings


def _chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise not_supported(
            "tools",
            f"{path} has type {tool['type']!r}: only tools with an input_schema, which the caller runs, are supported",
        )
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not tool["name"] or not isinstance(schema, dict):
        raise InvalidRequest(f"{path} needs a name and an input_schema", "tools")
    given = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {"name": tool["name"], **given, "parameters": schema}}


def _tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {"tool_choice": "auto"}
    kind = choice.get("type")
    chat_choice: str | dict[str, Any]
    if kind == "tool" and isinstance(choice.get("name"), str):
        chat_choice = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat_choice = _CHOICES[kind]
    else:
        raise InvalidRequest(
            f"tool_choice has type {kind!r}: give 'auto', 'any', 'none', or 'tool' with a name", "tool_choice"
        )
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chat_choice, **alone}


def _template_variables(body: MessageInput) -> dict[str, Any]:
    """The names by which templates know whether and how hard to think; others ignore them."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.get("type") != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    return variables | (body.chat_template_kwargs or {})


def _response_format(body: MessageRequest) -> dict[str, Any] | None:
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format must have the type 'json_schema' and a schema", "output_config.format"
        )
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": form["schema"], "strict": True},
    }
