"""The engine's feed over HTTP: who may read it, what it says, and that it costs nothing when it is not read."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from quire.server.access import is_local
from tests.link.feed_mirror import FeedMirror
from tests.server.running import ADMIN_KEY, RunningServer

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@contextmanager
def listening(server: RunningServer) -> Iterator[FeedMirror]:
    """A mirror that takes every record until the end of the block."""
    mirror, is_over = FeedMirror(), threading.Event()
    mirror.history = {}
    mirror.size = 0

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/v1/engine/events", headers=ADMIN, timeout=30) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: "):
                    mirror.take(line[6:])
                    mirror.size += len(line)
                    mirror.history.setdefault(mirror.record["step"], []).append(mirror.counts)
                if is_over.is_set():
                    return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_until(lambda: mirror.num_records)
    try:
        yield mirror
    finally:
        is_over.set()
        server.pool()  # its record wakes the reader
        ask(server, max_tokens=2)
        reader.join(10)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def ask(server: RunningServer, content: str = "Hi", **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return server.post("/v1/chat/completions", json=body)


def test_the_map_is_true_at_twenty_moments_under_load(server: RunningServer):
    prompts = [f"Tell me about {what}." for what in ("whales", "trains", "bread", "clouds")]
    is_over = threading.Event()

    def ask_on(prompt: str, n: int) -> None:
        while not is_over.is_set():
            ask(server, prompt, max_tokens=60, n=n)

    with listening(server) as mirror, ThreadPoolExecutor(8) as pool:
        asking = [
            pool.submit(ask_on, prompt, n) for prompt, n in zip(prompts * 2, (1, 4, 1, 2) * 2, strict=True)
        ]
        try:
            num_shared = num_moments = 0
            deadline = time.monotonic() + 120
            while num_moments < 20 or not num_shared:
                assert time.monotonic() < deadline, "no block is shared"
                counted = server.pool()
                step, blocks = counted["step"], counted["blocks"]
                wait_until(lambda step=step, blocks=blocks: blocks in mirror.history.get(step, []))
                num_shared += blocks.get("shared", 0)
                num_moments += 1
        finally:
            is_over.set()
        for one in asking:
            one.result()
        wait_until(lambda: mirror.counters["finished"] >= 16)
        assert mirror.events["copied"] > 0
        before = mirror.events["hits"]
        ask(server, "A long question that is asked twice. " * 10, max_tokens=2)
        ask(server, "A long question that is asked twice. " * 10, max_tokens=2)
        wait_until(lambda: mirror.events["hits"] > before)


def test_a_feed_has_at_most_ten_records_and_fifty_kilobytes_a_second(server: RunningServer):
    with listening(server) as mirror:
        started, records, size = time.monotonic(), mirror.num_records, mirror.size
        ask(server, "Count to one hundred.", n=8, max_tokens=60, ignore_eos=True)
        seconds = time.monotonic() - started
        assert mirror.num_records - records <= 10.5 * seconds + 1  # one at once, then as they are due
        assert mirror.size - size < 50_000 * (seconds + 0.5)


def test_tokens_of_a_request_are_shown_to_operators(server: RunningServer):
    with listening(server) as mirror:
        messages = [{"role": "user", "content": "Which colour has the sky?"}]
        body = {"messages": messages, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            begun = answer.iter_lines()  # closing it would end the request
            next(begun)
            wait_until(lambda: any(s.get("phase") == 2 for s in list(mirror.sequences.values())))
            (shown, *_) = list(mirror.sequences.values())
            request_id = shown["id"]
            shown = server.get(f"/v1/engine/requests/{request_id}", headers=ADMIN).json()["sequences"][0]
            assert "Which colour has the sky?" in "".join(shown["tokens"])
            assert len(shown["blocks"]) == -(-shown["num_computed"] // 16)
        server.wait_idle()
    gone = server.get(f"/v1/engine/requests/{request_id}", headers=ADMIN)
    assert gone.status_code == 404
    assert "may have ended" in gone.json()["error"]["message"]


def test_the_engine_is_described(server: RunningServer):
    engine = server.get("/v1/engine", headers=ADMIN).json()
    assert engine["pool"]["num_blocks"] > 0
    assert engine["lora"]["enabled"] is False
    assert any(line.startswith("pool") for line in engine["report"])


@pytest.mark.parametrize("path", ["/v1/engine", "/v1/engine/events", "/v1/engine/requests/r"])
def test_a_feed_without_the_admin_key_is_refused(server: RunningServer, path: str):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = server.get(path, headers=headers)
        assert refused.status_code == 401
        assert "the admin key" in refused.json()["error"]["message"]


def scope(address: str, host: str, **headers: str) -> dict:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"client": (address, 1), "headers": [(b"host", host.encode()), *listed]}


@pytest.mark.parametrize(
    ("asked", "local"),
    [
        (scope("127.0.0.1", "localhost:8000"), True),
        (scope("::1", "[::1]:8000"), True),
        (scope("127.0.0.1", "127.0.0.1"), True),
        (scope("10.0.0.7", "localhost:8000"), False),
        (scope("127.0.0.1", "evil.example:8000"), False),
        (scope("127.0.0.1", "localhost:8000", x_forwarded_for="10.0.0.7"), False),
        (scope("127.0.0.1", "localhost:8000", via="1.1 proxy"), False),
        ({"client": None, "headers": []}, False),
    ],
)
def test_local_is_a_program_on_this_machine_without_a_proxy(asked: dict, local: bool):
    assert is_local(asked) is local


def test_without_an_admin_key_the_feed_is_for_this_machine(start_server):
    server = start_server("--admin-key", "", "--api-key", "mine", "--api-key", "yours", "--num-blocks", "64")
    mine = {"Authorization": "Bearer mine"}
    assert server.get("/v1/engine", headers=mine).json()["version"]
    assert server.get("/v1/engine").status_code == 401
    assert server.get("/v1/engine", headers={**mine, "X-Forwarded-For": "10.0.0.7"}).status_code == 403
    body = {"messages": [{"role": "user", "content": "Secret words"}], "max_tokens": 900, "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, headers=mine, timeout=60) as client,
        client.stream("GET", "/v1/engine/events") as feed,
        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()  # closing it would end the request
        next(lines)
        records = (json.loads(line[6:]) for line in feed.iter_lines() if line.startswith("data: "))
        request_id = next(record["new"][0]["id"] for record in records if "new" in record)
        path = f"/v1/engine/requests/{request_id}"
        assert "tokens" in server.get(path, headers=mine).json()["sequences"][0]
        yours = server.get(path, headers={"Authorization": "Bearer yours"}).json()["sequences"][0]
        assert "tokens" not in yours  # another key's request: its numbers, not its words
        assert yours["blocks"]
