"""ZmqTransport: the engine process's side of the link. Decodes messages into commands and encodes step reports."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from quire.core.errors import AdapterError, InvalidRequest, QueueFull
from quire.engine.adapters import Adapters
from quire.engine.loop import Command, EngineLoop, StepReport
from quire.link.channel import WorkerChannel
from quire.link.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Done,
    Embed,
    LoadAdapter,
    Refused,
    ResetPrefixCache,
    RestoreAdapter,
    Shutdown,
    Stop,
    ToEngine,
    UnloadAdapter,
    decode_to_engine,
    pack_report,
)
from quire.observe.logs import get_logger

log = get_logger(__name__)


class ZmqTransport:
    """One message per command and one per step."""

    def __init__(self, channel: WorkerChannel, adapters: Adapters | None = None) -> None:
        """`adapters`: None where they are off."""
        self._channel = channel
        self._adapters = adapters

    # ------------------------------------------------------------------ engine.loop.Transport

    def receive(self, seconds: float) -> Command | None:
        if seconds and not self._channel.wait(int(seconds * 1000)):
            return None
        data = self._channel.receive()
        return None if data is None else partial(self._execute, decode_to_engine(data))

    def publish(self, report: StepReport) -> None:
        self._channel.send(pack_report(report))

    def refuse(self, request_id: str, fault: Exception) -> None:
        if isinstance(fault, InvalidRequest):
            message = Refused(request_id, "invalid", str(fault), fault.param)
        elif isinstance(fault, QueueFull):
            message = Refused(request_id, "unavailable", str(fault))
        else:
            log.error("request %s could not be added", request_id, exc_info=fault)
            message = Refused(request_id, "fault", f"{type(fault).__name__}: {fault}")
        self._channel.send(message)

    # ------------------------------------------------------------------ commands

    def _execute(self, message: ToEngine, loop: EngineLoop) -> None:
        match message:
            case Add() | Embed():
                loop.add(message.unpacked())
            case Abort(request_ids):
                loop.abort(request_ids)
            case Stop(request_id, index):
                loop.stop(request_id, index)
            case Shutdown():
                loop.end()
            case RestoreAdapter(name, path):
                self._restore(name, path)
            case _:
                self._call(message, partial(self._answer, loop, message.call_id), loop)

    def _call(self, message: ToEngine, answer: Callable[[str | None], None], loop: EngineLoop) -> None:
        """Operators' calls; `answer` takes the error, or None."""
        match message:
            case ResetPrefixCache():
                loop.engine.reset_prefix_cache()
                answer(None)
            case CheckIntegrity():
                answer(integrity_error(loop))
            case LoadAdapter(_, name, path):
                self._load(name, path, answer)
            case UnloadAdapter(_, name):
                self._unload(name, answer)

    def _answer(self, loop: EngineLoop, call_id: int, error: str | None) -> None:
        engine = loop.engine
        self._channel.send(Done(call_id, engine.queue_stats(), engine.snapshot(), error))

    # ------------------------------------------------------------------ adapters

    def _load(self, name: str, path: str, answer: Callable[[str | None], None]) -> None:
        """Answered by a later step: the file is read beside the steps."""

        def ended(load: Future[None]) -> None:
            if not load.cancelled():  # else the engine ends, and the client knows
                fault = load.exception()
                answer(None if fault is None else _reason(fault))

        try:
            load = self._enabled().load(name, path)
        except Exception as fault:
            answer(_reason(fault))
        else:
            load.add_done_callback(ended)

    def _unload(self, name: str, answer: Callable[[str | None], None]) -> None:
        error = None
        try:
            self._enabled().remove(name)
        except Exception as fault:
            error = _reason(fault)
        answer(error)

    def _restore(self, name: str, path: str) -> None:
        try:
            self._enabled().restore(name, path)
        except Exception as fault:
            log.warning("an adapter of the previous engine process cannot be restored: %s", _reason(fault))

    def _enabled(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("adapters are off: start with --enable-lora, --lora-modules or --lora-dir")
        return self._adapters


def integrity_error(loop: EngineLoop) -> str | None:
    """Recounts the pool; what is wrong with it, or None."""
    try:
        loop.engine.check_integrity()
    except RuntimeError as wrong:
        return str(wrong)
    return None


def _reason(fault: BaseException) -> str:
    """Unexpected exceptions are logged as well; only this call fails."""
    if isinstance(fault, AdapterError):
        return str(fault)
    log.error("an adapter could not be changed", exc_info=fault)
    return f"{type(fault).__name__}: {fault}"
