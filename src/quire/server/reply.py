"""Bodies: JSON by msgspec, and server-sent events whose errors are events too."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.observe.logs import get_logger
from quire.server.errors import ApiError, ClientGone, as_api_error

log = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
Events = AsyncGenerator[bytes, None]


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_reply(error: ApiError) -> JsonReply:
    return JsonReply(error.body(), status_code=error.status, headers=error.headers)


def event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class EventStream(Response):
    """Sends what `rest` yields as it comes. A fault half-way becomes an error event before the end."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: Events, request_id: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return
        except Exception as fault:
            error = as_api_error(fault)
            if error.status == 500:
                log.error("%s", fault, extra={"request_id": self._request_id}, exc_info=_unforeseen(fault))
            last = event(error.body()) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            await self._rest.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(events: Events, request_id: str) -> EventStream:
    """Waits for the first event: what is refused before it gets a status of its own."""
    return EventStream(await anext(events), events, request_id)


def _unforeseen(fault: Exception) -> Exception | None:
    """What deserves a traceback in the log: our own errors say all that is to be said."""
    return None if type(fault).__module__.startswith("quire.") else fault
