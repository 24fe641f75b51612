"""Several HTTP processes with one engine: what one of them does, all of them know; what ends is replaced or drained."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.server import processes
from quire.server.settings import ServerSettings
from tests.server.running import ADMIN_KEY, MODEL, PATIENCE, RunningServer
from tests.server.test_adapters import write_adapter

OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}
TRIES = 16  # new connections; that all of them reach one of two processes has a chance of 1 in 32,768


def http_pids(server: RunningServer) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"http_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_processes_serve_as_one(start_server, tmp_path) -> None:
    write_adapter(tmp_path / "folder" / "spare", 1)
    server = start_server("--api-server-count", "2", "--lora-dir", str(tmp_path / "folder"))
    assert len(http_pids(server)) == 2
    _counts_are_those_of_both(server)
    _adapters_are_known_to_both(server)
    _the_feed_reaches_listeners_of_both(server)
    _a_process_that_dies_is_replaced(server)
    _an_engine_that_dies_is_replaced_for_both(server)
    _what_one_process_would_keep_is_refused(server)
    _a_signal_lets_both_finish(server)


def _the_feed_reaches_listeners_of_both(server: RunningServer) -> None:
    with contextlib.ExitStack() as opened:
        feeds = []
        for _ in range(8):
            stream = httpx.stream("GET", f"{server.url}/v1/engine/events", headers=OPERATOR, timeout=PATIENCE)
            feeds.append(opened.enter_context(stream).iter_lines())
        assert all("pool" in json.loads(next(lines)[6:]) for lines in feeds)
        body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            begun = answer.iter_lines()  # closing it would end the request
            next(begun)
            for lines in feeds:
                assert any(line.startswith("data: ") and "new" in json.loads(line[6:]) for line in lines)
    server.wait_idle()


def _counts_are_those_of_both(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    for _ in range(TRIES):
        assert server.post("/v1/completions", json=body).status_code == 200
    for _ in range(4):  # whichever process is asked
        server.wait_metric(4 * TRIES, "generation_tokens_total")
        server.wait_metric(TRIES, "http_requests_total", path="/v1/completions")
        assert server.metric("engine_up") == 1
    server.wait_idle()


def _adapters_are_known_to_both(server: RunningServer) -> None:
    body = {"lora_name": "loaded", "lora_path": "spare"}
    assert server.post("/v1/load_lora_adapter", json=body, headers=OPERATOR).status_code == 200
    for _ in range(TRIES):
        listed = [model["id"] for model in server.get("/v1/models").json()["data"]]
        assert "loaded" in listed
    answer = {"model": "loaded", "prompt": "Once", "max_tokens": 2}
    assert server.post("/v1/completions", json=answer).json()["model"] == "loaded"


def _stream(
    server: RunningServer, num_tokens: int, lines: list[str], is_over: threading.Event | None = None
) -> None:
    """Reads to the end, or 30 lines more than there were when `is_over` was set."""
    body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    num_more = 30
    with httpx.Client(base_url=server.url, timeout=60) as client:
        try:
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in filter(None, response.iter_lines()):
                    lines.append(line)
                    num_more -= is_over is not None and is_over.is_set()
                    if num_more == 0:
                        lines.append("left")
                        return
        except httpx.TransportError:
            lines.append("broken")


def _a_process_that_dies_is_replaced(server: RunningServer) -> None:
    """Its streams break, those of the other go on, its requests leave the engine, and the next connection is served."""
    before, streams, is_replaced = http_pids(server), [[] for _ in range(TRIES)], threading.Event()
    threads = [threading.Thread(target=_stream, args=(server, 4000, lines, is_replaced)) for lines in streams]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(streams))
    os.kill(before[0], signal.SIGKILL)
    server.wait_for_line("HTTP process", "starting it again")
    is_replaced.set()
    for thread in threads:
        thread.join()
    assert {lines[-1] for lines in streams} == {"broken", "left"}
    wait_for(lambda: len(http_pids(server)) == 2)
    for _ in range(TRIES):
        server.wait_status("/ready", 200)
    server.wait_idle()
    assert server.metric("generation_tokens_total") >= 4 * TRIES  # counters do not fall
    assert "loaded" in [model["id"] for model in server.get("/v1/models").json()["data"]]


def _an_engine_that_dies_is_replaced_for_both(server: RunningServer) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_status("/ready", 503)
    server.wait_for_line("the engine is ready again")
    for _ in range(TRIES):
        server.wait_status("/ready", 200)
    for model in (MODEL, "loaded"):
        body = {"model": model, "prompt": "Once", "max_tokens": 2}
        assert server.post("/v1/completions", json=body).status_code == 200


def _what_one_process_would_keep_is_refused(server: RunningServer) -> None:
    assert "--api-server-count" in server.error("/v1/embeddings", 403, json={"input": "a"})["message"]
    found = server.post("/v1/responses", json={"input": "a", "max_output_tokens": 16})
    assert found.status_code == 200
    again = {"input": "b", "previous_response_id": found.json()["id"], "max_output_tokens": 16}
    assert server.post("/v1/responses", json=again).status_code in (400, 404)


def _a_signal_lets_both_finish(server: RunningServer) -> None:
    streams: list[list[str]] = [[] for _ in range(TRIES)]
    threads = [threading.Thread(target=_stream, args=(server, 60, lines)) for lines in streams]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(streams))  # every answer has begun: connections that come later are refused
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.wait_exit() == 0
    for lines in streams:
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert any("the pool is whole, 0 blocks in use" in line for line in server.lines)


def test_a_server_without_its_first_process_ends(start_server) -> None:
    server = start_server("--api-server-count", "2", "--device", "simulated")
    pids = http_pids(server)
    server.process.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def test_a_process_that_always_ends_ends_the_server(monkeypatch) -> None:
    """With one clear line instead of an endless series of starts."""
    monkeypatch.setattr(processes, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(processes, "sys", SimpleNamespace(executable="/bin/false"))

    async def serve() -> None:
        with socket.socket() as listener:
            settings = ServerSettings(api_server_count=2, max_stored_responses=0, embeddings=False)
            kept = processes.HttpProcesses(settings, EngineConfig(), [listener], None)
            monkeypatch.setattr(kept._relay, "start", partial(asyncio.sleep, 60))
            await kept.serve()

    with pytest.raises(QuireError, match=r"HTTP process 0 ended 5 times in a row \(code 1\)"):
        asyncio.run(serve())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_concurrent_per_key": 2, "api_keys": ("k",)}, "max_concurrent_per_key"),
        ({"max_requests_per_minute_per_key": 2, "api_keys": ("k",)}, "max_requests_per_minute_per_key"),
        ({"max_stored_responses": 10}, "max_stored_responses=10"),
        ({"embeddings": True}, "embeddings"),
        ({"api_server_count": 0}, "1 to 64"),
        ({"api_server_count": 65}, "1 to 64"),
    ],
)
def test_what_needs_one_process_is_refused_by_name(settings, words) -> None:
    alone = {"api_server_count": 2, "max_stored_responses": 0, "embeddings": False}
    ServerSettings(**alone)
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**{**alone, **settings})


def test_a_port_that_several_processes_share_is_taken(start_server) -> None:
    first = start_server("--api-server-count", "2", "--device", "simulated")
    port = first.url.rpartition(":")[2]
    second = RunningServer("--api-server-count", "2", "--port", port)
    assert second.wait_exit() != 0
    assert "choose another --host or --port" in second.lines[-1]
