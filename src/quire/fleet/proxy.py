"""RouterApp: an ASGI application that passes requests on to servers and their answers back, as they come."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from quire.core import stats
from quire.fleet.prefixes import Prefix
from quire.fleet.servers import Server, Servers, prefix_of_body, prompt_only
from quire.link.http_client import ConnectionLost
from quire.link.http_proxy import (
    MAX_BODY_BYTES,
    ClientLeft,
    Receive,
    Reply,
    Scope,
    Send,
    read_body,
    request_head,
    request_target,
    while_connected,
)

RETRY_SECONDS = 2
REQUEST_TIMEOUT = 1800.0  # until an answer begins; one that is not streamed begins with its last token
GENERATING = ("/completions", "/messages")  # paths whose requests have a prompt and max_tokens
SERVER_UP = stats.Metric("gauge", "server_up", "Whether the server answers.")
TRY_ANOTHER = frozenset({429, 502, 503})  # a server that is full or ends; another one may take the request


class RouterApp:
    """`/health`, `/servers` and `/metrics` are the router's own; everything else goes to a server."""

    def __init__(self, servers: Servers, timeout: float = REQUEST_TIMEOUT) -> None:
        """`timeout`: seconds in which an answer must begin."""
        self._servers = servers
        self._timeout = timeout

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
                async with (
                    asyncio.timeout(self._timeout) as limit,
                    server.client.send(method, target, body or None, head) as response,
                ):
                    limit.reschedule(None)
                    if response.status in TRY_ANOTHER and not is_last:
                        continue  # without its body, which may never end
                    usage = await reply.pass_back(response)
                    if usage:
                        servers.counted(request_id, number, prefix, usage, handed_over)
                    return
            except (ConnectionLost, TimeoutError) as fault:
                last = f"{server.url}: {self._failed(server, fault)}"
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
            async with (
                asyncio.timeout(self._timeout),
                server.client.send("POST", target, prompt, head) as response,
            ):
                await response.read()
                return response.status == 200
        except (ConnectionLost, TimeoutError) as fault:
            self._failed(server, fault)
            return False
        finally:
            servers.router.ended(request_id)

    def _failed(self, server: Server, fault: Exception) -> str:
        """Notes the fault; why the server gets no requests until it answers again."""
        why = str(fault) or f"no answer to a request within {self._timeout:g} s"
        server.failed(why)
        return why

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
