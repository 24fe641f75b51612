"""Headers are bounded and requests must arrive in time, before any key is looked at. Raw sockets."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import uvicorn

from quire.server.connection import MIN_BODY_BYTES, BoundedHttpProtocol
from quire.server.settings import ServerSettings
from tests.server.running import RunningServer

SETTINGS = ServerSettings(max_header_bytes=8192, header_timeout=0.4, body_timeout=0.4)
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def application(_scope, receive, send) -> None:
    """Says how long the body is, in two pieces with a pause between them."""
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    else:
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"12")]})
    await send({"type": "http.response.body", "body": b"%6d" % size, "more_body": True})
    await asyncio.sleep(0.6)
    await send({"type": "http.response.body", "body": b"-bytes"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(SETTINGS) as number:
        yield number


@contextmanager
def serving(settings: ServerSettings) -> Iterator[int]:
    """The port of a server with these limits."""
    config = uvicorn.Config(
        application, http=partial(BoundedHttpProtocol, settings), lifespan="off", log_config=None, ws="none"
    )
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    return connection


def refusal(opened: socket.socket) -> tuple[int, str]:
    """Status and code of an answer of one piece."""
    received = opened.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_a_request_in_one_piece_is_answered(port: int) -> None:
    with connected(port) as opened:
        for _ in range(2):  # kept alive
            opened.sendall(POST + b"Content-Length: 5\r\n\r\nhello")
            received = b""
            while not received.endswith(b"-bytes"):
                received += opened.recv(1000)
            assert received.startswith(b"HTTP/1.1 200")
            assert b"     5-bytes" in received


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pieces", [1, 7, 60])
def test_an_offered_upgrade_is_ignored_and_the_body_is_read(offer: bytes, pieces: int) -> None:
    head = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer + b"\r\nHTTP2-Settings: AAM\r\n"
    request = head + b"Content-Length: 5\r\n\r\nhello"
    with serving(ServerSettings()) as port, connected(port) as opened:
        for _ in range(2):  # kept alive
            for at in range(pieces):
                opened.sendall(request[len(request) * at // pieces : len(request) * (at + 1) // pieces])
                time.sleep(0.001)
            received = b""
            while not received.endswith(b"-bytes"):
                piece = opened.recv(1000)
                assert piece, received
                received += piece
            assert received.startswith(b"HTTP/1.1 200")
            assert b"     5-bytes" in received


def test_hundreds_of_offers_in_one_piece_are_answered_in_turn(port: int) -> None:
    request = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello"
    with connected(port) as opened:
        opened.sendall(request * 400)
        received = b""
        while received.count(b"     5-bytes") < 2:
            piece = opened.recv(65536)
            assert piece, received[-200:]
            received += piece


@pytest.mark.parametrize("size", [9000, 300_000])
@pytest.mark.parametrize("ended", [True, False])
def test_large_headers_are_a_431(port: int, size: int, ended: bool) -> None:
    with connected(port) as opened:
        end = b"\r\nContent-Length: 2\r\n\r\n{}" if ended else b""
        opened.sendall(POST + b"X-Large: " + b"a" * size + end)
        assert refusal(opened) == (431, "headers_too_large")


def test_many_headers_end_as_soon_as_the_limit_is_passed(port: int) -> None:
    piece = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(100))
    sent = 0
    with connected(port) as opened:
        opened.sendall(POST)
        with suppress(OSError):
            while sent < 20_000_000:
                opened.sendall(piece)
                sent += len(piece)
                time.sleep(0.01)
    assert sent < 5_000_000


def test_headers_within_the_limit_may_come_in_pieces() -> None:
    with serving(ServerSettings(max_header_bytes=8192)) as port, connected(port) as opened:
        for piece in (POST, b"X-Large: " + b"a" * 4000, b"\r\nContent-Length: 2\r\n", b"\r\n", b"{}"):
            opened.sendall(piece)
            time.sleep(0.02)
        assert opened.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_head_that_does_not_end_is_a_408(port: int) -> None:
    with connected(port) as opened:
        opened.sendall(POST)
        with suppress(OSError):  # on a busy machine it may be closed already
            for _ in range(5):  # slowly, so that there is always some news
                time.sleep(0.1)
                opened.sendall(b"X-More: 1\r\n")
        assert refusal(opened) == (408, "request_timeout")


def test_a_body_that_stalls_is_a_408(port: int) -> None:
    with connected(port) as opened:
        opened.sendall(POST + b"Content-Length: 100\r\n\r\nhalf")
        assert refusal(opened) == (408, "request_timeout")
        assert opened.recv(100) == b""  # closed


def test_a_body_that_drips_is_a_408(port: int) -> None:
    with connected(port) as opened:
        opened.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        with suppress(OSError):
            for _ in range(8):
                opened.sendall(b"x" * 10)
                time.sleep(0.1)
        assert refusal(opened) == (408, "request_timeout")


def test_a_body_that_flows_is_read(port: int) -> None:
    """For longer than the timeout. One of three: a busy machine may hold a piece up."""
    for _ in range(3):
        with connected(port) as opened:
            opened.sendall(POST + b"Content-Length: %d\r\n\r\n" % (12 * MIN_BODY_BYTES))
            with suppress(OSError):
                for _ in range(12):
                    opened.sendall(b"x" * MIN_BODY_BYTES)
                    time.sleep(0.05)
            answer = opened.recv(1000)
        if answer.startswith(b"HTTP/1.1 200"):
            break
    assert answer.startswith(b"HTTP/1.1 200")


def test_an_answer_outlasts_the_timeouts(port: int) -> None:
    """It takes longer than both of them, also while the next request's head is incomplete."""
    with connected(port) as opened:
        opened.sendall(POST + b"Content-Length: 2\r\n\r\n{}" + POST)
        received = b""
        while not received.endswith(b"-bytes"):
            received += opened.recv(1000)
        assert b"     2-bytes" in received


def test_the_server_refuses_headers_before_it_looks_at_the_key(server: RunningServer) -> None:
    host, _, number = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(number))) as opened:
        opened.settimeout(30)
        opened.sendall(b"POST /check_integrity HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 70_000)
        assert refusal(opened) == (431, "headers_too_large")
