"""RouterApp: an ASGI application that passes requests on to servers and their answers back, as they come."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from quire.core import stats
from quire.core.errors import QuireError
from quire.fleet.prefixes import Prefix
from quire.fleet.servers import Servers, prefix_of_body, prompt_only
from quire.link.http_client import ConnectionLost, Response
from quire.observe.logs import get_logger

log = get_logger(__name__)
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
MAX_BODY_BYTES = 64 << 20
RETRY_SECONDS = 2
GENERATING = ("/completions", "/messages")  # paths whose requests have a prompt and max_tokens
SERVER_UP = stats.Metric("gauge", "server_up", "Whether the server answers.")
TRY_ANOTHER = frozenset({429, 502, 503})  # a server that is full or ends; another one may take the request
# of one connection, not of the request
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer upgrade transfer-encoding host "
    b"content-length expect".split()
)


class ClientLeft(QuireError):
    """The client closed the connection."""


class RouterApp:
    """`/health`, `/servers` and `/metrics` are the router's own; everything else goes to a server."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] in ("GET", "HEAD") and path in ("/health", "/ready", "/servers", "/metrics"):
            await self._own(path, send)
            return
        try:
            body = await read_body(receive)
        except ClientLeft:
            return
        if body is None:
            await refuse(send, 413, f"the body has more than {MAX_BODY_BYTES} bytes", "body_too_large")
            return
        await while_connected(self._forward(scope, body, send), receive)

    # ------------------------------------------------------------------ passing on

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Tries servers in the policy's order until one has begun to answer."""
        servers, prefix = self._servers, prefix_of_body(body)
        method = (
            "GET" if scope["method"] == "HEAD" else scope["method"]
        )  # the body is dropped on the way back
        target, head = request_target(scope), request_head(scope)
        order, last = servers.order(prefix), "no server answers"
        for attempt, number in enumerate(order):
            server, is_last = servers.servers[number], attempt == len(order) - 1
            handed_over = scope["path"].endswith(GENERATING) and await self._prefill(
                prefix, number, target, body, head
            )
            request_id = servers.sent(prefix, number)
            reply = Reply(send)
            try:
                async with server.client.send(method, target, body or None, head) as response:
                    if response.status in TRY_ANOTHER and not is_last:
                        await response.read()
                        continue
                    await self._pass_back(request_id, prefix, response, reply, handed_over)
                    return
            except ConnectionLost as fault:
                server.failed(str(fault))
                last = f"{server.url}: {fault}"
                if reply.has_begun:
                    await reply.break_off(last)
                    return
            finally:
                servers.router.ended(request_id)
        status = ", ".join(f"{server.url}: {server.fault}" for server in servers.servers if not server.is_up)
        message = f"none of {len(servers.servers)} servers takes the request ({status or last}): try again"
        await refuse(send, 503, message, "no_server", {"Retry-After": str(RETRY_SECONDS)})

    async def _prefill(self, prefix: Prefix, number: int, target: str, body: bytes, head: bytes) -> bool:
        """Lets a prefill server compute the prompt; whether it did. If not, the request's own server will."""
        servers = self._servers
        helpers = servers.prefill(prefix, number)
        prompt = prompt_only(body) if helpers else None
        if prompt is None:
            return False
        server, request_id = servers.servers[helpers[0]], servers.sent(prefix, helpers[0])
        try:
            async with server.client.send("POST", target, prompt, head) as response:
                await response.read()
                return response.status == 200
        except ConnectionLost as fault:
            server.failed(str(fault))
            return False
        finally:
            servers.router.ended(request_id)

    async def _pass_back(
        self, request_id: str, prefix: Prefix, response: Response, reply: "Reply", handed_over: bool
    ) -> None:
        servers, piece, rest = self._servers, b"", b""
        async for piece in response.pieces():
            if not reply.has_begun:
                servers.router.first_token(request_id)
                await reply.begin(response)
            await reply.send_piece(piece)
            if b'_tokens"' in piece:
                rest = piece
        if rest:
            servers.counted(request_id, prefix, rest, handed_over)
        await reply.end(response)

    # ------------------------------------------------------------------ the router's own endpoints

    async def _own(self, path: str, send: Send) -> None:
        servers = self._servers
        if path == "/metrics":
            await answer(send, 200, self._metrics(), "text/plain; version=0.0.4")
            return
        up = servers.num_up
        state: dict[str, Any] = {"status": f"{up} of {len(servers.servers)} servers answer"}
        if path == "/servers":
            state = {"policy": servers.policy, "servers": servers.described()}
        await answer(send, 200 if up or path == "/servers" else 503, msgspec.json.encode(state))

    def _metrics(self) -> bytes:
        lines: dict[str, list[str]] = {}
        for server, load in zip(self._servers.servers, self._servers.router.loads, strict=True):
            for metric, value in ((SERVER_UP, float(server.is_up)), *stats.walk(load.stats)):
                name = f"quire_{metric.name}"
                rows = lines.setdefault(
                    name, [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
                )
                rows.append(f'{name}{{server="{server.url}"}} {value}')
        return ("\n".join(row for rows in lines.values() for row in rows) + "\n").encode()


class Reply:
    """What goes back to the client; nothing is sent before the server's first bytes are there."""

    def __init__(self, send: Send, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """`more`: headers beside the server's."""
        self._send = send
        self._more = more
        self.has_begun = False
        self._is_stream = False

    async def begin(self, response: Response) -> None:
        self.has_begun = True
        self._is_stream = b"text/event-stream" in response.headers.get(b"content-type", b"")
        own = [(name, value) for name, value in response.headers.items() if name not in HOP_BY_HOP]
        headers = [*own, *self._more]
        if b"content-length" in response.headers:
            headers.append((b"content-length", response.headers[b"content-length"]))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, response: Response) -> None:
        if not self.has_begun:
            await self.begin(response)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

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
    lines = [name + b": " + value for name, value in scope["headers"] if name not in HOP_BY_HOP]
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


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`, and cancels it when the client leaves."""
    gone, working = asyncio.create_task(until_gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (gone, working):
            task.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def answer(
    send: Send,
    status: int,
    body: bytes,
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    own = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
    head = [(name.lower().encode(), value.encode()) for name, value in own.items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    send: Send, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
) -> None:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    await answer(send, status, msgspec.json.encode({"error": error}), headers=headers)
