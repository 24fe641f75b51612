"""A rank on a machine that Ray chooses: `main` with the arguments RANK REPORTS MEMORY, in place of its process.

Rank 0 starts it as it starts ranks on its own machine. It passes the Steps on to the rank, and the rank's reports back,
over TCP with CURVE keys; nothing of a step passes through Ray. Tensors go from rank to rank (gloo).
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from quire.core.errors import EngineDead
from quire.link.remote import RemoteChannel
from quire.parallel.ranks import Reporter, read_frames

PIECE = 1 << 20  # bytes of a frame in one part of a message

HOST = "quire.link.ray_host"  # a ConfigError where Ray is not installed: `main` reports it


async def run(rank: int, frames: Iterator[bytes], reports: Connection) -> None:
    """Until `frames` end, or the rank. Raises EngineDead that says how the rank ended."""
    settings: dict[str, Any] = json.loads(next(frames))
    ray = import_module(HOST)
    own, _nodes = ray.join(os.environ.get("RAY_ADDRESS"))
    settings["address"] = f"{own}:{settings['address']}"
    channel = RemoteChannel(own)
    resources = {"num_cpus": settings["config"]["runner"]["num_threads"], "num_gpus": 0}
    host, hosted = await ray.place(channel, f"rank {rank}", resources, "quire.link.remote_peer", str(rank))
    process = ray.HostedProcess(host, hosted.pid, host.run.remote(channel.key, b"", 0.0))
    sending = asyncio.create_task(_send(channel, chain((json.dumps(settings).encode(),), frames)))
    others = [
        asyncio.create_task(task) for task in (_receive(channel, reports), channel.lost(), process.wait())
    ]
    await asyncio.wait({sending, *others}, return_when=asyncio.FIRST_COMPLETED)
    if not sending.done():
        # the last report may still come, and Ray says how the process ended
        await asyncio.sleep(ray.REASON_SECONDS)
        raise EngineDead(f"on node {hosted.node} {process.how or ray.LOST}")
    process.send_signal(9)
    await process.wait()


async def _send(channel: RemoteChannel, frames: Iterator[bytes]) -> None:
    while (data := await asyncio.to_thread(next, frames, None)) is not None:
        # Each part that arrives is a sign of life: a large adapter may take longer than the heartbeat waits.
        parts = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
        # the first waits for the rank's connection, which may never come
        await channel.socket.send_multipart(parts)


async def _receive(channel: RemoteChannel, reports: Connection) -> None:
    while True:
        reports.send_bytes(await channel.socket.recv())


async def _run_and_report(rank: int, reports: Connection) -> None:
    try:
        await run(rank, read_frames(), reports)
    except Exception as fault:
        Reporter(reports).fail(fault)
    os._exit(0)  # a thread waits for stdin, and asyncio would wait for it


def main() -> None:
    rank, reports, memory = map(int, sys.argv[1:])
    os.close(memory)
    asyncio.run(_run_and_report(rank, Connection(reports, readable=False)))
