"""Adapters that take long to load: everyone else goes on, and whoever waits for one is told how it ended."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.adapters.making import HeldAdapter
from tests.server.running import ADMIN_KEY, PATIENCE, RunningServer
from tests.server.test_adapters import write_adapter

OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}
NUM_TOKENS = 20  # that must come while a load waits


@pytest.fixture
def folder(tmp_path) -> Path:
    for seed, name in enumerate(("spare", "slow", "slower", "slowest"), start=1):
        write_adapter(tmp_path / name, seed)
    return tmp_path


@pytest.fixture
def operators() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def hold(folder, operators) -> Iterator[Callable[[str], HeldAdapter]]:
    held: list[HeldAdapter] = []

    def make(name: str) -> HeldAdapter:
        held.append(HeldAdapter(folder / name))
        return held[-1]

    yield make
    for one in held:
        one.drop()


def test_a_load_that_takes_long_holds_nobody_up_and_is_always_answered(start_server, folder, operators, hold):
    server = start_server("--lora-dir", str(folder), "--shutdown-timeout", "5")

    def load(path: str, name: str = "new") -> Future[httpx.Response]:
        body = {"lora_name": name, "lora_path": path}
        return operators.submit(server.post, "/v1/load_lora_adapter", json=body, headers=OPERATOR)

    _holds_nobody_up(server, load, hold("slow"))
    _is_given_up(server, load, hold("slower"))
    slowest = hold("slowest")
    _outlives_no_engine(server, load, slowest)
    _outlives_no_server(server, load, slowest)


Load = Callable[..., Future[httpx.Response]]


def _holds_nobody_up(server: RunningServer, load: Load, held: HeldAdapter) -> None:
    with _streaming(server) as count:
        first = load("slow")
        held.wait_for_reader()
        second = load("spare")
        before = count()
        _until(lambda: count() >= before + NUM_TOKENS)
        assert server.chat_error(404, model="new")["code"] == "model_not_found"
        assert server.pool()["status"] == "ok"
        assert not first.done()
        assert not second.done()  # asked for later, and done later
        held.let_go()
        for one in (first, second):
            assert one.result(PATIENCE).status_code == 200, one.result().text
    assert _answer(server, "new") == _answer(server, "spare") != _answer(server, "slow")


def _is_given_up(server: RunningServer, load: Load, held: HeldAdapter) -> None:
    """With what its name meant before, which is unloaded too."""
    assert load("spare", "passing").result(PATIENCE).status_code == 200
    waiting = load("slower", "passing")
    held.wait_for_reader()
    body = {"lora_name": "passing"}
    assert server.post("/v1/unload_lora_adapter", json=body, headers=OPERATOR).status_code == 200
    assert waiting.result(PATIENCE).status_code == 400
    assert "unloaded while" in waiting.result().json()["error"]["message"]
    assert server.error("/v1/unload_lora_adapter", 400, json=body, headers=OPERATOR)["param"] == "lora_name"
    assert server.chat_error(404, model="passing")
    held.let_go()
    assert load("spare", "passing").result(PATIENCE).status_code == 200
    server.wait_idle()


def _outlives_no_engine(server: RunningServer, load: Load, held: HeldAdapter) -> None:
    waiting = load("slowest", "never")
    held.wait_for_reader()
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert waiting.result(PATIENCE).status_code == 503
    assert waiting.result().json()["error"]["code"] == "engine_down"
    held.drop()
    server.wait_status("/ready", 200)
    assert _answer(server, "new") == _answer(server, "spare")  # a new engine knows what the old one did
    assert server.chat_error(404, model="never")


def _outlives_no_server(server: RunningServer, load: Load, held: HeldAdapter) -> None:
    waiting = load("slowest", "never")
    held.wait_for_reader()
    server.process.send_signal(signal.SIGTERM)
    server.wait_status("/ready", 503)
    assert load("spare").result(PATIENCE).json()["error"]["code"] == "shutting_down"
    assert waiting.result(PATIENCE).status_code == 503
    assert waiting.result().json()["error"]["code"] == "shutting_down"
    held.drop()
    assert server.wait_exit() == 0
    server.wait_for_line("the pool is whole, 0 blocks in use")


def _answer(server: RunningServer, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@contextmanager
def _streaming(server: RunningServer) -> Iterator[Callable[[], int]]:
    """One answer that does not end; how many of its tokens came."""
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    came: list[str] = []
    over = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                came.append(line)
                if over.is_set():
                    return

    reading = threading.Thread(target=read)
    reading.start()
    try:
        _until(lambda: len(came) > 0)
        yield lambda: sum(line.startswith("data: {") for line in list(came))
    finally:
        over.set()
        reading.join(PATIENCE)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)
