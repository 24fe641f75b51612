"""Chats on behalf of endpoints that speak another API: their fields in, their words in errors."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import msgspec
import pydantic
from fastapi import Request

from quire.core.errors import InvalidRequest
from quire.server.chat import answer_chat, chat_prompt
from quire.server.chat_reply import ChatReply
from quire.server.errors import ApiError, as_api_error, from_validation
from quire.server.protocol.base import Usage
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.reply import Events, named_event
from quire.server.service import Service
from quire.text.prompts import PreparedPrompt

Payloads = list[dict[str, Any]]  # of typed events


class Draft(Protocol):
    """An answer in another API's shape, as it grows; each call gives the events that say what it added."""

    def begin(self, usage: Usage) -> Payloads: ...

    def take(self, delta: dict[str, Any], logprobs: Sequence[Any]) -> Payloads: ...

    def end(self, finish_reason: str | None, stop_reason: int | str | None, usage: Usage) -> Payloads: ...


async def translated_chat(
    service: Service, request: Request, fields: Mapping[str, Any], names: Mapping[str, str]
) -> ChatReply:
    """Asks what `fields` of a chat request say; errors call them what `names` say their caller calls them."""
    with _in_words(names):
        return await answer_chat(service, request, _chat_request(fields))


async def translated_prompt(
    service: Service, fields: Mapping[str, Any], names: Mapping[str, str]
) -> PreparedPrompt:
    """The prompt that such a chat would have."""
    with _in_words(names):
        body = _chat_request(fields)
        return await chat_prompt(service.model_named(body.model), body)


async def draft_whole(reply: ChatReply, draft: Draft) -> None:
    """Fills a draft with a whole answer, as one large delta: so it becomes what a stream would have made."""
    whole = await reply.whole()
    choice: dict[str, Any] = dict(whole["choices"][0])
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls") or ())]
    draft.begin(whole["usage"])
    draft.take({**choice["message"], "tool_calls": calls}, _logprobs(choice))
    draft.end(choice["finish_reason"], choice["stop_reason"], whole["usage"])


async def draft_events(reply: ChatReply, draft: Draft, ended: Callable[[], None] | None = None) -> Events:
    """Fills a draft with a stream, and yields its events; `ended` is called before the last of them."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    begun = False
    async with aclosing(reply.chunks()) as batches:
        async for chunks in batches:
            payloads = [] if begun else draft.begin(reply.usage())
            begun = True
            usage = chunks[-1].get("usage") or usage
            for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
                payloads += draft.take(dict(choice["delta"]), _logprobs(choice))
                if choice["finish_reason"] is not None:
                    finish_reason, stop_reason = choice["finish_reason"], choice.get("stop_reason")
            if payloads:
                yield encoded(payloads)
    payloads = draft.end(finish_reason, stop_reason, usage or reply.usage())
    if ended is not None:
        ended()
    yield encoded(payloads)


def encoded(payloads: Payloads) -> bytes:
    return b"".join([named_event(payload) for payload in payloads])


def _logprobs(choice: Mapping[str, Any]) -> Sequence[Any]:
    found = choice.get("logprobs")
    return found["content"] if found else ()


def check_encodable(*values: Any) -> None:
    """What an answer repeats must be writable as JSON: a caller's half characters and towers of brackets are not."""
    try:
        msgspec.json.encode(values)
    except UnicodeEncodeError:
        raise InvalidRequest("the request holds half of a character: send valid Unicode") from None
    except RecursionError:
        raise InvalidRequest("the request nests too deeply: send flatter values") from None


def _chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    try:
        return ChatCompletionRequest.model_validate(fields)
    except pydantic.ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise from_validation(problems, fields) from None


@contextmanager
def _in_words(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except (InvalidRequest, ApiError) as error:
        raise renamed(as_api_error(error), names) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error about a field that its caller calls something else.

    Names that begin with a dot are those of parts, wherever they are: `.function.name` of a tool, for instance.
    """
    message, param = str(error), error.param
    if param is None:
        return error
    for part, said in names.items():
        if part.startswith("."):
            message, param = message.replace(part, said), param.replace(part, said)
    field = re.split(r"[.\[]", param)[0]
    if field in names:
        message, param = re.sub(rf"\b{field}\b", names[field], message, count=1), names[field]
    return ApiError(
        error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers
    )
