"""Line: the way of a stream to its client. Speaks up when nothing was said for a while, lest a proxy cut it."""

import asyncio
import time
from collections.abc import Iterable

from starlette.types import Send

COMMENT = b": keep-alive\n\n"  # to a reader of server-sent events, nothing


class Line:
    """The answer begins with the first thing said. Use it as a context: the comments end with it."""

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]], seconds: float) -> None:
        self._send = send
        self._headers = list(headers)
        self._seconds = seconds
        self._last = time.monotonic()
        self._lock = asyncio.Lock()
        self._comments: asyncio.Task[None] | None = None
        self.begun = False

    async def __aenter__(self) -> "Line":
        if self._seconds:
            self._comments = asyncio.create_task(self._comment())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._comments is not None:
            self._comments.cancel()
            await asyncio.wait({self._comments})

    async def say(self, data: bytes) -> None:
        async with self._lock:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last = time.monotonic()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self) -> None:
        while True:
            due = self._last + self._seconds - time.monotonic()
            if due > 0:
                await asyncio.sleep(due)
            elif self._lock.locked():  # the client reads slowly: it is well supplied
                await asyncio.sleep(self._seconds)
            else:
                await self.say(COMMENT)
