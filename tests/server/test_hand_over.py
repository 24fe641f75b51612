"""Prompts computed by one replica and decoded by another: the tokens of one engine, whatever happens to either."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.server.running import PATIENCE, RunningRouter, RunningServer


def ask(server: RunningServer, number: int) -> dict[str, Any]:
    prompt = f"Tale {number}: " + "the fox of the old house ran on and on over the hill. " * (8 + number % 5)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answers: Sequence[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in answers]


def asked_together(server: RunningServer, numbers: Sequence[int]) -> tuple[list[threading.Thread], dict]:
    answers: dict[int, dict[str, Any]] = {}

    def run(number: int) -> None:
        answers[number] = ask(server, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    return threads, answers


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    return server.get("/replicas").json()["replicas"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * PATIENCE  # an engine may have to start first
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_whole(server: RunningServer) -> None:
    wait_until(lambda: all(one["status"] == "ready" for one in replicas(server)))


def handed_over(answers: Sequence[dict[str, Any]]) -> int:
    """The tokens that were not computed again: all but the last block's, or fewer where the disk took long."""
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    whole = [(answer["usage"]["prompt_tokens"] - 1) // 16 * 16 for answer in answers]
    assert all(some <= most for some, most in zip(found, whole, strict=True))
    assert any(some == most for some, most in zip(found, whole, strict=True))
    return sum(found)


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_prompt_is_computed_here_and_decoded_there_and_faults_change_no_token(
    server: RunningServer, start_server, tmp_path: Path, kills: int
) -> None:
    folder = ("--kv-offload-gb", "0.5", "--kv-offload-dir", str(tmp_path))
    pair = start_server("-dp", "2", "--roles", "prefill,decode", *folder)
    _prompts_are_handed_over(server, pair)
    _corrupt_cut_and_missing_files_are_computed(server, pair, tmp_path)
    _either_side_may_be_killed_at_any_moment(server, pair, kills)
    wait_whole(pair)
    pair.wait_idle()
    # a new process removes what a killed one left
    wait_until(lambda: not list(tmp_path.glob("*/.writing-*")))


def _prompts_are_handed_over(server: RunningServer, pair: RunningServer) -> None:
    answers = [ask(pair, number) for number in range(3)]
    assert tokens(answers) == tokens([ask(server, number) for number in range(3)])
    handed = handed_over(answers)
    prefill, decode = replicas(pair)
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert prefill["requests_routed"] == decode["requests_routed"] == 3
    assert decode["handed_over_tokens"] == handed
    assert pair.metric("replica_handed_over_tokens_total", replica="1") == handed
    ask(pair, 0)  # which the decode replica has: no second request
    assert replicas(pair)[0]["requests_routed"] == 3


def _corrupt_cut_and_missing_files_are_computed(
    server: RunningServer, pair: RunningServer, folder: Path
) -> None:
    numbers = range(10, 16)
    before = set(folder.glob("kv-*/??/*"))
    done = threading.Event()

    def damage() -> None:
        """Every new file, as soon as it appears: cut, changed or removed."""
        draw, seen = random.Random(0), set(before)
        while not done.is_set():
            for file in set(folder.glob("kv-*/??/*")) - seen:
                seen.add(file)
                kind = draw.randrange(3)
                try:
                    if kind == 0:
                        file.unlink()
                    elif kind == 1:
                        os.truncate(file, draw.randrange(file.stat().st_size))
                    else:
                        with open(file, "r+b") as opened:
                            opened.seek(draw.randrange(100, file.stat().st_size))
                            opened.write(b"\x5a")
                except FileNotFoundError:
                    pass

    thread = threading.Thread(target=damage)
    thread.start()
    try:
        answers = [ask(pair, number) for number in numbers]
    finally:
        done.set()
        thread.join()
    assert tokens(answers) == tokens([ask(server, number) for number in numbers])


def _either_side_may_be_killed_at_any_moment(server: RunningServer, pair: RunningServer, kills: int) -> None:
    draw = random.Random(1)
    for attempt in range(kills):
        wait_whole(pair)
        numbers = range(20 + 4 * attempt, 24 + 4 * attempt)
        threads, answers = asked_together(pair, numbers)
        time.sleep(draw.random() * 0.4)
        os.kill(replicas(pair)[attempt % 2]["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join(2 * PATIENCE)
        expected = [ask(server, number) for number in numbers]
        assert tokens([answers[number] for number in numbers]) == tokens(expected)


def test_a_router_hands_prompts_over_between_servers_and_one_may_be_killed(
    server: RunningServer, start_server, tmp_path: Path
) -> None:
    folder = ("--kv-offload-gb", "0.5", "--kv-offload-dir", str(tmp_path))
    with ThreadPoolExecutor() as pool:  # both start at once
        roles = ("prefill", "decode")
        prefill, decode = pool.map(lambda role: start_server("--role", role, *folder), roles)
    router = RunningRouter("--prefill", prefill.url, "--decode", decode.url)
    try:
        router.wait_ready()
        for one in (router, prefill):
            one.send_random_frames()
            assert one.get("/health").status_code == 200
        _servers_hand_over(server, prefill, router)
        _the_decode_server_may_be_killed(server, decode, router)
    finally:
        router.close()


def _servers_hand_over(server: RunningServer, prefill: RunningServer, router: RunningRouter) -> None:
    numbers = range(40, 43)
    answers = [ask(router, number) for number in numbers]
    assert tokens(answers) == tokens([ask(server, number) for number in numbers])
    handed = handed_over(answers)
    asked = router.get("/servers").json()["servers"]
    assert {one["role"]: one["requests_routed"] for one in asked} == {"both": 3, "prefill": 3}
    assert sum(one["handed_over_tokens"] for one in asked) == handed
    ask(router, 40)  # which the decode server has: no second request
    prefill.wait_metric(3, "generation_tokens_total")


def _the_decode_server_may_be_killed(
    server: RunningServer, decode: RunningServer, router: RunningRouter
) -> None:
    """While prompts are handed over; then the prefill server answers."""
    numbers = range(50, 53)
    threads, answers = asked_together(router, numbers)
    time.sleep(0.2)
    decode.process.kill()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert tokens([answers[number] for number in numbers]) == tokens([ask(server, n) for n in numbers])
    router.wait_for_line(decode.url, "cannot be reached")


def test_roles_need_a_folder_and_one_name_for_each_replica() -> None:
    with pytest.raises(ConfigError, match="role='prefill' hands prompts over through a folder"):
        EngineConfig.of(role="prefill")
    with pytest.raises(ConfigError, match="role='first' is not known: choose one of both, prefill, decode"):
        EngineConfig.of(role="first")
    shared = {"kv_offload_gb": 1.0, "kv_offload_dir": "blocks"}
    with pytest.raises(
        ConfigError, match="role='decode' finds prompts in the prefix cache: leave enable_prefix"
    ):
        EngineConfig.of(role="decode", enable_prefix_caching=False, **shared)
    for count, roles in ((1, ("prefill", "decode")), (2, ("decode",)), (2, ("prefill", "prefill"))):
        with pytest.raises(ConfigError, match=f"data_parallel_size={count}: name a role"):
            ServerSettings(data_parallel_size=count, roles=roles)
