"""ResponseBuilder: builds a response and the typed events that say how it grows."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request

from quire.core.sampling import SamplingParams
from quire.server.errors import ApiError
from quire.server.protocol.base import Usage
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.protocol.responses import (
    Item,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from quire.server.responses.convert_request import conversation_id, new_id
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.server.chat import ChatReply

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # what each type of item has its text in
_ARGUMENTS = "response.function_call_arguments"


class ResponseSearch(Protocol):
    """What was searched in files before the answer."""

    async def answer_chat(
        self, service: Service, request: Request, body: ChatCompletionRequest
    ) -> "ChatReply": ...

    def items(self) -> list[Item]:
        """The calls of the tool, as items of the response's output."""

    def annotations(self, text: str) -> list[dict[str, Any]]:
        """Where the text of an answer is taken from."""


class ResponseBuilder:
    """Takes a chat's deltas in their order: reasoning, text and calls each become an item of their own.

    A whole answer is taken as one large delta, so that both ways lead to the same response.
    """

    def __init__(self, response: ResponseObject, search: ResponseSearch | None = None) -> None:
        self.response = response
        self._search = search
        self._sequence_number = 0
        self._open: Item | None = None  # the item that grows
        self._call_index: int | None = None  # a chat's number for it, if it is a call
        self._logprobs: list[Any] = []  # of tokens whose text has not come yet

    def queue(self) -> list[ResponseEvent]:
        """The first events of a response in the background, before anything else is called."""
        return [self._lifecycle("response.created"), self._lifecycle("response.queued")]

    def begin(self, _usage: Usage) -> list[ResponseEvent]:
        if self.response["status"] != "queued":
            return [*self._begun(), *self._searched()]
        self.response["status"] = "in_progress"
        return [self._lifecycle("response.in_progress"), *self._searched()]

    def take(self, delta: dict[str, Any], logprobs: Sequence[Any] = ()) -> list[ResponseEvent]:
        """A delta of a chat, with the logprobs of its tokens."""
        events: list[ResponseEvent] = []
        text, calls = delta.get("content"), delta.get("tool_calls") or ()
        if reasoning := delta.get("reasoning_content"):
            events += self._in_item("reasoning")
            events += self._text(reasoning)
        if not reasoning:  # the API has no field for the logprobs of reasoning
            self._logprobs += logprobs
        if text:
            events += self._in_item("message")
        if text or (self._logprobs and self._open is not None and self._open["type"] == "message"):
            events += self._text(text or "", self._taken_logprobs())
        for call in calls:
            events += self._call(call)
        if reasoning or calls:
            self._logprobs.clear()
        return events

    def end(
        self, finish_reason: str | None, _stop_reason: int | str | None, usage: Usage
    ) -> list[ResponseEvent]:
        """The last events. An answer without a word has one message, which is empty."""
        response = self.response
        events: list[ResponseEvent] = []
        if all(item["type"] == "file_search_call" for item in response["output"]):
            events += self._in_item("message")
            events += self._text("", self._taken_logprobs()) if self._logprobs else []
        cut = finish_reason == "length"
        response["status"] = "incomplete" if cut else "completed"
        events += self._close()
        response["usage"] = response_usage(usage)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return [*events, self._lifecycle(f"response.{response['status']}")]

    def fail(self, error: ApiError) -> list[ResponseEvent]:
        """The last events after a fault; the first ones as well, if none was sent before."""
        events = [] if self._sequence_number else self._begun()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": str(error)}
        return [*events, self._lifecycle("response.failed")]

    def cancel(self) -> list[ResponseEvent]:
        """The last event of a response that its owner ended."""
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.response["status"] = "cancelled"
        return [self._lifecycle("response.cancelled")]

    # ------------------------------------------------------------------ items

    def _searched(self) -> list[ResponseEvent]:
        """The searches that were made before the answer, each as an item with the events of its course."""
        events: list[ResponseEvent] = []
        for item in self._search.items() if self._search is not None else ():
            events.append(self._added({**item, "status": "in_progress", "results": None}))
            for stage in ("in_progress", "searching", "completed"):
                events.append(self._event(f"response.file_search_call.{stage}"))
            assert self._open is not None
            self._open |= item
            events.append(self._event("response.output_item.done", whole=True))
            self._open = None
        return events

    def _annotated(self, part: dict[str, Any]) -> list[ResponseEvent]:
        """The files that the text is taken from."""
        if self._search is None or part["type"] != "output_text":
            return []
        part["annotations"] = self._search.annotations(part["text"])
        return [
            self._event(
                "response.output_text.annotation.added",
                content_index=0,
                annotation_index=index,
                annotation=annotation,
            )
            for index, annotation in enumerate(part["annotations"])
        ]

    def _in_item(self, kind: str) -> list[ResponseEvent]:
        """Opens an item of text, unless it is open already."""
        if self._open is not None and self._open["type"] == kind:
            return []
        item: Item
        if kind == "message":
            item = {"id": new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant"}
        else:
            item = {"id": new_id("rs"), "type": kind, "status": "in_progress", "summary": []}
        events = [*self._close(), self._added({**item, "content": []})]
        assert self._open is not None
        self._open["content"].append(_new_part(kind))
        events.append(self._event("response.content_part.added", content_index=0, part=_new_part(kind)))
        return events

    def _call(self, call: dict[str, Any]) -> list[ResponseEvent]:
        function, events = call.get("function") or {}, []
        if self._call_index is None or call["index"] != self._call_index:
            events += self._close()
            item = {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.get("id") or new_id("call"),
                "name": function.get("name") or "",
                "arguments": "",
            }
            events.append(self._added(item))
            self._call_index = call["index"]
        assert self._open is not None
        if arguments := function.get("arguments"):
            self._open["arguments"] += arguments
            events.append(self._event(f"{_ARGUMENTS}.delta", delta=arguments))
        return events

    def _text(self, text: str, logprobs: Sequence[Any] = ()) -> list[ResponseEvent]:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        about: dict[str, Any] = {"content_index": 0, "delta": text}
        if "logprobs" in part:
            part["logprobs"].extend(logprobs)
            about["logprobs"] = logprobs
        return [self._event(f"response.{part['type']}.delta", **about)]

    def _taken_logprobs(self) -> list[Any]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _close(self) -> list[ResponseEvent]:
        """Ends the open item, with the response's own status if that has ended as well."""
        item, status = self._open, self.response["status"]
        if item is None:
            return []
        item["status"] = "completed" if status == "in_progress" else status
        events: list[ResponseEvent] = []
        if item["type"] == "function_call":
            events.append(self._event(f"{_ARGUMENTS}.done", name=item["name"], arguments=item["arguments"]))
        else:
            part = item["content"][0]
            events += self._annotated(part)
            text = {name: part[name] for name in ("text", "logprobs") if name in part}
            events.append(self._event(f"response.{part['type']}.done", content_index=0, **text))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        events.append(self._event("response.output_item.done", whole=True))
        self._open = self._call_index = None
        return events

    # ------------------------------------------------------------------ events

    def _added(self, item: Item) -> ResponseEvent:
        self._open = item
        self.response["output"].append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        return self._event("response.output_item.added", whole=True) | {"item": shown}

    def _event(self, kind: str, *, whole: bool = False, **about: Any) -> ResponseEvent:
        """An event about the open item: the whole item, or its id."""
        assert self._open is not None
        subject = {"item": dict(self._open)} if whole else {"item_id": self._open["id"]}
        index = len(self.response["output"]) - 1
        return self._numbered({"type": kind, "output_index": index, **subject, **about})

    def _begun(self) -> list[ResponseEvent]:
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def _lifecycle(self, kind: str) -> ResponseEvent:
        shown = {**self.response, "output": list(self.response["output"])}
        return self._numbered({"type": kind, "response": shown})

    def _numbered(self, event: ResponseEvent) -> ResponseEvent:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        return event


def _new_part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})


def new_response(
    body: ResponseRequest, response_id: str, model: str, store: bool, recommended: SamplingParams
) -> ResponseObject:
    """The response object before its first token: the request's own values, and empty output."""
    text = body.text
    reasoning = body.reasoning
    verbosity = {"verbosity": text.verbosity} if text is not None and text.verbosity else {}
    conversation = conversation_id(body)
    response: ResponseObject = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "store": store,
        "temperature": recommended.temperature if body.temperature is None else body.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}, **verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": recommended.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
    if conversation is not None:
        response["conversation"] = {"id": conversation}
    return response


def response_usage(usage: Usage) -> ResponseUsage:
    cached: Any = usage.get("prompt_tokens_details") or {}
    generated: Any = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": generated.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
