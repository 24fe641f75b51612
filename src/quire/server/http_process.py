"""One of several HTTP processes: `python -m quire.server.http_process SOCKET RELAY`, its settings on stdin.

Started by processes.py only. stdin stays open for as long as the process shall serve: its end asks it to drain.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from functools import partial

import msgspec

from quire.core.config import EngineConfig
from quire.link.client import EngineClient
from quire.link.relayed import Counts, RelayedEngine, Serving
from quire.observe.heap import freeze_heap
from quire.server.run import DrainingServer, adopt_logs, report_start, uvicorn_config
from quire.server.service import Service
from quire.server.settings import ServerSettings

COUNTS_SECONDS = 1.0  # between two reports of this process's metrics to the others
READY_SECONDS = 10.0  # after which a process answers although the engine is down


class ProcessSetup(msgspec.Struct, frozen=True):
    """What a process is told on its stdin."""

    config: EngineConfig
    settings: ServerSettings
    is_first: bool  # whether this process logs what was decided at start
    replaces: bool  # another one: then connections wait until it is ready, instead of a 503


def main() -> None:
    descriptor, path = int(sys.argv[1]), sys.argv[2]
    parent = os.getppid()
    setup = msgspec.msgpack.decode(_framed(0), type=ProcessSetup)
    adopt_logs()
    engines: list[RelayedEngine] = []

    def connect(client: EngineClient) -> RelayedEngine:
        engines.append(RelayedEngine(path, client))
        return engines[0]

    service = Service.of(setup.config, setup.settings, relay=connect)
    service.metrics.elsewhere = engines[0].counts
    server = DrainingServer(uvicorn_config(service), service)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        listener = socket.socket(fileno=descriptor)
        runner.run(_serve(server, service, engines[0], listener, setup, parent))


def _framed(descriptor: int) -> bytes:
    """Unbuffered: the end of stdin is waited for later."""
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as stdin:
        left = int.from_bytes(stdin.read(4), "little")
        pieces = []
        while left and (piece := stdin.read(left)):
            pieces.append(piece)
            left -= len(piece)
    return b"".join(pieces)


async def _serve(
    server: DrainingServer,
    service: Service,
    engine: RelayedEngine,
    listener: socket.socket,
    setup: ProcessSetup,
    parent: int,
) -> None:
    starting = asyncio.create_task(service.start())
    if setup.replaces:
        await asyncio.wait({starting}, timeout=READY_SECONDS)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    counting = asyncio.create_task(_send_counts(service, engine))
    loop = asyncio.get_running_loop()
    threading.Thread(target=_until_told, args=(loop, server, parent), daemon=True).start()
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            if setup.is_first:
                report_start(service)
            freeze_heap()
            engine.send(Serving())
        await serving
    finally:
        server.should_exit = True
        starting.cancel()
        counting.cancel()
        await asyncio.wait({serving, counting})
        engine.send(Counts(engine.process, service.metrics.counts()))
        await service.close()


async def _send_counts(service: Service, engine: RelayedEngine) -> None:
    while True:
        await asyncio.sleep(COUNTS_SECONDS)
        engine.send(Counts(engine.process, service.metrics.counts()))


def _until_told(loop: asyncio.AbstractEventLoop, server: DrainingServer, parent: int) -> None:
    """Waits for the end of stdin. Without the parent there is no engine: then nothing is waited for."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    has_parent = os.getppid() == parent
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(partial(server.drain, "the server ends", at_once=not has_parent))


if __name__ == "__main__":
    main()
