"""Faults under load: half of the clients leave, the engine is killed, the server is told to end, numbers break.

Each time every request ends in a way that its client can tell, the pool is whole afterwards, and counters add up.
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.bench.serve import make_call
from quire.link.http_client import HttpClient
from tests.models.checkpoints import llama, save
from tests.server.load import Answered, Question, Tally, ask_for, ask_while, offline_answers
from tests.server.running import RunningServer

Start = Callable[..., RunningServer]
NUM_STREAMS = 32  # twice what runs at once
PATHS = ("/v1/completions", "/v1/chat/completions")
BROKEN_TOKEN = 13


@pytest.fixture(scope="module")
def answers() -> dict[Question, Answered]:
    return offline_answers([Question(number) for number in range(NUM_STREAMS)])


def test_clients_that_leave_and_an_engine_that_dies_and_a_signal_cost_only_what_they_must(
    start_server: Start, answers: dict[Question, Answered]
):
    server = start_server()
    _half_of_the_clients_leave(server, answers)
    _the_engine_is_killed(server, answers)
    _the_server_is_told_to_end(server, answers)


def _half_of_the_clients_leave(server: RunningServer, answers: dict[Question, Answered]) -> None:
    async def leave(client: HttpClient, question: Question) -> None:
        call = question.call(max_tokens=2000, ignore_eos=True)
        async with client.send("POST", call.path, call.encoded()) as response:
            assert response.status == 200
            events = response.events()
            for _ in range(3):
                await anext(events)

    async def run() -> Tally:
        client, tally = HttpClient(server.url), Tally()

        async def stay(question: Question) -> None:
            tally.take(question, await make_call(client, question.call(), 60), answers)

        every = list(answers)
        await asyncio.gather(
            *(leave(client, question) for question in every[::2]),
            *(stay(question) for question in every[1::2]),
        )
        await client.close()
        return tally

    tally = asyncio.run(run())
    assert not tally.wrong
    assert tally.ends == {"right": NUM_STREAMS // 2}
    assert server.wait_idle()["status"] == "ok"
    server.wait_metric(NUM_STREAMS // 2, "requests_disconnected_total")
    server.wait_metric(NUM_STREAMS // 2, "request_success_total")
    assert _num_responses(server) == NUM_STREAMS


def _the_engine_is_killed(server: RunningServer, answers: dict[Question, Answered]) -> None:
    before, succeeded = _num_responses(server), server.metric("request_success_total")

    async def run() -> tuple[Tally, Tally]:
        client, during = HttpClient(server.url), Tally()
        before_the_fault = lambda: during.total == during.right
        asking = asyncio.create_task(
            ask_while(before_the_fault, during, client, NUM_STREAMS, answers, pause=0.3)
        )
        while not during.right:
            await asyncio.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)
        await asking
        await asyncio.to_thread(server.wait_status, "/ready", 200)
        after = await ask_for(0.5, client, NUM_STREAMS, answers, pause=0.3)
        await client.close()
        return during, after

    during, after = asyncio.run(run())
    assert not during.wrong
    told = {"error event: engine_dead", "HTTP 500 engine_dead", "HTTP 503 engine_down"}
    assert set(during.ends) <= {"right", *told}, during.ends
    assert during.total - during.right > 0
    assert after.ends == {"right": after.total}
    assert server.wait_idle()["status"] == "ok"
    assert server.metric("engine_restarts_total") == 1
    server.wait_metric(succeeded + during.right + after.right, "request_success_total")
    assert _num_responses(server) - before == during.total + after.total


def _the_server_is_told_to_end(server: RunningServer, answers: dict[Question, Answered]) -> None:
    served_before = int(server.metric("request_success_total"))

    async def run() -> tuple[Tally, int]:
        client, tally = HttpClient(server.url), Tally()

        async def ask(question: Question) -> None:
            tally.take(question, await make_call(client, question.call(), 60), answers)

        asking = [asyncio.create_task(ask(question)) for question in answers]
        num_open = 0
        while num_open < NUM_STREAMS // 2 and not any(task.done() for task in asking):
            num_open = (await asyncio.to_thread(server.pool))["requests_open"]
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*asking)
        await client.close()
        return tally, num_open

    tally, num_open = asyncio.run(run())
    assert not tally.wrong
    assert set(tally.ends) <= {"right", "HTTP 503 shutting_down"}, tally.ends
    assert tally.right >= max(1, num_open)
    assert tally.total == NUM_STREAMS
    assert server.wait_exit() == 0
    ended = [line for line in server.lines if "the pool is whole, 0 blocks in use" in line]
    assert len(ended) == 1, server.lines[-5:]
    # the engine that was started after the kill: what it answered then, and what it was given now
    found = re.search(r"([\d,]+) requests and [\d,]+ tokens served", ended[0])
    assert found is not None
    assert served_before > 0
    assert int(found[1].replace(",", "")) >= tally.right


def _num_responses(server: RunningServer) -> float:
    return sum(server.metric("http_requests_total", path=path) for path in PATHS)


def test_logits_that_are_not_finite_fail_the_one_request_that_has_them(start_server: Start, tmp_path: Path):
    folder = tmp_path / "broken"
    save(folder, llama())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN_TOKEN] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # weights that are quantized are checked when they are loaded; full precision takes them as they are
    server = start_server(str(folder), "--num-blocks", "32", "--max-num-seqs", "8", "--quantization", "none")
    alone = _tokens(server, [1, 2, 3])

    async def run() -> list[object]:
        sound = [asyncio.to_thread(_tokens, server, [1, 2, 3]) for _ in range(6)]
        broken = asyncio.to_thread(
            server.error, "/v1/completions", 500, json={"prompt": [5, BROKEN_TOKEN, 6], "max_tokens": 8}
        )
        return await asyncio.gather(*sound, broken)

    *sound, broken = asyncio.run(run())
    assert sound == [alone] * 6
    assert isinstance(broken, dict)
    assert re.match(
        r"request cmpl-\w+: the model gave logits that are not finite at position 3", broken["message"]
    )
    _breaks_in_mid_stream(server)
    assert _tokens(server, [1, 2, 3]) == alone  # on pages that held what was not finite
    assert server.wait_idle()["status"] == "ok"
    assert server.metric("engine_restarts_total") == 0


def _breaks_in_mid_stream(server: RunningServer) -> None:
    """The prompt is sound, and the first token makes the second impossible."""
    body = {
        "prompt": [5, 6],
        "max_tokens": 8,
        "logit_bias": {str(BROKEN_TOKEN): 100},
        "stream": True,
        "logprobs": 0,
    }
    response = server.post("/v1/completions", json=body)
    events = response.text.strip().split("\n\n")
    # the fault was there before the first token was sent: a plain answer, with its status
    if len(events) == 1:
        assert response.status_code == 500
        assert "logits that are not finite at position 3" in events[0]
        return
    assert len(events) == 3
    assert '"choices":[{' in events[0]
    assert "logits that are not finite at position 3" in events[1]
    assert events[2] == "data: [DONE]"


def _tokens(server: RunningServer, prompt: list[int]) -> list[str]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = server.post("/v1/completions", json=body).json()
    return answer["choices"][0]["logprobs"]["tokens"]
