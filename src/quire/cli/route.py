"""`quire route URL…`: sends requests to OpenAI-compatible servers, each where it adds the least work."""

import argparse
import asyncio
import socket
from typing import Any

import uvicorn

from quire.cli.parser import Parser
from quire.core.errors import ConfigError
from quire.fleet.policies import DEFAULT, POLICIES
from quire.fleet.proxy import REQUEST_TIMEOUT, RouterApp
from quire.fleet.servers import CACHE_TOKENS, Servers
from quire.observe import logs
from quire.observe.heap import freeze_heap
from quire.server.connection import KEEP_ALIVE_SECONDS, Http1Protocol
from quire.server.run import bind, report_serving
from quire.server.settings import ServerSettings

HOST, PORT = "127.0.0.1", 8001


def add_arguments(parser: Parser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help="the servers, such as http://127.0.0.1:8000")
    roles = {"prefill": "computes prompts for the others", "decode": "answers, with prompts of those"}
    for role, what in roles.items():
        text = f"a server started with --role {role}, which {what} (repeatable)"
        parser.add_argument(f"--{role}", action="append", default=[], metavar="URL", help=text)
    names = ", ".join(POLICIES)
    text = f"which server gets a request: {names} (default: {DEFAULT})"
    parser.add_argument("--policy", default=DEFAULT, metavar="NAME", help=text)
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST})")
    parser.add_argument("--port", type=int, default=PORT, help=f"port, 0 for any free one (default: {PORT})")
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="size of a server's prefix cache in tokens, so that prefixes are spread while there is room (default: not "
        f"known; {CACHE_TOKENS} are kept in mind, and answers that count cached tokens correct it)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=REQUEST_TIMEOUT,
        metavar="SECONDS",
        help="time in which an answer must begin; then the request goes to another server "
        f"(default: {REQUEST_TIMEOUT:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    logs.configure()
    if not 0 < arguments.request_timeout < float("inf"):
        raise ConfigError(f"--request-timeout is {arguments.request_timeout:g}: give seconds above 0")
    if arguments.cache_tokens is not None and arguments.cache_tokens < 1:
        raise ConfigError(f"--cache-tokens is {arguments.cache_tokens}: give 1 or more")
    urls = [*arguments.urls, *arguments.decode]
    if not urls:
        raise ConfigError("no server to answer: name servers, or --decode URL beside --prefill URL")
    servers = Servers(urls, arguments.policy, arguments.cache_tokens, arguments.prefill)
    listener = bind(ServerSettings(host=arguments.host, port=arguments.port))
    config = uvicorn.Config(
        RouterApp(servers, arguments.request_timeout),  # type: ignore[arg-type]
        http=RouterProtocol, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
        date_header=False,  # the server that answers has one
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )  # fmt: skip
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(servers, uvicorn.Server(config), listener))
    finally:
        listener.close()
    return 0


class CoalescingTransport:
    """A transport that sends what is written in one turn of the event loop as one piece: a head with the first bytes
    of its body, the last event with the end. Each piece is a system call, and wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data = b"".join(self._written)
        self._written.clear()
        if data and not self._transport.is_closing():  # the client may be gone since `write`
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class RouterProtocol(Http1Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CoalescingTransport(transport, self.loop))  # type: ignore[arg-type]


async def _serve(servers: Servers, server: uvicorn.Server, listener: socket.socket) -> None:
    log = logs.get_logger(__name__)
    await servers.start()
    listener.listen()  # before the line that says so: uvicorn does it after some milliseconds
    freeze_heap()
    log.info("routing   %d servers, requests by %s", len(servers.servers), servers.policy)
    report_serving(ServerSettings(), listener)
    try:
        await server.serve(sockets=[listener])
    finally:
        await servers.close()
