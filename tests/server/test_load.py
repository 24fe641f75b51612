"""Hundreds of streams: every response is complete and right or a 429, nothing is lost, mixed up or leaked."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from quire.link.http_client import HttpClient
from tests.server.load import Question, Tally, ask_for, offline_answers, open_files, resident_bytes
from tests.server.running import PATIENCE, RunningServer

Start = Callable[..., RunningServer]
REFUSED = "HTTP 429 queue_full"
# What may lie between two measurements of HTTP side and engine: allocators keep pieces in reserve, and the engine
# keeps its last few recorded passes, whose sizes vary.
LEEWAY_BYTES = (8 << 20, 48 << 20)


def test_sixty_four_streams_are_answered_as_offline_or_refused(start_server: Start):
    _soak(start_server, num_streams=64, num_seqs=16, queue=24, seconds=(3.0, 3.0), num_questions=48)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_512_streams_for_a_minute_are_answered_as_offline_or_refused(start_server: Start):
    _soak(
        start_server, num_streams=512, num_seqs=64, queue=400, seconds=(20.0, 30.0, 30.0), num_questions=160
    )


def _soak(
    start_server: Start,
    num_streams: int,
    num_seqs: int,
    queue: int,
    seconds: Sequence[float],
    num_questions: int,
) -> None:
    """Parts of that many seconds on the same connections: the last must leave memory as the one before did."""
    server = start_server(
        *("--max-num-seqs", str(num_seqs), "--max-queue-requests", str(queue)),
        # few blocks, so that all of them are touched early and memory can be flat
        *("--num-blocks", str(8 * num_seqs)),
    )
    answers = offline_answers([Question(number) for number in range(num_questions)])
    pids = (server.process.pid, server.engine_pid())
    files = [open_files(pid) for pid in pids]

    async def run() -> tuple[list[Tally], list[list[int]], int]:
        client = HttpClient(server.url)
        tallies, memory = [], []
        try:
            # a leak grows each time; what allocators or more threads take for the first time does not
            for part in (*seconds, *seconds[-1:] * 3):
                if len(memory) >= len(seconds) and not _grown(memory):
                    break
                tallies.append(await ask_for(part, client, num_streams, answers, pause=0.5))
                memory.append([resident_bytes(pid) for pid in pids])
            return tallies, memory, client.num_opened
        finally:
            await client.close()

    tallies, memory, num_opened = asyncio.run(run())
    print([dict(tally.ends) for tally in tallies], memory)
    for tally in tallies:
        assert not tally.wrong
        assert set(tally.ends) <= {"right", REFUSED}
        assert tally.right > num_seqs
        assert tally.ends[REFUSED] > 0  # there are more streams than fit
    assert num_opened == num_streams  # no connection was lost, also not between the parts
    pool = server.wait_idle()
    assert pool["status"] == "ok"
    _check_counters(server, tallies)
    assert not _grown(memory), memory
    deadline = time.monotonic() + PATIENCE  # the last connections are being closed
    while any(open_files(pid) > before for pid, before in zip(pids, files, strict=True)):
        assert time.monotonic() < deadline, files
        time.sleep(0.05)


def _grown(memory: list[list[int]]) -> bool:
    """Whether HTTP side or engine took more in the last part than may lie between two measurements."""
    return any(now - then >= most for then, now, most in zip(*memory[-2:], LEEWAY_BYTES, strict=True))


def _check_counters(server: RunningServer, tallies: list[Tally]) -> None:
    right = sum(tally.right for tally in tallies)
    refused = sum(tally.ends[REFUSED] for tally in tallies)
    server.wait_metric(refused, "http_requests_total", status="429")
    server.wait_metric(refused, "requests_refused_total", reason="queue_full")
    server.wait_metric(right, "request_success_total")
    server.wait_metric(sum(tally.num_tokens for tally in tallies), "generation_tokens_total")
    assert server.metric("http_requests_total", status="200", path="/v1/completions") + server.metric(
        "http_requests_total", status="200", path="/v1/chat/completions"
    ) == float(right)
    assert server.metric("requests_disconnected_total") == 0
    assert server.metric("engine_restarts_total") == 0
