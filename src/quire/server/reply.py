"""Replies: JSON by msgspec, server-sent events as they come, and what the OpenAPI document says about answers."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.observe.logs import get_logger
from quire.server.errors import ApiError, ClientGone, as_api_error
from quire.server.protocol.base import ErrorBody
from quire.server.protocol.completions import AnswerHead

REQUEST_ID = "request-id"  # the header in which Anthropic's clients look for it
FINGERPRINT = f"quire-{__version__}"  # the same program gives the same tokens for the same seed
_ERROR_TEXTS = {
    400: "Something in the request is wrong or not supported; `param` names it.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too much is waiting already; Retry-After says when to come again.",
    500: "The request failed in the engine.",
    503: "Not now: the engine is starting, or the server is shutting down.",
    504: "The request took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _ERROR_TEXTS.items()
}


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def answer_head(response_id: str, kind: str, model: str) -> AnswerHead:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def answers(whole: Any, chunk: Any | None = None) -> dict[int | str, dict[str, Any]]:
    """200 with `whole`, or a stream of `chunk`s, and the errors, for the OpenAPI document."""
    described: dict[str, Any] = {"model": whole, "description": "The answer."}
    if chunk is not None:
        described["description"] = "The answer; with `stream`, events that each hold a chunk, then `[DONE]`."
        described["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: described, **ERRORS}


# ---------------------------------------------------------------------- server-sent events

# The writer is our own and not sse-starlette's: its loop runs for every token, and makes one dict and one bytes object.
log = get_logger(__name__)
COMMENT = b": keep-alive\n\n"  # clients ignore it
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + _json.encode(payload) + b"\n\n"


def named_event(payload: Mapping[str, Any]) -> bytes:
    """An event whose type stands outside its JSON as well, where some clients look for it."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


def named_events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join([named_event(payload) for payload in payloads])


class TextEvent:
    """An event in which one text changes from token to token; the rest is encoded once."""

    def __init__(self, payload: Mapping[str, Any], field: str) -> None:
        """`payload` has an empty string under the key `field`, somewhere."""
        empty = b'"%b":""' % field.encode()
        before, self._after = event(payload).split(empty, 1)
        self._buffer = bytearray(before + empty[:-2])
        self._whole = [self._buffer]
        self._start = len(self._buffer)

    def encode(self, text: str) -> bytes:
        _json.encode_into(text, self._buffer, self._start)
        self._buffer += self._after
        return b"".join(self._whole)  # a copy, without the tuple of arguments that bytes() takes


class Awaited(Protocol):
    """What a stream waits for: a Generation, or the events of one that runs in the background."""

    @property
    def is_open(self) -> bool: ...

    def wait(self) -> Awaitable[None]: ...

    def close(self) -> None: ...


class EventSource(Protocol):
    """A generation's answers as the events of one API."""

    @property
    def generation(self) -> Awaited: ...

    def take(self) -> bytes:
        """The events for what has come since the last call; empty if nothing can be shown yet."""

    def end(self) -> bytes:
        """The last events, once the generation has ended."""

    def fail(self, error: ApiError) -> bytes:
        """The last events of a stream that breaks off."""


class EventStream(Response):
    """Sends events as they come. Nothing is sent before the first one, so a request that is refused until then has a
    status of its own, unless that takes so long that a keep-alive comment has begun the response. A later fault is
    sent as the source's `fail`."""

    media_type = "text/event-stream"
    keeps_alive = True  # by comments

    def __init__(self, source: EventSource, request_id: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, source = scope["quire.context"], self._source
        writer = SseWriter(send, self.raw_headers, context.keep_alive if self.keeps_alive else 0)
        try:
            async with writer:
                await writer.write(source)
        except ClientGone:
            if not writer.begun:
                raise
            return
        except Exception as fault:
            if not writer.begun:
                raise
            error = as_api_error(fault)
            context.note_error(error)
            if error.status == 500:
                log.error("%s", fault, extra={"request_id": self._request_id}, exc_info=_unforeseen(fault))
            await writer.send(source.fail(error))
        finally:
            source.generation.close()
        await writer.end()


class SseWriter:
    """Writes server-sent events; sends a comment after `seconds` of silence so that proxies keep the connection.

    The first thing sent begins the response. Use it as a context: the comments end with it.
    """

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]], seconds: float) -> None:
        self.begun = False
        self._send = send
        self._headers = list(headers)
        self._seconds = seconds
        self._last = time.monotonic()
        self._sending = False
        self._comment_sent: asyncio.Future[None] | None = None  # while a comment is on its way
        self._comments: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "SseWriter":
        if self._seconds:
            self._comments = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._comments is not None:
            self._comments.cancel()
            await asyncio.wait({self._comments})

    async def write(self, source: EventSource) -> None:
        """All events of a source to its end. Per token: a future to wait on, the event and its ASGI message."""
        generation = source.generation
        while generation.is_open:
            await generation.wait()
            data = source.take()
            if not data:
                continue
            if not self.begun or self._comment_sent is not None:
                await self.send(data)
                continue
            self._sending = True
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending = False
            self._last = time.monotonic()
        await self.send(source.end())

    async def send(self, data: bytes) -> None:
        if self._comment_sent is not None:
            await self._comment_sent
        self._sending = True
        await self._send_now(data)
        self._sending = False

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_now(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._last = time.monotonic()

    async def _keep_alive(self) -> None:
        while True:
            due = self._last + self._seconds - time.monotonic()
            if due > 0:
                await asyncio.sleep(due)
            elif self._sending:  # a slow client is still being sent the last event
                await asyncio.sleep(self._seconds)
            else:
                self._comment_sent = asyncio.get_running_loop().create_future()
                try:
                    await self._send_now(COMMENT)
                finally:
                    self._comment_sent.set_result(None)
                    self._comment_sent = None


def last_error(error: ApiError) -> bytes:
    """How OpenAI's streams of chunks end when something fails."""
    return event(error.body()) + DONE


def _unforeseen(fault: Exception) -> Exception | None:
    """A fault that deserves a traceback in the log: our own errors explain themselves."""
    return None if type(fault).__module__.startswith("quire.") else fault
