"""The load generator's client reads what servers send, however it is cut, and says what went wrong."""

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from quire.core.errors import ConfigError
from quire.link.http_client import ConnectionLost, HttpClient

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b'data: {"a": 1}\n\n: a comment\n\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'


async def serving(answer: Answer) -> tuple[asyncio.Server, str]:
    """A server that answers each request of a connection; `answer` gets how many came on it before."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while (await reader.readuntil(b"\r\n\r\n")) and not writer.is_closing():
            await answer(writer, number)
            await writer.drain()
            number += 1

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def events_of(client: HttpClient) -> list[bytes]:
    async with client.send("GET", "/x") as response:
        return [event async for event in response.events()]


def in_chunks(data: bytes, size: int) -> bytes:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_found_wherever_the_chunks_are_cut(size: int):
    async def answer(writer: asyncio.StreamWriter, _number: int) -> None:
        for byte in CHUNKED + in_chunks(EVENTS, size):
            writer.write(bytes([byte]))

    async def run() -> tuple[list[bytes], int]:
        server, url = await serving(answer)
        async with server:
            client = HttpClient(url)
            first, second = await events_of(client), await events_of(client)
            assert first == second
            await client.close()
            return first, client.num_opened

    assert asyncio.run(run()) == ([b'{"a": 1}', b'{"b": 2}', b"[DONE]"], 1)


@pytest.mark.parametrize(
    ("head", "num_opened"),
    [(b"Content-Length: 5\r\n", 1), (b"Content-Length: 5\r\nConnection: close\r\n", 2), (b"", 2)],
    ids=["keeps", "closes", "until the end"],
)
def test_connections_are_used_again_where_the_server_allows(head: bytes, num_opened: int):
    async def answer(writer: asyncio.StreamWriter, _number: int) -> None:
        writer.write(b"HTTP/1.1 404 Nope\r\n" + head + b"\r\nhello")
        if num_opened > 1:
            writer.close()

    async def run() -> None:
        server, url = await serving(answer)
        async with server:
            client = HttpClient(url)
            for _ in range(2):
                async with client.send("POST", "/x", b"{}") as response:
                    assert (response.status, await response.read()) == (404, b"hello")
            assert client.num_opened == num_opened
            await client.close()

    asyncio.run(run())


def test_an_idle_connection_that_the_server_closed_costs_nothing():
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 1:
            writer.transport.abort()  # as a server does whose keep-alive ends at that very moment
        else:
            writer.write(CHUNKED + in_chunks(EVENTS, 20))

    async def run() -> int:
        server, url = await serving(answer)
        async with server:
            client = HttpClient(url)
            assert len(await events_of(client)) == len(await events_of(client)) == 3
            await client.close()
            return client.num_opened

    assert asyncio.run(run()) == 2


def test_an_idle_connection_that_was_reset_costs_nothing_on_uvloop_either():
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(CHUNKED + in_chunks(EVENTS, 20))
        linger = struct.pack("ii", 1, 0)  # what is closed is reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        asyncio.get_running_loop().call_later(0.05, writer.transport.abort)

    async def run() -> int:
        server, url = await serving(answer)
        async with server:
            client = HttpClient(url)
            await events_of(client)
            while not client._idle[0][1].is_closing():
                await asyncio.sleep(0.01)
            assert len(await events_of(client)) == 3
            await client.close()
            return client.num_opened

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == 2


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (CHUNKED + b"10\r\ndata: ", "closed before the response was complete"),
        (b"HTTP/1.1 200 OK\r\n", "closed before the response was complete"),
        (CHUNKED + b"zz\r\n", r"no HTTP/1\.1"),
        (b"hello\r\n\r\n", r"no HTTP/1\.1"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 17), r"no HTTP/1\.1"),
        (CHUNKED + b"1" * (1 << 17), r"no HTTP/1\.1"),
    ],
)
def test_a_response_that_is_none_says_so(sent: bytes, said: str):
    async def answer(writer: asyncio.StreamWriter, _number: int) -> None:
        writer.write(sent)
        writer.close()

    async def run() -> None:
        server, url = await serving(answer)
        async with server:
            with pytest.raises(ConnectionLost, match=said):
                await events_of(HttpClient(url))

    asyncio.run(run())


def test_ten_thousand_random_frames_of_servers_are_lost_connections():
    drawn = random.Random(0)
    starts = (b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", CHUNKED, CHUNKED + b"5\r\nhello\r\n")

    async def answer(writer: asyncio.StreamWriter, _number: int) -> None:
        writer.write(drawn.choice(starts))
        for _ in range(20):
            writer.write(drawn.randbytes(drawn.randrange(1, 100)) + drawn.choice((b"", b"\r\n", b"\r\n\r\n")))
        writer.close()

    async def run() -> int:
        server, url = await serving(answer)
        lost = 0
        async with server:
            client = HttpClient(url)
            for _ in range(500):
                try:
                    await events_of(client)
                except ConnectionLost:
                    lost += 1
            await client.close()
        return lost

    assert asyncio.run(run()) > 300  # the others are a head and a body without a length


def test_a_server_that_is_not_there_says_so():
    with pytest.raises(ConnectionLost, match="refused"):
        asyncio.run(events_of(HttpClient("http://127.0.0.1:1")))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999999"])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url)
