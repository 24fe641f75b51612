"""EngineLoop: runs commands, steps the engine, publishes what happened. Threads and processes differ in the transport.

AsyncLLM drives it in a thread (llm/async_llm.py), `quire serve` in a process (link/channel.py).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire.core.errors import QueueFull
from quire.core.request import EmbedRequest, Request
from quire.core.stats import EngineStats, QueueStats

if TYPE_CHECKING:  # it brings torch, which the client's process does without
    from quire.engine.engine import EngineCore

IDLE_SECONDS = 0.5  # between two looks at the shutdown signal while there is no work
STATS_SECONDS = 0.25  # between two snapshots of a busy engine
Command = Callable[["EngineLoop"], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A request left the queue for the first time, after `seconds` in it."""

    request_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one turn of the loop did."""

    updates: list[Any]  # SequenceUpdate, or Pooled of an encoder
    started: list[Started]
    queue: QueueStats
    stats: EngineStats | None  # at most every STATS_SECONDS; live records: encode or copy them at once


class Transport(Protocol):
    """The way between the loop and its client. All calls come from the loop's thread."""

    def receive(self, seconds: float) -> Command | None:
        """The next command, waiting up to `seconds` for it."""
        ...

    def publish(self, report: StepReport) -> None: ...

    def refuse(self, request_id: str, fault: Exception) -> None:
        """The engine did not accept the request; `fault` is an InvalidRequest, a QueueFull, or unexpected."""
        ...


@dataclass(slots=True)
class ShutdownSignal:
    """Set from a signal handler: the loop finishes the open requests, accepts no others and returns."""

    requested: bool = False


class EngineLoop:
    """Drives one engine from one thread. `num_turns` and `is_idle` are read by the heartbeat's thread."""

    def __init__(
        self,
        engine: "EngineCore[Any]",
        transport: Transport,
        shutdown: ShutdownSignal | None = None,
        when_idle: Callable[[], object] | None = None,
    ) -> None:
        """`when_idle` is called once whenever the engine has run out of work for IDLE_SECONDS."""
        self.engine = engine
        self._when_idle = when_idle
        self.num_turns = 0
        self.is_idle = False
        self._transport = transport
        self._shutdown = shutdown or ShutdownSignal()
        self._arrivals: dict[str, float] = {}  # of requests that have not started to run
        self._queue = QueueStats()  # as published last
        self._stats_at = 0.0  # when stats were published last
        self._is_stale = True  # something happened since
        self._is_checked = True  # no step since the pool was last recounted
        self._is_over = False

    def run(self) -> None:
        """Returns after `end`, or after a shutdown signal once no request is left."""
        while self._serve_commands():
            self.num_turns += 1
            launched = time.monotonic()
            updates = self.engine.step()
            self._is_checked = False
            self._publish(updates, launched)

    # ------------------------------------------------------------------ commands

    def add(self, request: Request | EmbedRequest) -> None:
        """Queues a request; a refusal goes back through the transport and concerns this request alone."""
        try:
            if self._shutdown.requested:
                raise QueueFull("the engine is shutting down: try again later")
            self.engine.add(request)
        except Exception as fault:
            self._transport.refuse(request.request_id, fault)
        else:
            self._arrivals[request.request_id] = time.monotonic()

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
            self._arrivals.pop(request_id, None)

    def stop(self, request_id: str, index: int) -> None:
        self.engine.stop(request_id, index)

    def end(self) -> None:
        """The loop returns before the next step; open requests are dropped."""
        self._is_over = True

    # ------------------------------------------------------------------ one turn

    def _serve_commands(self) -> bool:
        """Runs every command that came in; waits while there is no work. False: the end."""
        while not self._is_over:
            # At shutdown open requests are finished, but adapter files are not awaited.
            is_busy = self.engine.has_requests if self._shutdown.requested else self.engine.has_work
            command = self._transport.receive(0.0) if is_busy else self._wait()
            if command is None:
                return is_busy
            command(self)
            self._is_stale = True
        return False

    def _wait(self) -> Command | None:
        """The next command; None after a shutdown signal."""
        if self._is_stale:
            self._publish([], time.monotonic(), with_stats=True)
        self.is_idle = True
        try:
            while not self._shutdown.requested:
                command = self._transport.receive(IDLE_SECONDS)
                if command is not None:
                    return command
                self.engine.check_ranks()
                if not self._is_checked:
                    self.engine.check_integrity()
                    self._is_checked = True
                    if self._when_idle is not None:
                        self._when_idle()
            return None
        finally:
            self.is_idle = False

    def _publish(self, updates: list[Any], launched: float, with_stats: bool = False) -> None:
        """Publishes changes; a turn without any publishes nothing until stats are due."""
        started = self._take_started(updates, launched) if self._arrivals else []
        queue = self.engine.queue_stats()
        with_stats = with_stats or launched - self._stats_at > STATS_SECONDS
        self._is_stale = not with_stats
        if not (updates or started or with_stats or queue != self._queue):
            return
        self._queue = queue
        stats = None
        if with_stats:
            self._stats_at = launched
            stats = self.engine.snapshot()
        self._transport.publish(StepReport(updates, started, queue, stats))

    def _take_started(self, updates: list[Any], launched: float) -> list[Started]:
        """Requests that ran for the first time in the step launched at `launched`."""
        arrivals = self._arrivals
        request_ids = self.engine.started(updates).intersection(arrivals)
        return [Started(name, max(0.0, launched - arrivals.pop(name))) for name in request_ids]
