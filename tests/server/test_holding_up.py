"""Overload, keys, limits, shutdown and the engine's death: each costs only what it must."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.server.running import ADMIN_KEY, MODEL, PATIENCE, RunningServer

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
Start = Callable[..., RunningServer]


def test_overload_keys_sizes_and_time_are_limited(start_server: Start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfrom-file\n\n")
    server = start_server(
        *("--max-num-seqs", "2", "--max-queue-requests", "2", "--request-timeout", "4"),
        *("--api-key", "from-flag", "--api-key-file", str(keys), "--max-concurrent-per-key", "4"),
        *("--max-body-bytes", "20K", "--allowed-origins", "https://a.example", "--root-path", "/llm"),
        *("--log-format", "json", "--isolate-keys", "--trust-request-chat-template"),
        QUIRE_API_KEY="from-environment",
    )
    _keys(server)
    _templates(server)
    _sizes(server)
    _origins_and_root_path(server)
    _overload(server)
    _concurrency(server)
    assert all(line.startswith('{"time":') for line in server.lines)


def _keys(server: RunningServer) -> None:
    for key in ("from-flag", "from-file", "from-environment"):
        assert server.client(api_key=key).models.list().data
    for key in ("from-fla", "from-flag2", "# ours", ADMIN_KEY):
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key=key).models.list()
    assert server.error("/v1/completions", 401, json=LONG)["code"] == "invalid_api_key"
    assert server.error("/check_integrity", 401, headers={"Authorization": "Bearer from-flag"})
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert server.get(path).status_code == 200
    prompt = "A prompt of which every key has its own cached copy, if it is at least sixteen tokens long."
    for key in ("from-flag", "from-file"):
        answer = server.client(api_key=key).completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def _templates(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer from-flag"}
    body = {"messages": [{"role": "user", "content": "One, two,"}], "max_tokens": 1}
    plain = {**body, "chat_template": "{{ messages[0].content }}"}
    answer = server.post("/v1/chat/completions", json=plain, headers=headers)
    assert answer.json()["usage"]["prompt_tokens"] == 4
    for wrong in ("{% for %}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", ""):
        sent = {**body, "chat_template": wrong}
        assert server.error("/v1/chat/completions", 400, json=sent, headers=headers)["type"]
    named = server.post(
        "/v1/chat/completions", json={**body, "chat_template": "/etc/hostname"}, headers=headers
    )
    assert named.json()["usage"]["prompt_tokens"] < 10  # a text like any other, not a file's name


def _sizes(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer from-flag", "Content-Type": "application/json"}
    large = b'{"prompt": "' + b"a" * 30_000 + b'"}'
    error = server.error("/v1/completions", 413, content=large, headers=headers)
    assert error["code"] == "body_too_large"

    def pieces():
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    assert server.error("/v1/completions", 413, content=pieces(), headers=headers)["code"] == "body_too_large"


def _origins_and_root_path(server: RunningServer) -> None:
    bare = server.url.removesuffix("/llm")
    assert httpx.get(f"{bare}/llm/ready").status_code == httpx.get(f"{bare}/ready").status_code == 200
    assert httpx.get(f"{bare}/llm/v1/models").status_code == 401
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{bare}/v1/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.post(f"{bare}/v1/completions", json=LONG, headers={"Origin": "https://a.example"})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)


def _overload(server: RunningServer) -> None:
    """Two run, two wait, the others hear so at once; those that take too long end with an error."""
    headers = [{"Authorization": f"Bearer {key}"} for key in ("from-flag", "from-file")]

    # one client, made before: all of them must be here before the first has had its time
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=server.url, timeout=60) as client:
        client.get("/ready")

        def ask(number: int) -> httpx.Response:
            return client.post("/v1/completions", json=LONG, headers=headers[number % 2])

        answers = list(pool.map(ask, range(8)))
    counts = {status: [a.status_code for a in answers].count(status) for status in (429, 504)}
    assert sum(counts.values()) == 8, [a.text for a in answers]  # none has a whole answer
    assert 4 <= counts[429] <= 6  # until the engine has begun with two, they wait too
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert answer.json()["error"]["code"] == "request_timeout"
    server.wait_idle()
    server.wait_metric(counts[429], "requests_refused_total", reason="queue_full")
    lines = server.client(api_key="from-flag").completions.create(model=MODEL, **_openai(LONG), stream=True)
    with pytest.raises(openai.APIError, match="longer than 4 s"):
        list(lines)


def _concurrency(server: RunningServer) -> None:
    """Four of a key are under way, again and again, until one more hears that they are too many."""
    is_refused = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        while not is_refused.is_set():
            answer = await client.post(f"{server.url}/v1/completions", json=LONG)
            if answer.json()["error"]["code"] == "concurrency_limit":
                is_refused.set()

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": "Bearer from-flag"}) as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(5)]
            await asyncio.wait_for(is_refused.wait(), 60)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(run())
    server.wait_idle()


def _openai(fields: dict) -> dict:
    return {
        "prompt": fields["prompt"],
        "max_tokens": fields["max_tokens"],
        "extra_body": {"ignore_eos": True},
    }


async def _stream(
    client: openai.AsyncOpenAI, max_tokens: int, begun: asyncio.Semaphore
) -> tuple[int, str | None]:
    """(how many tokens came, the error that ended them)."""
    count = 0
    try:
        chunks = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in chunks:
            if not count:
                begun.release()
            count += len(chunk.choices)
    except openai.APIError as error:
        return count, str(error.code)
    return count, None


def test_sigterm_lets_short_answers_end_and_aborts_long_ones_with_an_error(start_server: Start):
    server = start_server("--shutdown-timeout", "6")

    async def run() -> list[tuple[int, str | None]]:
        begun = asyncio.Semaphore(0)
        async with server.async_client() as client:
            tasks = [asyncio.create_task(_stream(client, n, begun)) for n in (12, 12, 12, 8000, 8000)]
            for _ in tasks:
                await begun.acquire()
            os.kill(server.engine_pid(), signal.SIGTERM)  # both, as systemd does
            server.process.send_signal(signal.SIGTERM)
            ready = await asyncio.to_thread(server.wait_status, "/ready", 503)
            assert ready.json()["status"] == "shutting down"
            refused = await asyncio.to_thread(server.chat_error, 503)
            assert refused["code"] == "shutting_down"
            return await asyncio.gather(*tasks)

    ended = asyncio.run(run())
    assert [error for _, error in ended[:3]] == [None] * 3
    assert [error for _, error in ended[3:]] == ["shutting_down"] * 2
    assert all(count > 0 for count, _ in ended)
    assert server.wait_exit() == 0
    assert not any("starting it again" in line for line in server.lines)


def test_a_second_signal_ends_answers_at_once(start_server: Start):
    server = start_server("--shutdown-timeout", "3600")
    body = {**LONG, "max_tokens": 8000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        server.wait_status("/ready", 503)
        server.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-2:]
    assert "the server shut down before the end" in last[0]
    assert last[1] == "data: [DONE]"
    assert server.wait_exit() == 0


def test_a_killed_engine_costs_its_requests_and_nothing_else(start_server: Start):
    server = start_server()

    async def run() -> list[tuple[int, str | None]]:
        begun = asyncio.Semaphore(0)
        async with server.async_client() as client:
            tasks = [asyncio.create_task(_stream(client, 8000, begun)) for _ in range(16)]
            whole = asyncio.create_task(asyncio.to_thread(server.error, "/v1/completions", 500, json=LONG))
            while (await asyncio.to_thread(server.pool))["requests_open"] < 17:  # who comes later hears 503
                await asyncio.sleep(0.02)
            for _ in range(8):
                await begun.acquire()
            os.kill(server.engine_pid(), signal.SIGKILL)
            await asyncio.to_thread(server.wait_status, "/ready", 503)  # until the next engine is there
            refused = await asyncio.to_thread(server.post, "/v1/completions", json=LONG)
            assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
            assert server.get("/health").status_code == 200
            assert (await whole)["code"] == "engine_dead"
            return await asyncio.gather(*tasks)

    ended = asyncio.run(run())
    assert {error for _, error in ended} == {"engine_dead"}
    server.wait_status("/ready", 200)
    answer = server.client().completions.create(model=MODEL, prompt="One, two,", max_tokens=4)
    assert answer.usage.completion_tokens == 4
    pool = server.wait_idle()
    assert (pool["status"], pool["requests_open"]) == ("ok", 0)
    assert server.metric("engine_restarts_total") == 1
    killed = server.wait_for_line("killed by SIGKILL", "starting it again")
    assert server.lines.count(killed) == 1


IMPOSSIBLE = {
    ("./no/such/model",): "no such folder or file",
    ("--num-blocks", "2", "--max-num-seqs", "9"): "lower max_num_seqs",
    ("--chat-template", "{% for %}"): "no valid jinja",
    ("--port", "70000"): "outside 0 to 65535",
    ("--host", "203.0.113.1"): "cannot listen on",
}


@pytest.mark.e2e
def test_a_start_that_cannot_work_is_one_line():
    """All at the same time: each is mostly the start of a process."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0"]
    started = {
        flags: subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for flags in IMPOSSIBLE
    }
    try:
        ended = {flags: process.communicate(timeout=240)[1] for flags, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    for flags, said in IMPOSSIBLE.items():
        assert started[flags].returncode == 2
        last = ended[flags].strip().splitlines()[-1]
        assert last.startswith("quire: error: ")
        assert said in last
        assert "Traceback" not in ended[flags]


@pytest.mark.e2e
def test_ctrl_c_while_the_engine_starts_is_an_orderly_end():
    """A terminal sends it to the whole group: the engine, which may still import, must not hear it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stderr is not None
    try:
        assert "loading" in server.stderr.readline()
        time.sleep(1.0)  # the engine's interpreter is up, and has long to import
        os.killpg(server.pid, signal.SIGINT)
        said = server.communicate(timeout=60)[1]
    finally:
        server.kill()
    assert server.returncode in (0, 130)  # it listens already, or does not yet
    assert "Traceback" not in said
