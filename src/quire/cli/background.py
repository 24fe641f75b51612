"""Servers that `quire run` starts in the background: one JSON file and one log each, in `servers` of the cache folder.

A file is trusted only while the process that it names runs; files of processes that are gone are removed.
"""

import fcntl
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from quire.core.errors import ConfigError, EngineDead
from quire.fleet.model_set import STARTED
from quire.observe.host import cache_folder, process_birth
from quire.weights.builtin import BUILTIN_MODEL, is_builtin
from quire.weights.hub import hub_name

HEALTH_SECONDS = 5.0
STOP_SECONDS = 40.0  # the server itself allows 25 s for running requests
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    model: str  # as `server_name` gives it
    url: str
    pid: int
    birth: str  # tells the process from a later one with the same pid
    since: float  # seconds since 1970
    flags: list[str]  # of `quire serve`
    log: str

    @property
    def is_alive(self) -> bool:
        return process_birth(self.pid) == self.birth

    @property
    def is_healthy(self) -> bool:
        return self.health() is not None

    def health(self) -> dict[str, Any] | None:
        """What /health says; None if it does not answer with 200."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return json.loads(response.read()) if response.status == http.HTTPStatus.OK else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def server_name(model: str | None) -> str:
    """The name by which a model's server is known: `builtin`, an absolute path, or the hub id without `hf.co/`."""
    if model is None or is_builtin(model):
        return BUILTIN_MODEL
    path = Path(model).expanduser()
    return str(path.resolve() if path.exists() else hub_name(model))


def running() -> list[BackgroundServer]:
    """The servers whose process runs, oldest first. Removes the files of the others."""
    servers = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # unreadable: as one of a process that is gone
            server = BackgroundServer(**json.loads(path.read_text(encoding="utf-8")))
            if server.is_alive:
                servers.append(server)
                continue
        path.unlink(missing_ok=True)
    return sorted(servers, key=lambda server: server.since)


def server_of(name: str) -> BackgroundServer | None:
    return next((server for server in running() if server.model == name), None)


def reusable(name: str, flags: Sequence[str]) -> BackgroundServer | None:
    """The model's server if it runs. ConfigError if it does not answer, or was started with other flags than given."""
    server = server_of(name)
    if server is None:
        return None
    if not server.is_healthy:
        raise ConfigError(
            f"the server of {name} (pid {server.pid}) does not answer at {server.url}: `quire stop {name}`, then run "
            f"it again; its log is {server.log}"
        )
    if flags and list(flags) != server.flags:
        raise ConfigError(
            f"the server of {name} runs with {' '.join(server.flags) or 'no flags'}, and {' '.join(flags)} is asked "
            f"for: `quire stop {name}` first, or leave the flags out"
        )
    return server


@contextmanager
def start_lock() -> Iterator[None]:
    """One start at a time on this machine: a second `quire run` waits and then reuses the server."""
    _folder().mkdir(parents=True, exist_ok=True)
    with open(_folder() / ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start(name: str, flags: Sequence[str], keep_alive: str) -> BackgroundServer:
    """Starts `quire serve` and returns when it serves; EngineDead with the last error of its log if it ends before.

    SIGTERM and a terminal that closes end the start with the server, of which there is no record yet.
    """
    stem = f"{Path(name).name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    log = _folder() / f"{stem}.log"
    command = [sys.executable, "-m", "quire", "serve", *([] if name == BUILTIN_MODEL else [name])]
    command += ["--host", "127.0.0.1", "--port", "0", "--log-level", "info", "--log-format", "text"]
    command += ["--keep-alive", keep_alive, *flags]
    with _ended_by_signals(), open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = _serving(name, process, log)
            birth = process_birth(process.pid) or ""
            server = BackgroundServer(name, url, process.pid, birth, time.time(), list(flags), str(log))
            half = _folder() / f".{stem}"
            half.write_text(json.dumps(asdict(server)), encoding="utf-8")
            half.replace(_folder() / f"{stem}.json")
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return server


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit, unless this process ignores them."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(server: BackgroundServer) -> None:
    """SIGTERM, after which running requests are finished, and SIGKILL to the whole group if that takes too long."""
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while server.is_alive:
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            break
        time.sleep(LOOK_SECONDS)
    running()  # removes the file


def _serving(name: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    while True:
        ended = process.poll() is not None  # before the log is read: its last line is then there
        text = log.read_text(encoding="utf-8", errors="replace")
        if started := STARTED.search(text):
            return started[1]
        if ended:
            errors = [line for line in text.splitlines() if "error" in line.lower()]
            why = (
                errors[-1].rpartition("error:")[2].strip()
                if errors
                else f"it ended with {process.returncode}"
            )
            raise EngineDead(f"{name} cannot be started: {why} (log: {log})")
        time.sleep(LOOK_SECONDS)


def _folder() -> Path:
    return cache_folder() / "servers"
