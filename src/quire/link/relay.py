"""Relay: one engine for several HTTP processes. It runs in the process that supervises the engine.

Requests and calls are passed on to the engine; what a step did is divided between the processes by their requests.
"""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead
from quire.link.channel import Channel, prepare, private_folder, remove_socket
from quire.link.client import NamedAdapters, unbounded
from quire.link.messages import (
    Abort,
    Add,
    Done,
    Embed,
    EngineCall,
    FeedRecord,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    Stop,
    Tokens,
    UnloadAdapter,
    Updates,
    WatchEngine,
    decoded,
    encode,
    restoring,
)
from quire.link.relayed import (
    AdapterChanged,
    Closed,
    Counts,
    Down,
    EngineState,
    FromRelay,
    Hello,
    Serving,
    ToRelay,
)
from quire.link.supervise import STEP_SECONDS, Supervisor

STATE_SECONDS = 0.2  # between two looks at the supervisor's state
_decode: Callable[[bytes], ToRelay] = msgspec.msgpack.Decoder(ToRelay).decode


class _OfRequest(Protocol):
    @property
    def request_id(self) -> str: ...


T = TypeVar("T", bound=_OfRequest)


class Relay:
    """Processes connect to `path`, each under its process id. Made and used in one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
        on_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_serving` is called each time a process can answer requests."""
        config.adapters.check_folders()
        self._on_serving = on_serving
        self._adapters = NamedAdapters(config.adapters)
        self._supervisor = Supervisor(unbounded(config), self, on_progress, engine_timeout)
        self._channel: Channel | None = None  # None: no engine to talk to
        self._ready: Ready | None = None
        self._processes: set[bytes] = set()
        self._watching: set[bytes] = set()  # processes that listen to the engine's feed
        self._owners: dict[str, bytes] = {}  # the process of each open request
        self._calls: dict[int, tuple[bytes, EngineCall]] = {}  # under the ids that the engine sees
        self._call_ids = itertools.count()
        self._counts: dict[str, Counts] = {}  # of ended processes too: counters must not fall
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = private_folder()
        self.path = str(self._folder / "relay")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        prepare(self._socket)
        self._socket.bind(f"ipc://{self.path}")

    # ------------------------------------------------------------------ life

    async def start(self) -> Ready:
        """Returns when the engine can serve; raises why it cannot."""
        self._tasks = [
            asyncio.create_task(self._receive(), name="relay"),
            asyncio.create_task(self._watch_state(), name="relay-state"),
        ]
        return await self._supervisor.start()

    async def close(self) -> None:
        await self._supervisor.close()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close(linger=0)
        self._context.term()
        remove_socket(self.path)

    def let_end(self) -> None:
        """From now on an engine that ends is not replaced."""
        self._supervisor.restarts = False

    def drop(self, process: int) -> None:
        """The process ended: so do its requests."""
        identity = str(process).encode()
        self._processes.discard(identity)
        self._watch(identity, False)
        open_ids = [request_id for request_id, owner in self._owners.items() if owner == identity]
        for request_id in open_ids:
            del self._owners[request_id]
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] != identity}
        if open_ids and self._channel is not None:
            self._channel.send(Abort(open_ids))

    # ------------------------------------------------------------------ from the processes

    async def _receive(self) -> None:
        while True:
            identity, data, *_ = await self._socket.recv_multipart()
            self._take(identity, data)

    def _take(self, identity: bytes, data: bytes) -> None:
        message, channel = decoded(_decode, data), self._channel
        match message:
            case Hello():
                self._greet(identity)
            case Serving():
                self._on_serving()
            case Closed(request_id):
                self._owners.pop(request_id, None)
            case Counts(process):
                self._counts[process] = message
                self._broadcast(message, but=identity)
            case None:
                pass
            case _ if channel is None:
                pass  # the process hears that the engine is down
            case Add() | Embed():
                request = message.request if isinstance(message, Add) else message
                self._owners[request.request_id] = identity
                channel.send_encoded(data)
            case Abort() | Stop():
                channel.send_encoded(data)
            case WatchEngine(on):
                self._watch(identity, on)
            case EngineCall():
                call_id = next(self._call_ids)
                self._calls[call_id] = (identity, message)
                channel.send(msgspec.structs.replace(message, call_id=call_id))

    def _watch(self, identity: bytes, on: bool) -> None:
        """The feed goes to every process that listens; it stops when the last of them does."""
        if on:
            self._watching.add(identity)
        elif identity in self._watching:
            self._watching.remove(identity)
        else:
            return
        if self._channel is not None and (on or not self._watching):
            self._channel.send(WatchEngine(on))

    def _greet(self, identity: bytes) -> None:
        self._processes.add(identity)
        self._send(identity, self._state())
        for name, path in self._adapters.changes():
            self._send(identity, AdapterChanged(name, path))
        for counts in self._counts.values():
            self._send(identity, counts)
        if self._channel is not None and self._ready is not None:
            self._send(identity, self._ready)

    # ------------------------------------------------------------------ called by the supervisor

    @property
    def has_work(self) -> bool:
        return bool(self._owners or self._calls)

    def engine_up(self, ready: Ready, channel: Channel) -> None:
        self._ready, self._channel = ready, channel
        for change in restoring(self._adapters.changes()):
            channel.send(change)
        self._broadcast(ready)

    def engine_down(self, fault: EngineDead) -> None:
        self._channel = None
        self._owners.clear()
        self._calls.clear()
        self._watching.clear()  # they hear of it, and listen again
        self._broadcast(Down(str(fault)))

    def engine_sent(self, message: FromEngine) -> None:
        match message:
            case Updates():
                self._divide(message)
            case FeedRecord():
                for process in self._watching:
                    self._send(process, message)
            case Refused(request_id):
                owner = self._owners.get(request_id)
                if owner is not None:
                    self._send(owner, message)
            case Done(call_id):
                self._answer(call_id, message)

    def _answer(self, call_id: int, done: Done) -> None:
        process, call = self._calls.pop(call_id, (None, None))
        if isinstance(call, LoadAdapter | UnloadAdapter) and done.error is None:
            path = call.path if isinstance(call, LoadAdapter) else None
            self._adapters.change(call.name, path)
            self._broadcast(AdapterChanged(call.name, path))
        if process is not None and call is not None:
            self._send(process, msgspec.structs.replace(done, call_id=call.call_id))

    def _divide(self, message: Updates) -> None:
        """To each process what belongs to its requests; to all of them the statistics, which come now and then."""
        owners, tokens = self._owners, message.tokens
        rows: defaultdict[bytes | None, list[int]] = defaultdict(list)
        for row, request_id in enumerate(tokens.request_ids):
            rows[owners.get(request_id)].append(row)
        others, pooled = self._by_owner(message.others), self._by_owner(message.pooled)
        started = self._by_owner(message.started)
        everyone = self._processes if message.stats is not None else ()
        for owner in {*rows, *others, *pooled, *started, *everyone} - {None}:
            own = rows.get(owner, [])
            columns: list[list[Any]] = [
                [column[row] for row in own]
                for column in (tokens.request_ids, tokens.indices, tokens.token_ids, tokens.num_cached)
            ]
            part = Updates(
                Tokens(*columns),
                others.get(owner, []),
                pooled.get(owner, []),
                started.get(owner, []),
                message.queue,
                message.stats,
            )
            assert owner is not None
            self._send(owner, part)

    def _by_owner(self, items: Iterable[T]) -> dict[bytes | None, list[T]]:
        divided: defaultdict[bytes | None, list[T]] = defaultdict(list)
        for item in items:
            divided[self._owners.get(item.request_id)].append(item)
        return dict(divided)

    # ------------------------------------------------------------------ to the processes

    async def _watch_state(self) -> None:
        known = self._state()
        while True:
            await asyncio.sleep(STATE_SECONDS)
            if (state := self._state()) != known:
                known = state
                self._broadcast(state)

    def _state(self) -> EngineState:
        supervisor = self._supervisor
        return EngineState(supervisor.status, supervisor.num_starts, supervisor.num_failures)

    def _broadcast(self, message: FromRelay, but: bytes = b"") -> None:
        data = encode(message)
        for identity in self._processes - {but}:
            self._socket.send_multipart([identity, data])

    def _send(self, identity: bytes, message: FromRelay) -> None:
        self._socket.send_multipart([identity, encode(message)])  # dropped if the process is gone
