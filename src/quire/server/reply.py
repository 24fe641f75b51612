"""Bodies: JSON by msgspec, and server-sent events whose errors are events too."""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.observe.logs import get_logger
from quire.server.errors import ApiError, ClientGone, as_api_error
from quire.server.sse import Line

log = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"quire-{__version__}"  # the same program gives the same tokens for the same seed
Events = AsyncGenerator[bytes, None]


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_reply(error: ApiError) -> JsonReply:
    return JsonReply(error.body(), status_code=error.status, headers=error.headers)


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(payload: Mapping[str, Any]) -> bytes:
    """An event that has its type outside as well: what some clients choose by."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


def last_error(error: ApiError) -> bytes:
    """How OpenAI's streams of chunks end when something fails."""
    return event(error.body()) + DONE


class EventStream(Response):
    """Sends events as they come. Until the first is there nothing is sent, so what is refused before it has a status
    of its own, unless that takes so long that the line must be kept alive. A fault after that becomes what `failed`
    makes of it, then the end."""

    media_type = "text/event-stream"

    def __init__(
        self, events: Events, request_id: str, failed: Callable[[ApiError], bytes] = last_error
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope["quire.caller"]
        line = Line(send, self.raw_headers, caller.keep_alive)
        try:
            async with line:
                async for data in self._events:
                    await line.say(data)
        except ClientGone:
            if not line.begun:
                raise
            return
        except Exception as fault:
            if not line.begun:
                raise
            error = as_api_error(fault)
            caller.note_error(error)
            if error.status == 500:
                log.error("%s", fault, extra={"request_id": self._request_id}, exc_info=_unforeseen(fault))
            await line.say(self._failed(error))
        finally:
            await self._events.aclose()
        await line.end()


async def streamed(
    events: Events, request_id: str, failed: Callable[[ApiError], bytes] = last_error
) -> EventStream:
    return EventStream(events, request_id, failed)


def _unforeseen(fault: Exception) -> Exception | None:
    """What deserves a traceback in the log: our own errors say all that is to be said."""
    return None if type(fault).__module__.startswith("quire.") else fault
