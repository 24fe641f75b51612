"""What stands beside rank 0 for a rank elsewhere, without Ray: faults of a start are reported."""

import asyncio
import json
import os
import subprocess
import sys
from multiprocessing.connection import Pipe
from types import ModuleType, SimpleNamespace

import pytest
import zmq

from quire.core.errors import EngineDead
from quire.link import ray_ranks
from quire.parallel.ranks import BEAT, read_frames

SETTINGS = json.dumps({"address": "1", "config": {"runner": {"num_threads": 1}}}).encode()
START = "import sys; sys.modules['ray'] = None; from quire.link import ray_ranks; ray_ranks.main()"


def test_a_rank_that_never_connects_ends_with_the_reason(monkeypatch) -> None:
    class Process:
        how = "cannot reach the server"

        def __init__(self, *_arguments: object) -> None: ...

        async def wait(self) -> int:
            return 1

    channels = []

    async def place(channel, *_arguments: object):
        channels.append(channel)
        channel.allow(zmq.curve_keypair()[0])
        run = SimpleNamespace(remote=lambda *_arguments: None)
        return SimpleNamespace(run=run), SimpleNamespace(pid=1, node="10.0.0.2")

    host = ModuleType(ray_ranks.HOST)
    host.__dict__.update(
        join=lambda _address: ("127.0.0.1", []),
        HostedProcess=Process,
        place=place,
        LOST="is lost",
        REASON_SECONDS=0.0,
    )
    monkeypatch.setitem(sys.modules, ray_ranks.HOST, host)

    async def run() -> None:
        try:
            await asyncio.wait_for(ray_ranks.run(1, iter([SETTINGS]), Pipe(duplex=False)[1]), 10)
        finally:
            channels[0].close()

    with pytest.raises(EngineDead, match=r"on node 10\.0\.0\.2 cannot reach the server"):
        asyncio.run(run())


def test_a_machine_without_ray_is_told_what_to_install() -> None:
    reports, end = os.pipe()
    stdin, frames = Pipe(duplex=False)
    frames.send_bytes(SETTINGS)
    memory = os.dup(end)
    command = [sys.executable, "-c", START, "1", str(end), str(memory)]
    subprocess.run(command, stdin=stdin.fileno(), pass_fds=(end, memory), timeout=60, check=False)
    os.close(end)
    os.close(memory)
    kind, message = json.loads(next(said for said in read_frames(reports) if said != BEAT))
    assert kind == "ConfigError"
    assert "pip install 'quire[ray]'" in message
