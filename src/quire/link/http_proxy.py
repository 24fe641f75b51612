"""An ASGI application's side of a proxy: a client's request for HttpClient, and the answer on its way back."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from quire.core.errors import QuireError
from quire.link.http_client import ConnectionLost, Response
from quire.observe.logs import get_logger

log = get_logger(__name__)
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
MAX_BODY_BYTES = 64 << 20
# headers of one connection, not of the request
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer upgrade transfer-encoding host "
    b"expect".split()
)
NOT_PASSED_ON = HOP_BY_HOP | {b"content-length"}  # of requests, whose bodies are counted again, and of chunks


class ClientLeft(QuireError):
    """The client closed the connection."""


class Reply:
    """What goes back to the client; nothing is sent before the server's first bytes are there."""

    def __init__(
        self,
        send: Send,
        more: Sequence[tuple[bytes, bytes]] = (),
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`more`: headers beside the server's. `on_begin` is called before the first bytes are sent."""
        self._send = send
        self._more = more
        self._on_begin = on_begin
        self.has_begun = False
        self._is_stream = False

    async def pass_back(self, response: Response) -> bytes:
        """Sends the response as it comes. Returns the last piece of it that counts tokens."""
        send, usage = self._send, b""
        async for piece in response.pieces():
            if not self.has_begun:
                await self._begin(response)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if b'_tokens"' in piece:
                usage = piece
        if not self.has_begun:
            await self._begin(response)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return usage

    async def _begin(self, response: Response) -> None:
        self.has_begun = True
        self._on_begin()
        self._is_stream = b"text/event-stream" in response.headers.get(b"content-type", b"")
        left_out = NOT_PASSED_ON if b"transfer-encoding" in response.headers else HOP_BY_HOP
        own = [item for item in response.headers.items() if item[0] not in left_out]
        headers = [*own, *self._more]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def break_off(self, why: str) -> None:
        """A stream of events ends with an error event; other bodies stay short, which their length shows."""
        log.warning("a streamed answer was lost: %s", why)
        if not self._is_stream:
            raise ConnectionLost(why)
        error = {"error": {"message": why, "type": "server_error", "param": None, "code": "server_lost"}}
        data = b"data: " + msgspec.json.encode(error) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def request_target(scope: Scope) -> str:
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def request_head(scope: Scope, names_client: bool = True) -> bytes:
    lines = [name + b": " + value for name, value in scope["headers"] if name not in NOT_PASSED_ON]
    client = scope.get("client")
    if client is not None and names_client:
        lines.append(b"x-forwarded-for: " + client[0].encode("latin-1"))
    return b"\r\n".join(lines) + b"\r\n"


async def read_body(receive: Receive) -> bytes | None:
    """None: it is too long."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(pieces)


async def while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Awaits `work`, and cancels it when the client leaves."""
    task, has_left = cast("asyncio.Task[None]", asyncio.current_task()), False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise  # it is the task itself that ends
    finally:
        watching.cancel()
