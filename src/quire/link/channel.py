"""The local socket between the two processes: Channel is the client's end, WorkerChannel the engine's."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import zmq
import zmq.asyncio

from quire.core.errors import AdapterError, ConfigError, InvalidRequest, QueueFull
from quire.core.request import EmbedRequest, Request
from quire.engine.loop import Command, EngineLoop, StepReport
from quire.link.feed import EngineFeed, recount
from quire.link.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Done,
    Embed,
    FeedRecord,
    FromEngine,
    LoadAdapter,
    Refused,
    ResetPrefixCache,
    RestoreAdapter,
    ShownSequence,
    ShowRequest,
    Shutdown,
    Stop,
    SwitchStepLog,
    ToEngine,
    UnloadAdapter,
    WatchEngine,
    decode_from_engine,
    decode_to_engine,
    decoded,
    encode,
    pack_ints,
    pack_report,
)
from quire.link.step_log import StepLog
from quire.observe.logs import get_logger

if TYPE_CHECKING:  # it brings torch, which the client's process does without
    from quire.engine.adapters import Adapters
    from quire.engine.engine import Engine

log = get_logger(__name__)
_MAX_PATH = 100  # bytes; the system allows 107 for a local socket's name


class Channel:
    """The client's end. Each engine process gets a new one, so that no message of an old process can arrive."""

    def __init__(self) -> None:
        self._folder = private_folder()
        self.path = str(self._folder / "engine")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        prepare(self._socket)
        self._socket.bind(f"ipc://{self.path}")

    def send(self, message: ToEngine) -> None:
        """Queues the message; never blocks. For use once the engine has sent a message."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        self._socket.send(data)  # zmq.asyncio sends at once where it can, and here it always can

    async def receive(self) -> FromEngine:
        while (message := decoded(decode_from_engine, await self._socket.recv())) is None:
            pass
        return message

    def close(self) -> None:
        """Removes the socket and its folder. Calling it twice is fine."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
        remove_socket(self.path)


class WorkerChannel:
    """The engine's end, as the Transport of its loop: one message per command, and one per step."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        prepare(self._socket)
        self._connect(path)
        self._step_log: StepLog | None = None  # until it is first switched on
        self._feed: EngineFeed | None = None  # likewise

    def _connect(self, path: str) -> None:
        self._socket.connect(f"ipc://{path}")

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        """Messages that were sent have a second to leave."""
        self._socket.close(linger=1000)
        self._context.term()

    # ------------------------------------------------------------------ engine.loop.Transport

    def receive(self, seconds: float) -> Command | None:
        if seconds and not self._wait(seconds):
            return None
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message = decoded(_read_command, data)
        return _nothing if message is None else partial(self._execute, message)

    def publish(self, report: StepReport) -> None:
        self.send(pack_report(report))
        if self._feed is not None:
            self._feed.publish()

    def _wait(self, seconds: float) -> int:
        """Whether a message is there within `seconds`; a record of the feed that was not due is sent meanwhile."""
        due = None if self._feed is None else self._feed.due_in()
        if self._feed is not None and due is not None:
            if ready := self._socket.poll(int(due * 1000) + 1):
                return ready
            self._feed.publish()
        return self._socket.poll(int(seconds * 1000))

    def refuse(self, request_id: str, fault: Exception) -> None:
        if isinstance(fault, InvalidRequest):
            message = Refused(request_id, "invalid", str(fault), fault.param)
        elif isinstance(fault, QueueFull):
            message = Refused(request_id, "unavailable", str(fault))
        else:
            log.error("request %s could not be added", request_id, exc_info=fault)
            message = Refused(request_id, "fault", f"{type(fault).__name__}: {fault}")
        self.send(message)

    # ------------------------------------------------------------------ commands

    def _execute(self, message: ToEngine | Request | EmbedRequest, loop: EngineLoop) -> None:
        match message:
            case Request() | EmbedRequest():
                loop.add(message)
            case Abort(request_ids):
                loop.abort(request_ids)
            case Stop(request_id, index):
                loop.stop(request_id, index)
            case Shutdown():
                loop.end()
            case ResetPrefixCache(call_id):
                loop.engine.reset_prefix_cache()
                if self._feed is not None:
                    self._feed.restart()
                self._answer(loop, call_id)
            case CheckIntegrity(call_id):
                self._check_integrity(loop, call_id)
            case ShowRequest(call_id, request_id):
                self._answer(loop, call_id, sequences=_shown(loop, request_id))
            case WatchEngine(on):
                self._watch(loop, on)
            case SwitchStepLog(call_id, on):
                self._switch_step_log(loop, call_id, on)
            case LoadAdapter(call_id, name, path):
                self._change_adapters(loop, call_id, lambda adapters: adapters.load(name, path))
            case UnloadAdapter(call_id, name):
                self._change_adapters(loop, call_id, lambda adapters: adapters.remove(name))
            case RestoreAdapter(name, path):
                try:
                    _adapters(loop).restore(name, path)
                except Exception as fault:
                    log.warning(
                        "an adapter of the last engine process cannot be restored: %s", _reason(fault)
                    )

    def _check_integrity(self, loop: EngineLoop, call_id: int) -> None:
        """A page that listens gets a record of the same step."""
        wrong = integrity_error(loop)
        has_pool = hasattr(loop.engine, "memory")
        if self._feed is not None:
            self._feed.publish(at_once=True)
        blocks = recount(cast("Engine", loop.engine)) if has_pool and wrong is None else {}
        self._answer(loop, call_id, wrong, blocks=blocks)

    def _watch(self, loop: EngineLoop, on: bool) -> None:
        if not hasattr(loop.engine, "memory"):
            return  # an encoder has no pool
        if self._feed is None:
            self._feed = EngineFeed(cast("Engine", loop.engine), lambda data: self.send(FeedRecord(data)))
        if on:
            self._feed.start()
        else:
            self._feed.stop()

    def _switch_step_log(self, loop: EngineLoop, call_id: int, on: bool) -> None:
        watch = getattr(loop.engine, "watch", None)
        if watch is None:
            self._answer(loop, call_id, "the engine of an embedding model has no step log")
            return
        self._step_log = self._step_log or watch(StepLog)
        if on:
            self._step_log.start()
        self._answer(loop, call_id, steps=[] if on else self._step_log.stop())

    def _answer(self, loop: EngineLoop, call_id: int, error: str | None = None, **found: Any) -> None:
        """`found`: what else the Done has."""
        self.send(Done(call_id, loop.engine.queue_stats(), loop.engine.snapshot(), error, **found))

    def _change_adapters(
        self, loop: EngineLoop, call_id: int, change: Callable[["Adapters"], Future[None] | None]
    ) -> None:
        """Answers at once, or in a later step where `change` returns a future: files are read beside the steps."""

        def ended(load: Future[None]) -> None:
            if not load.cancelled():  # else the engine ends, and the client knows
                fault = load.exception()
                self._answer(loop, call_id, None if fault is None else _reason(fault))

        try:
            load = change(_adapters(loop))
        except Exception as fault:
            self._answer(loop, call_id, _reason(fault))
            return
        if load is None:
            self._answer(loop, call_id)
        else:
            load.add_done_callback(ended)


def _read_command(data: bytes) -> ToEngine | Request | EmbedRequest:
    message = decode_to_engine(data)
    return message.unpacked() if isinstance(message, Add | Embed) else message


def _nothing(_loop: EngineLoop) -> None:
    """The command of bytes that were dropped: more may wait behind them."""


def integrity_error(loop: EngineLoop) -> str | None:
    """Recounts the pool; what is wrong with it, or None."""
    try:
        loop.engine.check_integrity()
    except RuntimeError as wrong:
        return str(wrong)
    return None


def _shown(loop: EngineLoop, request_id: str) -> list[ShownSequence]:
    if not hasattr(loop.engine, "memory"):
        return []
    return [
        ShownSequence(
            sequence.index,
            sequence.request.num_prompt_tokens,
            sequence.num_computed,
            sequence.token_ids.tobytes(),
            pack_ints(sequence.block_ids),
            sequence.request.tenant,
        )
        for sequence in cast("Engine", loop.engine).scheduler.sequences()
        if sequence.request.request_id == request_id
    ]


def _adapters(loop: EngineLoop) -> "Adapters":
    if loop.engine.adapters is None:
        raise AdapterError("adapters are off: start with --enable-lora, --lora-modules or --lora-dir")
    return loop.engine.adapters


def _reason(fault: BaseException) -> str:
    """Unexpected exceptions are logged as well; only this call fails."""
    if isinstance(fault, AdapterError):
        return str(fault)
    log.error("an adapter could not be changed", exc_info=fault)
    return f"{type(fault).__name__}: {fault}"


def remove_socket(path: str) -> None:
    """The socket's file and its folder, if they are still there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def prepare(socket: zmq.Socket[Any]) -> None:
    # No high-water mark: admission bounds the messages that can be under way.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def private_folder() -> Path:
    """A new folder of mode 0700, with a name short enough for a socket in it."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="quire-", dir=parent))
        if len(os.fsencode(folder)) <= _MAX_PATH - len("/engine"):
            return folder
        folder.rmdir()
    raise ConfigError("no folder with a name short enough for a local socket: set TMPDIR to one such as /tmp")
