"""Several engines behind one HTTP process: prefixes find their replica, and a replica's death costs little."""

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.fleet import places
from quire.fleet.places import replica_configs
from quire.server.settings import ServerSettings
from tests.server.running import ADMIN_KEY, PATIENCE, RunningServer

OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    return server.get("/replicas").json()["replicas"]


def wait_until(condition, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Load:
    """Requests in threads of their own: their status, or the events that came."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.whole: list[httpx.Response] = []
        self.streams: list[list[str]] = []
        self.is_over = threading.Event()  # streams end when they have heard something after it
        self.threads: list[threading.Thread] = []

    def ask(self, number: int, max_tokens: int, stream: bool) -> None:
        body = {"prompt": f"Number {number}:", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}

        def run() -> None:
            if not stream:
                self.whole.append(self.server.post("/v1/completions", json=body))
                return
            events: list[str] = []
            self.streams.append(events)
            with (
                httpx.Client(timeout=60) as client,
                client.stream(
                    "POST", f"{self.server.url}/v1/completions", json={**body, "stream": True}
                ) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(line[6:])
                        if self.is_over.is_set() and '"error"' not in line:
                            return

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_two_replicas_serve_as_one_and_one_may_die(start_server) -> None:
    server = start_server("-dp", "2")
    assert len({one["pid"] for one in replicas(server)}) == 2
    assert "1 threads" in server.wait_for_line("model", "threads") or (os.cpu_count() or 1) > 3
    _prefixes_return_to_their_replica(server)
    _metrics_have_a_label_for_each(server)
    _a_killed_replica_costs_only_what_it_streamed(server)
    _drained_and_restarted_in_turn(server)
    _with_all_dead_requests_are_refused_with_a_time(server)


def _prefixes_return_to_their_replica(server: RunningServer) -> None:
    cached = []
    for turn in range(3):
        for group in range(4):
            prompt = f"Story {group}: " + f"the fox of house {group} ran on. " * 20 + f"Turn {turn}."
            answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()
            if turn:
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert min(cached) >= 128
    assert {one["requests_routed"] for one in replicas(server)} == {6}  # groups are divided evenly
    assert all(one["requests_open"] == one["pending_tokens"] == 0 for one in replicas(server))


def _metrics_have_a_label_for_each(server: RunningServer) -> None:
    for number in ("0", "1"):
        assert server.metric("engine_up", replica=number) == 1
        assert server.metric("replica_requests_total", replica=number) == 6
    server.wait_metric(12, "http_requests_total", path="/v1/completions")
    assert server.pool()["blocks_used"] == 0


def _a_killed_replica_costs_only_what_it_streamed(server: RunningServer) -> None:
    load, before = Load(server), sum(one["requests_routed"] for one in replicas(server))
    for number in range(6, 12):
        load.ask(number, 4000, stream=True)
    wait_until(lambda: len(load.streams) == 6 and all(load.streams))
    for number in range(6):
        load.ask(number, 150, stream=False)
    wait_until(lambda: sum(one["requests_routed"] for one in replicas(server)) == before + 12)
    killed = replicas(server)[0]
    os.kill(killed["pid"], signal.SIGKILL)
    wait_until(lambda: any("replica 0" in line and "SIGKILL" in line for line in server.lines), 10)
    assert "1 of 2 replicas serve" in server.get("/health").json()["status"]
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    wait_until(lambda: any('"error"' in event for events in load.streams for event in events))
    load.is_over.set()
    load.join()
    assert [answer.status_code for answer in load.whole] == [200] * 6  # asked again, elsewhere
    texts = {answer.json()["choices"][0]["text"] for answer in load.whole}
    assert all(answer.json()["usage"]["completion_tokens"] == 150 for answer in load.whole)
    assert len(texts) == 6
    failed = [events for events in load.streams if any('"error"' in event for event in events)]
    assert len(load.streams) == 6
    assert 1 <= len(failed) <= killed["requests_open"]
    for events in failed:
        error = next(json.loads(event)["error"] for event in events if '"error"' in event)
        assert "replica 0" in error["message"]
        assert "SIGKILL" in error["message"]
    wait_until(lambda: replicas(server)[0]["pid"] not in (None, killed["pid"]))
    before = replicas(server)[0]["requests_routed"]
    for number in range(4):  # a cold replica gets requests at once
        assert (
            server.post("/v1/completions", json={"prompt": f"{number}", "max_tokens": 1}).status_code == 200
        )
    assert replicas(server)[0]["requests_routed"] > before
    server.wait_idle()


def _drained_and_restarted_in_turn(server: RunningServer) -> None:
    assert server.error("/drain_replica", 401, json={"replica": 0})
    assert "0 to 1" in server.error("/drain_replica", 400, json={"replica": 2}, headers=OPERATOR)["message"]
    assert server.post("/drain_replica", json={"replica": 1}, headers=OPERATOR).status_code == 200
    before = [one["requests_routed"] for one in replicas(server)]
    for number in range(3):
        server.post("/v1/completions", json={"prompt": f"{number}", "max_tokens": 1})
    assert [one["requests_routed"] - count for one, count in zip(replicas(server), before, strict=True)] == [
        3,
        0,
    ]
    assert replicas(server)[1]["status"] == "draining"
    server.post("/drain_replica", json={"replica": 1, "drain": False}, headers=OPERATOR)
    load, pids = Load(server), [one["pid"] for one in replicas(server)]
    for number in range(4):
        load.ask(number, 40, stream=True)
    server.process.send_signal(signal.SIGHUP)
    load.join()
    wait_until(lambda: not {one["pid"] for one in replicas(server)} & {*pids, None}, 60)
    assert all(events[-1] == "[DONE]" and '"error"' not in events[-2] for events in load.streams)
    assert [one["restarts"] for one in replicas(server)] == [2, 1]


def _with_all_dead_requests_are_refused_with_a_time(server: RunningServer) -> None:
    for one in replicas(server):
        os.kill(one["pid"], signal.SIGKILL)
    server.wait_status("/ready", 503)
    refused = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert "none of 2 replicas serves" in refused.json()["error"]["message"]
    server.wait_status("/ready", 200)
    server.wait_idle()


def test_replicas_divide_gpus_and_cores(monkeypatch) -> None:
    monkeypatch.setattr(places, "default_num_threads", lambda: 9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [one.runner.num_threads for one in replica_configs(EngineConfig(), 4)] == [2] * 4
    assert [one.model.seed for one in replica_configs(EngineConfig(), 2)] == [0, 1]
    asked = EngineConfig.of(num_threads=3, load_format="dummy")
    assert [(one.runner.num_threads, one.model.seed) for one in replica_configs(asked, 2)] == [(3, 0)] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [one.runner.device for one in replica_configs(EngineConfig(), 2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"puts 2 replicas on one of 2 GPUs.*lower that to 0.47"):
        replica_configs(EngineConfig(), 4)
    small = EngineConfig.of(gpu_memory_utilization=0.45)
    assert [one.runner.device for one in replica_configs(small, 3)] == ["cuda:0", "cuda:1", "cuda:0"]
    for count in (0, 65):
        with pytest.raises(ConfigError, match=f"data_parallel_size={count} is outside 1 to 64"):
            replica_configs(EngineConfig(), count)


def test_several_http_processes_and_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2 needs one HTTP process"):
        ServerSettings(api_server_count=2, data_parallel_size=2, embeddings=False, max_stored_responses=0)
