"""The real engine in a real process: it answers, refuses, dies, comes back, and never outlives its parent."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest, WeightsError
from quire.core.request import EmbedRequest, QueueBounds, Request
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.streams import Stream
from quire.link import supervise
from quire.link.client import EngineClient
from quire.link.messages import (
    Abort,
    Add,
    CheckIntegrity,
    LinkMessage,
    Refused,
    Shutdown,
    Stop,
    decode_to_engine,
    encode,
)
from quire.link.relay import Relay
from quire.link.relayed import Closed, Counts, EngineState, Hello, RelayedEngine

pytestmark = pytest.mark.e2e
SMALL = {"num_blocks": 64, "max_num_seqs": 4}
LONG = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)


def with_engine(use: Callable[[EngineClient], Awaitable[None]], **options: float) -> None:
    async def run() -> None:
        client = EngineClient(EngineConfig.of(**SMALL), QueueBounds(8), **options)
        try:
            await client.start()
            await use(client)
        finally:
            await client.close()

    asyncio.run(run())


async def collect(stream: Stream) -> list[SequenceUpdate]:
    found: list[SequenceUpdate] = []
    while not found or found[-1].finish_reason is None:
        found += await stream.updates()
    for request_id in stream.request_ids:
        stream.done(request_id)
    stream.close()
    return found


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        await asyncio.sleep(0.02)


def test_requests_are_answered_refused_aborted_and_leave_no_trace():
    async def use(client: EngineClient) -> None:
        greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        answered = await collect(client.submit([Request("a", [1, 2, 3], greedy)]))
        assert sum(len(u.token_ids) for u in answered) == 5
        again = await collect(client.submit([Request("b", [1, 2, 3], greedy)]))
        assert [u.token_ids for u in again] == [u.token_ids for u in answered]

        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            await client.submit([Request("c", [2**31 - 1], greedy)]).updates()

        stream = client.submit([Request("d", [1, 2, 3], LONG)])
        await stream.updates()
        assert client.queue.num_running == 1
        stream.close()
        await until(lambda: client.queue.num_running == 0)
        assert (await client.check_integrity()).error is None
        assert (client.num_open, client.stats.pool.num_blocks_used) == (0, 0)

    with_engine(use)


def test_the_step_log_records_only_while_it_is_on():
    async def use(client: EngineClient) -> None:
        greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        assert await client.stop_step_log() == []
        await client.start_step_log()
        await collect(client.submit([Request("a", [1, 2, 3], greedy)]))
        steps = await client.stop_step_log()
        assert [(step.num_prefill_tokens, step.num_decode_rows) for step in steps[:5]] == [(3, 0)] + [
            (0, 1)
        ] * 4
        assert all(step.started < step.ended for step in steps)
        assert all(earlier.ended <= later.started for earlier, later in itertools.pairwise(steps))
        await collect(client.submit([Request("b", [1, 2, 3], greedy)]))
        assert await client.stop_step_log() == []

    with_engine(use)


def test_an_encoder_answers_through_the_same_client():
    async def run() -> None:
        config = EngineConfig.of(model="sentence-transformers/all-MiniLM-L6-v2")
        client = EngineClient(config, QueueBounds(8), what="embedding engine")
        try:
            ready = await client.start()
            assert ready.vectors is not None
            stream = client.submit([EmbedRequest("a", [[101, 7592, 102], [101, 102]])])
            pooled = await stream.updates()
            while len(pooled) < 2:
                pooled += await stream.updates()
            assert [(text.index, len(text.vector)) for text in pooled] == [
                (i, 4 * ready.vectors.width) for i in (0, 1)
            ]
            assert client.admission.num_waiting == 0
            stream.done("a")
            stream.close()
            with pytest.raises(InvalidRequest, match=r"input\[1\] has no tokens"):
                await client.submit([EmbedRequest("b", [[101], []])]).updates()
            await until(lambda: client.stats.steps.num_finished == 2)
            assert client.num_open == 0
        finally:
            await client.close()

    asyncio.run(run())


def test_a_killed_engine_fails_what_was_under_way_and_comes_back():
    async def use(client: EngineClient) -> None:
        assert client.ready is not None
        streams = [client.submit([Request(f"r{i}", [1, 2, 3], LONG)]) for i in range(6)]
        await streams[0].updates()
        first = client.ready.pid
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match=r"killed by SIGKILL.*restarted"):
                await collect(stream)
        assert not client.is_ready
        with pytest.raises(EngineDead, match="try again"):
            client.submit([Request("x", [1], LONG)])
        await until(lambda: client.is_ready)
        assert (client.ready.pid != first, client.num_restarts, client.num_open) == (True, 1, 0)
        assert await collect(client.submit([Request("y", [1, 2], SamplingParams(max_tokens=2))]))

    with_engine(use)


def test_an_engine_that_is_stopped_under_a_request_is_given_up_and_replaced():
    async def use(client: EngineClient) -> None:
        assert client.ready is not None
        first = client.ready.pid
        await collect(client.submit([Request("a", [1, 2, 3], LONG.changed(max_tokens=4))]))
        await asyncio.sleep(4.5)  # longer than it has for a step
        assert client.num_restarts == 0  # one that idles owes nothing
        stream = client.submit([Request("b", [1, 2, 3], LONG)])
        await stream.updates()
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(EngineDead, match=r"no sign of life.*restarted"):
            await collect(stream)
        await until(lambda: client.is_ready)
        assert (client.ready.pid != first, client.num_restarts, client.num_open) == (True, 1, 0)
        assert not Path(f"/proc/{first}").exists()
        assert await collect(client.submit([Request("c", [1, 2], SamplingParams(max_tokens=2))]))

    with_engine(use, engine_timeout=4.0)


def test_an_engine_that_is_asked_to_leave_finishes_what_it_has():
    async def use(client: EngineClient) -> None:
        assert client.ready is not None
        stream = client.submit([Request("a", [1, 2, 3], LONG.changed(max_tokens=60))])
        await stream.updates()
        os.kill(client.ready.pid, signal.SIGTERM)
        assert (await collect(stream))[-1].finish_reason == "length"
        await until(lambda: not client.is_ready)
        await until(lambda: client.is_ready)

    with_engine(use)


def test_a_model_that_cannot_be_loaded_is_one_clear_error_of_its_own_kind():
    async def run() -> None:
        client = EngineClient(EngineConfig.of(model="./no/such/folder"), QueueBounds(8))
        try:
            with pytest.raises(
                WeightsError, match=r"^\./no/such/folder: no such folder or file: check the path$"
            ):
                await client.start()
        finally:
            await client.close()

    asyncio.run(run())


LINGERING = """
import sys, time
from quire.link.channel import WorkerChannel
from quire.link.messages import Failed
WorkerChannel(sys.argv[1]).send(Failed("WeightsError", "its last words"))
time.sleep(600)
"""


def test_an_engine_that_said_why_it_stops_and_does_not_end_is_killed(monkeypatch):
    """A thread of it may wait for a file for ever."""

    async def spawn(_config: EngineConfig, path: str, _pipe: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", LINGERING, path)

    async def run() -> None:
        client = EngineClient(EngineConfig.of(), QueueBounds(8))
        with pytest.raises(WeightsError, match="its last words"):
            await client.start()
        await client.close()

    monkeypatch.setattr(supervise, "_spawn", spawn)
    monkeypatch.setattr(supervise, "CLOSE_SECONDS", 0.1)
    asyncio.run(run())


PARENT = """
import asyncio, os, sys
from quire.core.config import EngineConfig
from quire.core.request import QueueBounds
from quire.link.client import EngineClient
async def run():
    client = EngineClient(EngineConfig.of(num_blocks=64, max_num_seqs=4), QueueBounds(8))
    ready = await client.start()
    print(ready.pid, client._channel.path, flush=True)
    await asyncio.sleep(60)
asyncio.run(run())
"""


def test_the_engine_ends_with_its_parent_and_its_socket_is_private_and_removed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, path = parent.stdout.readline().split()
    assert os.stat(Path(path).parent).st_mode & 0o777 == 0o700
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(path).parent.exists()


TO_ENGINE = (Add.of(Request("fuzz", (5, 6, 7), LONG)), Abort(["fuzz"]), Stop("fuzz", 0), CheckIntegrity(7))


def random_frames(count: int, messages: Sequence[LinkMessage] = TO_ENGINE) -> list[bytes]:
    """Bytes of any kind, and messages with bytes changed, cut off or appended; no whole Shutdown."""
    drawn = random.Random(0)
    whole = [encode(message) for message in messages]
    frames = []
    while len(frames) < count:
        data = bytearray(drawn.choice(whole))
        match drawn.randrange(5):
            case 0:
                data = bytearray(drawn.randbytes(drawn.randrange(64)))
            case 1:
                data = data[: drawn.randrange(len(data))]
            case 2:
                data += drawn.randbytes(drawn.randrange(1, 8))
            case _:
                for _ in range(drawn.randrange(1, 4)):
                    data[drawn.randrange(len(data))] = drawn.randrange(256)
        with suppress(Exception):
            if isinstance(decode_to_engine(bytes(data)), Shutdown | Add):
                continue  # a request that is whole is admitted or refused, which other tests look at
        frames.append(bytes(data))
    return frames


def test_ten_thousand_random_frames_end_no_engine():
    async def use(client: EngineClient) -> None:
        pid = client.ready.pid
        for number, frame in enumerate(random_frames(10_000)):
            client._channel.send_encoded(frame)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        updates = await asyncio.wait_for(collect(client.submit([Request("after", (1, 2, 3), greedy)])), 60)
        assert len([token for update in updates for token in update.token_ids]) == 5
        assert (await client.check_integrity()).error is None
        assert (client.ready.pid, client.num_restarts) == (pid, 0)

    with_engine(use)


def test_ten_thousand_random_frames_between_relay_and_http_processes_end_neither():
    """To the relay from a process beside the client's, and from the relay to the client's."""
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)

    async def use(relay: Relay, client: EngineClient) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as other:
            other.setsockopt(zmq.IDENTITY, b"other")
            other.connect(f"ipc://{relay.path}")
            await other.send(encode(Hello()))
            for frame in random_frames(10_000, (*TO_ENGINE, Closed("fuzz"), Counts("other", b""))):
                await other.send(frame)
            await other.send_multipart([encode(Hello()), b"", b"more"])
            for frame in random_frames(10_000, (Refused("fuzz", "fault", ""), EngineState("x", 1, 0))):
                await relay._socket.send_multipart([client._supervisor.process.encode(), frame])
            updates = await asyncio.wait_for(
                collect(client.submit([Request("after", (1, 2, 3), greedy)])), 60
            )
            assert len([token for update in updates for token in update.token_ids]) == 5
            assert (await client.check_integrity()).error is None
            assert not any(task.done() for task in relay._tasks)
            other.close(linger=0)

    async def run() -> None:
        relay = Relay(EngineConfig.of(**SMALL))
        config, bounds = EngineConfig.of(**SMALL), QueueBounds(8)
        client = EngineClient(config, bounds, relay=lambda client: RelayedEngine(relay.path, client))
        try:
            await relay.start()
            await client.start()
            await use(relay, client)
        finally:
            await client.close()
            await relay.close()

    asyncio.run(run())
