"""Supervision: starts the engine process, watches it, and starts another when it dies."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

from quire.core import errors
from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, QuireError
from quire.link.channel import Channel
from quire.link.heartbeat import until_hung
from quire.link.messages import (
    Failed,
    FromEngine,
    Note,
    Progress,
    Ready,
    Shutdown,
    framed_config,
)
from quire.observe.host import ending, python_command
from quire.observe.logs import get_logger

log = get_logger(__name__)
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds before a restart; doubled each time
STEADY_SECONDS = 60.0  # an engine that lived longer resets the backoff
LAST_MESSAGES_SECONDS = 0.2  # for messages that a dead process left behind
CLOSE_SECONDS = 5.0
STEP_SECONDS = 300.0  # a step that takes longer hangs


class Client(Protocol):
    """What the supervisor reports to: an EngineClient, or the Relay of several processes."""

    @property
    def has_work(self) -> bool: ...

    def engine_up(self, ready: Ready, channel: Channel) -> None: ...

    def engine_down(self, fault: EngineDead) -> None: ...

    def engine_sent(self, message: FromEngine) -> None: ...


class Process(Protocol):
    """What the supervisor uses of an asyncio.subprocess.Process; the engine may run on another machine."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...


class Supervisor:
    """One engine process at a time. A failed first start is raised; later starts are retried with backoff."""

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        on_progress: Callable[[str, int, int], None] | None = None,
        timeout: float = STEP_SECONDS,
        what: str = "engine",
    ) -> None:
        """`what` names the engine in messages; `timeout` is for one step."""
        self._what = what
        self._config = config
        self._client = client
        self._on_progress = on_progress
        self._timeout = timeout
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[Ready] | None = None
        self._closing = False
        self.restarts = True  # False: a process that ends is not replaced
        self._asked = False  # an operator wants another process
        self._failure: Failed | None = None  # as the process reported it
        self._hung: str | None = None  # why it was killed
        self.ready: Ready | None = None  # None: not now
        self.status = f"the {what} has not been started"
        self.num_starts = 0
        self.node: str | None = None  # where the process runs, if not on this machine
        self.num_failures = 0  # failed starts and early deaths, in a row

    async def start(self) -> Ready:
        """Returns when the engine is ready; raises why it cannot be."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine-supervisor")
        return await self._first

    async def close(self) -> None:
        """Ends the process: by a message or SIGTERM, then by SIGKILL. Calling it twice is fine."""
        self._closing = True
        await self._end_process()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _end_process(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            if self.ready is not None and self._channel is not None:
                self._channel.send(Shutdown())
            else:
                _signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
            except TimeoutError:
                _signal(process, signal.SIGKILL)

    def request_ended(self, request_id: str) -> None:
        """The engine knows already."""

    async def restart(self) -> None:
        """Ends the process as `close` does; another one starts at once. Open requests fail: wait for them first."""
        self._asked = True
        await self._end_process()

    async def _run(self) -> None:
        while not self._closing:
            started = time.monotonic()
            fault = await self._live()
            self.ready = None
            if self._closing or not self.restarts:
                self.status = str(fault)
                return
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(fault)
                return
            if self._asked:
                self._asked = False
                continue
            lived = time.monotonic() - started
            self.num_failures = 1 if lived > STEADY_SECONDS else self.num_failures + 1
            backoff = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** (self.num_failures - 1))
            self.status = f"{fault}; it will be started again"
            log.error("%s; starting it again in %.1f s", fault, backoff)
            await asyncio.sleep(backoff)

    async def _live(self) -> QuireError:
        """Runs one process to its end; returns how it ended."""
        self._failure = self._hung = None
        self.status = f"the {self._what} is starting"
        try:
            process, channel, beats = await self._launch()
        except QuireError as refused:
            return refused
        self._process, self._channel = process, channel
        self.num_starts += 1
        receiving = asyncio.create_task(self._receive(channel), name="engine-messages")
        watching = asyncio.create_task(self._kill_when_hung(process, channel, beats), name="engine-watch")
        lingering = asyncio.create_task(_kill_if_lingering(process, receiving), name="engine-end")
        try:
            await process.wait()
            # Its last messages may still be on their way.
            await asyncio.wait({receiving}, timeout=LAST_MESSAGES_SECONDS)
            fault = self._how_it_ended(process)
            if self.ready is not None:
                self.ready = None
                self._client.engine_down(EngineDead(str(fault)))
            return fault
        finally:
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
            for task in (receiving, watching, lingering):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if beats is not None:
                os.close(beats)
            channel.close()

    async def _launch(self) -> tuple[Process, Channel, int | None]:
        """Starts a process; with the channel to it and a descriptor that its heartbeats are read from."""
        channel = Channel()
        beats, pipe = os.pipe()
        try:
            return await _spawn(self._config, channel.path, pipe), channel, beats
        except OSError as error:
            channel.close()
            os.close(beats)
            raise EngineDead(f"the {self._what} process cannot be started ({error})") from error
        finally:
            os.close(pipe)

    async def _kill_when_hung(self, process: Process, _channel: Channel, beats: int | None) -> None:
        assert beats is not None
        self._hung = await until_hung(
            beats, self._timeout, lambda: self.ready is not None and self._client.has_work
        )
        _signal(process, signal.SIGKILL)  # it reacts to nothing else

    async def _receive(self, channel: Channel) -> None:
        while self._failure is None:
            message = await channel.receive()
            match message:
                case Ready():
                    self._up(message, channel)
                case Failed():
                    self._failure = message
                case Note(text):
                    log.info("%s", text)
                case Progress(what, done, total):
                    if self._on_progress is not None:
                        self._on_progress(what, done, total)
                case _:
                    self._client.engine_sent(message)

    def _up(self, ready: Ready, channel: Channel) -> None:
        self.ready = ready
        self.status = "ready"
        self._client.engine_up(ready, channel)
        assert self._first is not None
        if self._first.done():
            log.info(
                "the %s is ready again (pid %d, started in %.1f s)",
                self._what,
                ready.pid,
                ready.start.seconds,
            )
        else:
            self._first.set_result(ready)

    def _how_it_ended(self, process: Process) -> QuireError:
        if self._failure is not None and self.ready is None:
            kind = getattr(errors, self._failure.kind, EngineDead)
            if kind is EngineDead:
                return EngineDead(f"the {self._what} cannot start: {self._failure.message}")
            return kind(self._failure.message)
        if self._failure is not None:
            return EngineDead(
                f"the {self._what} process (pid {process.pid}) stopped: {self._failure.message}"
            )
        how = self._hung or ending(process.returncode)
        return EngineDead(f"the {self._what} process (pid {process.pid}) {how}")


async def _spawn(config: EngineConfig, path: str, pipe: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *python_command("quire.link.worker", path, pipe),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=(pipe,),
        start_new_session=True,  # a terminal's ctrl-C is for the parent, also while the engine still imports
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already: its exit code will say
        process.stdin.write(framed_config(config))
        await process.stdin.drain()
    return process


async def _kill_if_lingering(process: Process, receiving: asyncio.Task[None]) -> None:
    """Kills a worker that reported a fatal error but has not exited within CLOSE_SECONDS (e.g. blocked on I/O)."""
    await asyncio.wait({receiving})
    await asyncio.sleep(CLOSE_SECONDS)
    _signal(process, signal.SIGKILL)


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
