"""RelayedEngine: an engine that another process supervises, as one of several HTTP processes sees it."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from quire.core.errors import EngineDead
from quire.link.channel import prepare
from quire.link.messages import (
    Done,
    FeedRecord,
    LinkMessage,
    Ready,
    Refused,
    ToEngine,
    Updates,
    decoded,
    encode,
)

if TYPE_CHECKING:
    from quire.link.client import EngineClient


class Hello(LinkMessage, frozen=True):
    """The first message of a process."""


class Serving(LinkMessage, frozen=True):
    """The process can answer requests."""


class Closed(LinkMessage, frozen=True):
    """No more updates of this request are wanted."""

    request_id: str


class Counts(LinkMessage, frozen=True):
    """A process's metrics, see server/metrics.py. The relay passes them to the other processes and keeps the last."""

    process: str
    data: bytes


class Down(LinkMessage, frozen=True):
    """The engine ended, and why."""

    message: str


class EngineState(LinkMessage, frozen=True):
    """As the supervisor has it."""

    status: str
    num_starts: int
    num_failures: int


class AdapterChanged(LinkMessage, frozen=True):
    """An operator loaded an adapter through any of the processes, or unloaded it (no path)."""

    name: str
    path: str | None


ToRelay = ToEngine | Hello | Serving | Closed | Counts
FromRelay = Ready | Refused | Updates | Done | FeedRecord | Counts | Down | EngineState | AdapterChanged
_decode: Callable[[bytes], FromRelay] = msgspec.msgpack.Decoder(FromRelay).decode


class RelayedEngine:
    """In the place of the Supervisor: connects to the Relay at `path` and tells `client` what comes from there."""

    def __init__(self, path: str, client: "EngineClient") -> None:
        self.restarts = True  # the other process decides
        self.status = "the engine is starting"
        self.num_starts = 0
        self.num_failures = 0
        self.counts: dict[str, bytes] = {}  # the last metrics of each other process
        self.process = str(os.getpid())
        self._client = client
        self._first: asyncio.Future[Ready] | None = None
        self._task: asyncio.Task[None] | None = None
        self._path = path
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None  # None: not connected

    async def start(self) -> Ready:
        """Returns when the engine is ready."""
        self._first = asyncio.get_running_loop().create_future()
        self._socket = self._context.socket(zmq.DEALER)
        prepare(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, self.process.encode())
        self._socket.connect(f"ipc://{self._path}")
        self._task = asyncio.create_task(self._run(self._socket), name="relayed-engine")
        self.send(Hello())
        return await self._first

    async def close(self) -> None:
        """Messages that were sent have a second to leave. Calling it twice is fine."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._socket is not None:
            self._socket.close(linger=1000)
            self._socket = None
        self._context.term()

    def request_ended(self, request_id: str) -> None:
        self.send(Closed(request_id))

    def send(self, message: ToRelay) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.send(data)

    async def _run(self, socket: zmq.asyncio.Socket) -> None:
        client = self._client
        while True:
            message = decoded(_decode, await socket.recv())
            match message:
                case Ready():
                    client.engine_up(message, self)
                    if self._first is not None and not self._first.done():
                        self._first.set_result(message)
                case Down(reason):
                    client.engine_down(EngineDead(reason))
                case EngineState():
                    self.status, self.num_starts = message.status, message.num_starts
                    self.num_failures = message.num_failures
                case AdapterChanged(name, path):
                    client.adapters.change(name, path)
                case Counts(process, data):
                    self.counts[process] = data
                case None:
                    pass
                case _:
                    client.engine_sent(message)
