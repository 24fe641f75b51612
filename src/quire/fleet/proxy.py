"""RouterApp: an ASGI application that passes requests on to servers and their answers back, as they come."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

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
# headers of one connection, not of the request
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer upgrade transfer-encoding host "
    b"expect".split()
)
NOT_PASSED_ON = HOP_BY_HOP | {b"content-length"}  # of requests: HttpClient counts their bodies itself


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
        # the body of an answer to HEAD is dropped on the way back
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        target, head = request_target(scope), request_head(scope)
        order, last = servers.order(prefix), "no server answers"
        for attempt, number in enumerate(order):
            server, is_last = servers.servers[number], attempt == len(order) - 1
            handed_over = scope["path"].endswith(GENERATING) and await self._prefill(
                prefix, number, target, body, head
            )
            request_id = servers.sent(prefix, number)
            reply = Reply(send, on_begin=partial(servers.router.first_token, request_id))
            try:
                async with server.client.send(method, target, body or None, head) as response:
                    if response.status in TRY_ANOTHER and not is_last:
                        await response.read()
                        continue
                    usage = await reply.pass_back(response)
                    if usage:
                        servers.counted(request_id, number, prefix, usage, handed_over)
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
        own = [item for item in response.headers.items() if item[0] not in HOP_BY_HOP]
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
