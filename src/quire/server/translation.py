"""Chats on behalf of endpoints that speak another API: their fields in, their events and field names out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fastapi import Request

from quire.core.errors import InvalidRequest
from quire.server.chat import ChatReply, answer_chat, chat_prompt, chat_tools
from quire.server.errors import ApiError, validated
from quire.server.protocol.base import Usage
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.reply import named_events
from quire.server.service import Service
from quire.server.stored_chats import Answering

Payloads = list[dict[str, Any]]  # of typed events


class EventBuilder(Protocol):
    """Builds an answer in another API's shape; each call returns the events that say what it added."""

    def begin(self, usage: Usage) -> Payloads: ...

    def take(self, delta: dict[str, Any], logprobs: Sequence[Any]) -> Payloads: ...

    def end(self, finish_reason: str | None, stop_reason: int | str | None, usage: Usage) -> Payloads: ...

    def fail(self, error: ApiError) -> Payloads: ...


async def translated_chat(
    service: Service,
    request: Request,
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    answer: Answering = answer_chat,
) -> ChatReply:
    """Submits the chat request with these fields; `names` are what errors call them."""
    with renamed_errors(names):
        return await answer(service, request, validated(ChatCompletionRequest, fields))


async def num_prompt_tokens(service: Service, fields: Mapping[str, Any], names: Mapping[str, str]) -> int:
    """How many tokens the prompt of such a chat would have."""
    with renamed_errors(names):
        body = validated(ChatCompletionRequest, fields)
        prompt = await chat_prompt(service.model_named(body.model), body, chat_tools(body))
        return len(prompt.token_ids)


async def build_whole(reply: ChatReply, builder: EventBuilder, names: Mapping[str, str]) -> None:
    """Fills the builder with a whole answer, as one large delta: the result equals that of a stream."""
    with renamed_errors(names):
        whole = await reply.whole()
    choice: dict[str, Any] = dict(whole["choices"][0])
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls") or ())]
    builder.begin(whole["usage"])
    builder.take({**choice["message"], "tool_calls": calls}, _logprobs(choice))
    builder.end(choice["finish_reason"], choice["stop_reason"], whole["usage"])


class TranslatedEvents:
    """An EventSource: a chat's chunks through a builder. `on_end` is called before the last events are sent."""

    def __init__(
        self,
        reply: ChatReply,
        builder: EventBuilder,
        names: Mapping[str, str],
        on_end: Callable[[], None] | None = None,
        encode: Callable[[Payloads], bytes] = named_events,
    ) -> None:
        self.generation = reply.generation
        self._reply = reply
        self._builder = builder
        self._names = names
        self._on_end = on_end
        self._encode = encode
        self._begun = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def take(self) -> bytes:
        try:
            chunks = self._reply.take_chunks()
        except (InvalidRequest, ApiError) as error:
            raise error.renamed(self._names) from None
        payloads: Payloads = [] if self._begun else self._builder.begin(self._reply.usage())
        self._begun = True
        for chunk in chunks:
            for choice in chunk["choices"]:
                payloads += self._builder.take(dict(choice["delta"]), _logprobs(choice))
                if choice["finish_reason"] is not None:
                    self._finish_reason, self._stop_reason = (
                        choice["finish_reason"],
                        choice.get("stop_reason"),
                    )
        return self._encode(payloads)

    def end(self) -> bytes:
        payloads = self._builder.end(self._finish_reason, self._stop_reason, self._reply.usage())
        if self._on_end is not None:
            self._on_end()
        return self._encode(payloads)

    def fail(self, error: ApiError) -> bytes:
        return self._encode(self._builder.fail(error))


def string_field(item: Mapping[str, Any], name: str, path: str) -> str:
    """A field of the object at `path`, which must be a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest.at(path, f"needs {name}: give a string")
    return value


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that leave the context call a request's fields what `names` says."""
    try:
        yield
    except (InvalidRequest, ApiError) as error:
        raise error.renamed(names) from None


def _logprobs(choice: Mapping[str, Any]) -> Sequence[Any]:
    logprobs = choice.get("logprobs")
    return logprobs["content"] if logprobs else ()


def call_input(arguments: str) -> dict[str, Any]:
    """A call's input. Arguments that a limit cut off, or that are no object, are shown as they are."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"raw_arguments": arguments}
