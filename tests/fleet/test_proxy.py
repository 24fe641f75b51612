"""`quire route`: requests reach a server that answers, answers come back as they are, and faults cost little."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from unittest.mock import Mock, call

import pytest

from quire.cli.main import main
from quire.cli.route import CoalescingTransport
from quire.core.errors import ConfigError
from quire.fleet.proxy import RouterApp
from quire.fleet.servers import Servers, prefix_of_body
from quire.link.http_proxy import MAX_BODY_BYTES

USAGE = b'{"usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'


class Stub:
    """A server of one behaviour: a list of chunks, of which None cuts the connection."""

    def __init__(self, *chunks: bytes | None, status: str = "200 OK", kind: str = "application/json") -> None:
        self.chunks, self.status, self.kind = chunks, status, kind
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.gone = asyncio.Event()

    async def __aenter__(self) -> "Stub":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                if head.startswith(b"GET /health"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                self.heads.append(head)
                self.bodies.append(body)
                if self.chunks[0] is None:
                    return
                if self.chunks[0] == b"silence":  # not even a head
                    await reader.read()
                    self.gone.set()
                    return
                writer.write(f"HTTP/1.1 {self.status}\r\ncontent-type: {self.kind}\r\n".encode())
                writer.write(b"x-own: kept\r\ntransfer-encoding: chunked\r\n\r\n")
                for chunk in self.chunks:
                    if chunk is None:
                        return
                    if chunk == b"wait":
                        await reader.read()  # until the other side closes
                        self.gone.set()
                        return
                    writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()


class Asked:
    """One request to the application: status, headers and pieces as they were sent."""

    def __init__(
        self, app: RouterApp, body: bytes, method: str = "POST", path: str = "/v1/completions"
    ) -> None:
        self.sent: list[dict] = []
        self.leave = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"a=1",
            "headers": [
                (b"authorization", b"Bearer k"),
                (b"host", b"router"),
                (b"content-type", b"application/json"),
            ],
            "client": ("10.0.0.7", 1),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            self.sent.append(message)

        self.done = asyncio.create_task(app(scope, receive, send))

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def pieces(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:] if message["body"]]


def with_stubs(
    *stubs: Stub, use: Callable[[RouterApp, Servers], Awaitable[None]], policy="prefix-work"
) -> None:
    async def run() -> None:
        for stub in stubs:
            await stub.__aenter__()
        servers = Servers([stub.url for stub in stubs], policy)
        await servers.start()
        try:
            await asyncio.wait_for(use(RouterApp(servers), servers), 30)
        finally:
            await servers.close()
            for stub in stubs:
                await stub.__aexit__()

    asyncio.run(run())


def prompt(text: str) -> bytes:
    return json.dumps({"model": "m", "prompt": text, "cache_salt": None}).encode()


def test_a_stream_is_passed_through_piece_by_piece_with_its_headers():
    stub = Stub(b"data: 1\n\n", b"data: 2\n\n", kind="text/event-stream")

    async def use(app: RouterApp, servers: Servers) -> None:
        asked = Asked(app, prompt("Once"))
        await asked.done
        assert asked.status == 200
        assert asked.headers[b"x-own"] == b"kept"
        assert asked.headers[b"content-type"] == b"text/event-stream"
        assert asked.pieces == [b"data: 1\n\n", b"data: 2\n\n"]
        head = stub.heads[0].lower()
        assert head.startswith(b"post /v1/completions?a=1 http/1.1\r\n")
        assert b"authorization: bearer k" in head
        assert b"x-forwarded-for: 10.0.0.7" in head
        assert b"host: router" not in head
        assert stub.bodies == [prompt("Once")]
        assert (servers.router.loads[0].stats.num_open, servers.router.loads[0].stats.pending_tokens) == (
            0,
            0,
        )

    with_stubs(stub, use=use)


def test_what_is_written_in_one_turn_of_the_loop_is_sent_as_one_piece():
    async def run() -> None:
        inner = Mock(**{"is_closing.return_value": False})
        transport = CoalescingTransport(inner, asyncio.get_running_loop())
        transport.write(b"head ")
        transport.write(b"first")
        await asyncio.sleep(0)
        transport.write(b"last")
        transport.close()
        await asyncio.sleep(0)
        called = [made for made in inner.mock_calls if made != call.is_closing()]
        assert called == [call.write(b"head first"), call.write(b"last"), call.close()]
        assert transport.get_extra_info is inner.get_extra_info
        transport.write(b"more")
        inner.is_closing.return_value = True  # the client has reset the connection
        await asyncio.sleep(0)
        assert inner.write.call_count == 2

    asyncio.run(run())


def test_prefixes_return_to_their_server_and_usage_corrects_the_shadow():
    stubs = Stub(USAGE % (1000, 0)), Stub(USAGE % (1000, 0))

    async def use(app: RouterApp, servers: Servers) -> None:
        texts = ["a lot of text to begin with " * 40, "another beginning of a prompt " * 40]
        for turn in range(3):
            for text in texts:
                await Asked(app, prompt(f"{text} {turn}")).done
        assert [len(stub.bodies) for stub in stubs] == [3, 3]
        assert all(len({body[30:60] for body in stub.bodies}) == 1 for stub in stubs)
        # each answer said that nothing was cached: what was used before is forgotten, what was just computed is not
        assert all(load.shadow.num_tokens for load in servers.router.loads)

    with_stubs(*stubs, use=use)


def test_a_request_is_tried_elsewhere_until_an_answer_has_begun():
    dead, full, good = Stub(None), Stub(b"{}", status="503 Service Unavailable"), Stub(b"fine")

    async def use(app: RouterApp, servers: Servers) -> None:
        for _ in range(3):
            asked = Asked(app, prompt("x"))
            await asked.done
            assert (asked.status, asked.pieces) == (200, [b"fine"])
        assert len(good.bodies) == 3
        assert (len(dead.bodies), len(full.bodies)) >= (1, 1)
        assert not servers.servers[0].is_up or len(dead.bodies) > 1

    with_stubs(dead, full, good, use=use, policy="round-robin")


def test_a_prefill_server_computes_the_prompt_first_and_may_fail():
    async def run() -> None:
        async with Stub(b"{}") as prefill, Stub(None) as broken, Stub(USAGE % (300, 280)) as decode:
            servers = Servers([decode.url], prefill=[prefill.url])
            await servers.start()
            body = json.dumps(
                {"prompt": "a long one " * 100, "max_tokens": 9, "n": 2, "stream": True}
            ).encode()
            try:
                for _ in range(2):  # then the second server has the prompt
                    asked = Asked(RouterApp(servers), body)
                    await asked.done
                    assert asked.status == 200
            finally:
                await servers.close()
            assert [json.loads(each) for each in prefill.bodies] == [
                {"prompt": "a long one " * 100, "max_tokens": 1}
            ]
            assert decode.bodies == [body, body]
            assert servers.described()[0]["handed_over_tokens"] == 280
            servers = Servers([decode.url], prefill=[broken.url])
            await servers.start()
            try:
                asked = Asked(RouterApp(servers), body)
                await asked.done
            finally:
                await servers.close()
            assert (asked.status, len(decode.bodies)) == (200, 3)
            assert broken.bodies  # asked, on a kept connection twice

    asyncio.run(run())


def test_a_prefill_server_answers_what_no_decode_server_takes():
    async def run() -> None:
        for decode in (Stub(b"{}", status="503 Service Unavailable"), Stub(None)):
            async with Stub(b'{"own":1}') as prefill, decode:
                servers = Servers([decode.url], prefill=[prefill.url])
                await servers.start()
                try:
                    asked = Asked(RouterApp(servers), prompt("short"))
                    await asked.done
                finally:
                    await servers.close()
                assert (asked.status, asked.pieces) == (200, [b'{"own":1}'])
                assert decode.bodies  # asked first

    asyncio.run(run())


def test_a_refusal_that_does_not_end_holds_no_request_up():
    full, good = Stub(b"wait", status="429 Too Many Requests"), Stub(b"fine")

    async def use(app: RouterApp, servers: Servers) -> None:
        for _ in range(2):
            asked = Asked(app, prompt("x"))
            await asked.done
            assert (asked.status, asked.pieces) == (200, [b"fine"])
        await full.gone.wait()

    with_stubs(full, good, use=use, policy="round-robin")


def test_a_server_that_answers_only_its_health_loses_its_requests_to_another() -> None:
    silent, good = Stub(b"silence"), Stub(b"a", b"b")

    async def use(_app: RouterApp, servers: Servers) -> None:
        app = RouterApp(servers, timeout=0.3)
        asked = Asked(app, prompt("x"))
        await asked.done
        assert (asked.status, b"".join(asked.pieces)) == (200, b"ab")
        await silent.gone.wait()  # nothing is left open there
        assert servers.described()[0]["failures"] == 1
        servers.servers[1].failed("stopped")
        await servers.servers[0].look()
        refused = Asked(app, prompt("x"))
        await refused.done
        assert refused.status == 503
        assert b"no answer to a request within 0.3 s" in refused.pieces[0]

    with_stubs(silent, good, use=use, policy="round-robin")


def test_an_answer_that_has_begun_in_time_may_take_longer() -> None:
    async def run() -> None:
        async with Stub(b"first", b"wait", kind="text/event-stream") as slow:
            servers = Servers([slow.url])
            await servers.start()
            try:
                asked = Asked(RouterApp(servers, timeout=0.2), prompt("x"))
                await asyncio.sleep(0.6)
                assert not asked.done.done()
                assert asked.pieces == [b"first"]
                asked.leave.set()
                await asked.done
            finally:
                await servers.close()

    asyncio.run(run())


def test_a_length_beside_chunks_is_not_passed_on():
    async def use(app: RouterApp, servers: Servers) -> None:
        asked = Asked(app, prompt("x"))
        await asked.done
        assert (b"content-length" in asked.headers, asked.pieces) == (False, [b"hello"])

    with_stubs(Stub(b"hello", kind="text/plain\r\ncontent-length: 3"), use=use)


def test_the_last_servers_refusal_is_the_answer():
    async def use(app: RouterApp, servers: Servers) -> None:
        asked = Asked(app, prompt("x"))
        await asked.done
        assert (asked.status, asked.pieces) == (429, [b"full"])

    stubs = [Stub(b"full", status="429 Too Many Requests") for _ in range(2)]
    with_stubs(*stubs, use=use)


def test_a_stream_that_breaks_ends_with_the_reason():
    stub = Stub(b"data: 1\n\n", None, kind="text/event-stream")

    async def use(app: RouterApp, servers: Servers) -> None:
        asked = Asked(app, prompt("x"))
        await asked.done
        error = json.loads(asked.pieces[-1].removeprefix(b"data: "))["error"]
        assert stub.url in error["message"]
        assert "closed before the response was complete" in error["message"]
        assert not servers.servers[0].is_up

    with_stubs(stub, use=use)


def test_a_client_that_leaves_ends_the_request_at_the_server():
    stub = Stub(b"data: 1\n\n", b"wait", kind="text/event-stream")

    async def use(app: RouterApp, servers: Servers) -> None:
        asked = Asked(app, prompt("x"))
        while not asked.sent:
            await asyncio.sleep(0.01)
        asked.leave.set()
        await asked.done
        await asyncio.wait_for(stub.gone.wait(), 20)
        assert servers.router.loads[0].stats.num_open == 0

        ended = Asked(app, prompt("x"))
        while not ended.sent:
            await asyncio.sleep(0.01)
        ended.done.cancel()  # by the HTTP server: no client left
        with pytest.raises(asyncio.CancelledError):
            await ended.done
        assert servers.router.loads[0].stats.num_open == 0

    with_stubs(stub, use=use)


def test_without_a_server_requests_get_503_with_a_time_and_the_reasons():
    async def run() -> None:
        with socket.socket() as silent:  # holds the port, and does not listen
            silent.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            servers = Servers([url])
            app = RouterApp(servers)
            await servers.start()
            try:
                asked, health = Asked(app, prompt("x")), Asked(app, b"", "GET", "/health")
                await asyncio.gather(asked.done, health.done)
            finally:
                await servers.close()
        assert asked.status == health.status == 503
        assert int(asked.headers[b"retry-after"]) > 0
        assert (
            f"none of 1 servers takes the request ({url}: Connection refused)"
            in json.loads(asked.pieces[0])["error"]["message"]
        )

    asyncio.run(run())


def test_a_server_that_returns_is_used_again_and_its_cache_is_forgotten(monkeypatch):
    monkeypatch.setattr("quire.fleet.servers.HEALTH_SECONDS", 0.05)
    stub = Stub(b"fine")

    async def use(app: RouterApp, servers: Servers) -> None:
        servers.router.sent("x", prefix_of_body(prompt("long " * 400)), 0)
        servers.servers[0].failed("it was restarted")
        deadline = time.monotonic() + 10
        while not servers.servers[0].is_up and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert servers.router.loads[0].shadow.num_tokens == 0
        asked = Asked(app, prompt("x"))
        await asked.done
        assert asked.pieces == [b"fine"]

    with_stubs(stub, use=use)


def test_own_endpoints_and_bodies_that_are_too_long():
    async def use(app: RouterApp, servers: Servers) -> None:
        listed, metrics = Asked(app, b"", "GET", "/servers"), Asked(app, b"", "GET", "/metrics")
        long = Asked(app, b"x" * (MAX_BODY_BYTES + 1))
        await asyncio.gather(listed.done, metrics.done, long.done)
        assert json.loads(listed.pieces[0])["servers"][0]["status"] == "ready"
        assert b'quire_server_up{server="http://' in metrics.pieces[0]
        assert long.status == 413

    with_stubs(Stub(b"fine"), use=use)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"messages": 5}', b'{"model": 5}', b"\xff", b'{"prompt": "\xff"}']
)
def test_any_body_has_a_prefix(body: bytes):
    assert prefix_of_body(body).num_tokens >= 0


def test_bodies_of_one_conversation_share_hashes():
    first = {"messages": [{"role": "system", "content": "be brief " * 100}, {"role": "user", "content": "a"}]}
    second = {
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    }
    hashes = [prefix_of_body(json.dumps(body).encode()).hashes for body in (first, second)]
    assert hashes[0] == hashes[1][: len(hashes[0])]
    assert len(hashes[0]) >= 3


def test_bad_addresses_and_ports_are_one_line(capsys):
    with pytest.raises(ConfigError, match="is named twice"):
        Servers(["http://a:1", "a:1/v1"][:1] * 2)
    assert main(["route", "http://a:1", "--policy", "best"]) == 2
    assert "the routing policy 'best' is not known" in capsys.readouterr().err
    assert main(["route", "http://a:1", "--request-timeout", "0"]) == 2
    assert "--request-timeout is 0: give seconds above 0" in capsys.readouterr().err
    assert main(["route", "ftp://a:1"]) == 2
    assert "'ftp://a:1' is no address" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["route", "http://a:1", "--port", str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "Address already in use" in error
    assert "choose another --host or --port" in error
