"""POST /v1/messages and /v1/messages/count_tokens, and the MessageBuilder that their answers are built with."""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.access import context_of
from quire.server.errors import ApiError, anthropic_body
from quire.server.messages.convert_request import NAMES, chat_fields, prompt_fields
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
from quire.server.reply import ERRORS, REQUEST_ID, JsonReply, answers
from quire.server.service import Service
from quire.server.sse import EventStream
from quire.server.translation import TranslatedEvents, build_whole, translated_chat, translated_prompt

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
        prompt = await translated_prompt(service, prompt_fields(body), NAMES)
        count: TokenCount = {"input_tokens": len(prompt.token_ids)}
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
            self._open["input"] = _parsed(self._arguments)
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


def _parsed(arguments: str) -> dict[str, Any]:
    """A call's input. Arguments that a limit cut off, or that are no object, are shown as they are."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"raw_arguments": arguments}
