"""Several HTTP processes on one port (--api-server-count), with one engine: started here, and replaced if they end."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.link.relay import Relay
from quire.llm.progress import load_progress
from quire.observe.logs import get_logger
from quire.server.http_process import ProcessSetup
from quire.server.run import (
    HANG_SECONDS,
    LAST_BYTES_SECONDS,
    adopt_logs,
    allow_open_files,
    bind,
    report_serving,
)
from quire.server.served_models import OnProgress
from quire.server.settings import ServerSettings

log = get_logger(__name__)
MAX_FAILURES = 5  # early ends of one process in a row; then the server ends
STEADY_SECONDS = 10.0  # a process that lived longer did not end early
RESTART_SECONDS = 0.5


def serve_processes(settings: ServerSettings, config: EngineConfig, show_progress: bool = False) -> None:
    """As run.serve, with settings.api_server_count HTTP processes."""
    bind(settings).close()  # a port that another server shares must count as taken
    listeners = [bind(settings, shared=True)]
    settings = replace(settings, port=listeners[0].getsockname()[1])
    listeners += [bind(settings, shared=True) for _ in range(settings.api_server_count - 1)]
    adopt_logs()
    allow_open_files()
    log.info("loading   %s", config.model.model or "the built-in model")
    try:
        with load_progress(show_progress) as progress:
            asyncio.run(_serve(settings, config, listeners, progress))
    finally:
        for listener in listeners:
            listener.close()


async def _serve(
    settings: ServerSettings,
    config: EngineConfig,
    listeners: Sequence[socket.socket],
    on_progress: OnProgress | None,
) -> None:
    await HttpProcesses(settings, config, listeners, on_progress).serve()


class HttpProcesses:
    """Each listens on a socket of its own, all on the same address: the system divides connections between them.

    The sockets stay open here, so connections wait while a process that ended is replaced.
    """

    def __init__(
        self,
        settings: ServerSettings,
        config: EngineConfig,
        listeners: Sequence[socket.socket],
        on_progress: OnProgress | None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._listeners = listeners
        self._relay = Relay(config, on_progress, settings.engine_timeout, self._one_serves)
        self._running: dict[int, asyncio.subprocess.Process] = {}  # by index
        self._num_serving = 0
        self._num_signals = 0

    async def serve(self) -> None:
        """Until a signal, or until the engine cannot start or a process cannot be kept alive, which is raised."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        starting = asyncio.create_task(self._relay.start())
        keeping = asyncio.create_task(self._keep_all())
        try:
            await asyncio.wait({starting, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await keeping
        finally:
            starting.cancel()
            self._end()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._wait_for_all()
            await self._relay.close()

    async def _keep_all(self) -> None:
        await asyncio.gather(*(self._keep(index) for index in range(len(self._listeners))))

    async def _keep(self, index: int) -> None:
        num_failures = 0
        while not self._num_signals:
            began = time.monotonic()
            process = self._running[index] = await self._spawn(index, replaces=num_failures > 0)
            code = await process.wait()
            self._relay.drop(process.pid)
            if self._num_signals:
                return
            early = time.monotonic() - began < STEADY_SECONDS
            num_failures = num_failures + 1 if early else 1
            if num_failures >= MAX_FAILURES:
                raise QuireError(
                    f"HTTP process {index} ended {num_failures} times in a row (code {code}): its log says why"
                )
            log.error(
                "HTTP process %d (pid %d) ended with code %s; starting it again", index, process.pid, code
            )
            await asyncio.sleep(RESTART_SECONDS)

    async def _spawn(self, index: int, replaces: bool) -> asyncio.subprocess.Process:
        descriptor = self._listeners[index].fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire.server.http_process", str(descriptor), self._relay.path),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # a terminal's ctrl-C is for this process
        )
        is_first = index == 0 and not replaces
        setup = ProcessSetup(self._config, self._settings, is_first, replaces)
        data = msgspec.msgpack.encode(setup)
        assert process.stdin is not None
        # dead already: its exit code will say
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(len(data).to_bytes(4, "little") + data)
            await process.stdin.drain()
        return process

    def _one_serves(self) -> None:
        self._num_serving += 1
        if self._num_serving == len(self._listeners):
            log.info("processes %d for HTTP, one for the engine", len(self._listeners))
            report_serving(self._settings, self._listeners[0])

    # ------------------------------------------------------------------ the end

    def _signalled(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("%s: every HTTP process finishes what it has", number.name)
            self._end()
        else:
            self._signal(signal.SIGTERM)  # they drain already: this aborts what is left

    def _end(self) -> None:
        self._num_signals = max(1, self._num_signals)
        self._relay.let_end()
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()

    async def _wait_for_all(self) -> None:
        limit = self._settings.shutdown_timeout + LAST_BYTES_SECONDS + HANG_SECONDS
        waits = [asyncio.create_task(process.wait()) for process in self._running.values()]
        if waits:
            _done, late = await asyncio.wait(waits, timeout=limit)
            if late:
                self._signal(signal.SIGKILL)
                await asyncio.wait(late)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
