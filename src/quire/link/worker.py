"""The engine process: `main` with the arguments SOCKET PIPE, its config on stdin. Started by supervise.py only.

stdin stays open for as long as the parent lives; its end tells the process that it is an orphan. SOCKET is a path, or
the TCP address of a client on another machine: then stdin has the keys before the config.
"""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, QuireError
from quire.engine.build import Built, build_engine
from quire.engine.build.resolve import is_simulated, resolve_device
from quire.engine.loop import EngineLoop, ShutdownSignal
from quire.kernels import build as compilation
from quire.link.channel import WorkerChannel, integrity_error, remove_socket
from quire.link.heartbeat import start_heartbeat
from quire.link.messages import Described, Failed, Note, Progress, Ready, read_config
from quire.link.remote import RemoteWorkerChannel, read_keys
from quire.observe.heap import freeze_heap
from quire.observe.host import MPS_PERCENTAGE, mps_percentage, see_one_gpu
from quire.observe.logs import get_logger
from quire.text.load import tokenizer_files
from quire.weights.source import Source

log = get_logger(__name__)
CLOSE_SECONDS = 5.0  # for threads that still read files
PROGRESS_SECONDS = 0.1
# exit codes; 1: unexpected; 2: a setting or a model that cannot work
FAULT, BAD_SETTING = 1, 2


@dataclass(slots=True)
class TerminationHandler:
    """SIGTERM: a serving engine finishes its requests, one that still loads ends at once; so does a second SIGTERM."""

    shutdown: ShutdownSignal = field(default_factory=ShutdownSignal)
    is_serving: bool = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.shutdown.requested or not self.is_serving:
            raise SystemExit(128 + number)
        self.shutdown.requested = True


def main() -> int:
    path, pipe = sys.argv[1], int(sys.argv[2])
    keys = read_keys() if path.startswith("tcp://") else None
    termination = TerminationHandler()
    signal.signal(signal.SIGTERM, termination)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    config = _on_its_gpu(read_config(sys.stdin.buffer))
    threading.Thread(target=_end_with_parent, args=(path,), name="parent-watch", daemon=True).start()
    channel = WorkerChannel(path) if keys is None else RemoteWorkerChannel(keys, path)
    try:
        return _serve(config, channel, termination, pipe)
    finally:
        channel.close()


def _on_its_gpu(config: EngineConfig) -> EngineConfig:
    """A device such as cuda:1 becomes the only GPU that this process sees or shares; before CUDA is started."""
    if (percentage := mps_percentage(config.runner.sm_share)) is not None:
        os.environ.setdefault(MPS_PERCENTAGE, percentage)
    kind, _, index = config.runner.device.partition(":")
    if kind != "cuda" or not index.isdigit():
        return config
    see_one_gpu(int(index))
    return replace(config, runner=replace(config.runner, device="cuda"))


def _serve(config: EngineConfig, channel: WorkerChannel, termination: TerminationHandler, pipe: int) -> int:
    try:
        device = config.runner.device
        if not is_simulated(device) and resolve_device(device).type == "cpu":
            compilation.announce(lambda line: channel.send(Note(line)))
        built = build_engine(config, _ProgressReporter(channel))
        ready = _ready(config, built)
    except QuireError as error:
        channel.send(Failed(type(error).__name__, str(error)))
        return BAD_SETTING
    except Exception as fault:
        log.debug("the engine could not start", exc_info=True)
        channel.send(Failed("fault", f"{type(fault).__name__}: {fault}"))
        return FAULT
    engine = built.engine
    loop = EngineLoop(engine, channel, termination.shutdown, when_idle=gc.collect)
    termination.is_serving = True
    channel.send(ready)
    start_heartbeat(pipe, loop)
    freeze_heap()
    try:
        loop.run()
        _log_end(loop, has_pool=built.report.vectors is None)
    except EngineDead as dead:  # a rank is gone: which one, and why
        log.error("the engine stopped: %s", dead)
        channel.send(Failed("fault", str(dead)))
        return FAULT
    except Exception as fault:
        log.exception("the engine stopped")
        channel.send(Failed("fault", f"{type(fault).__name__}: {fault}"))
        return FAULT
    finally:
        _exit_after_timeout()
        engine.close()
    return 0


def _log_end(loop: EngineLoop, has_pool: bool) -> None:
    """What was served, and whether every block was given back."""
    stats, wrong = loop.engine.snapshot(), integrity_error(loop)
    if wrong is not None:
        log.error("the engine ends, and its pool is not whole: %s", wrong)
    elif has_pool:
        log.info(
            "ended     %s requests and %s tokens served; the pool is whole, %d blocks in use",
            f"{stats.steps.num_requests:,}",
            f"{stats.steps.num_generated_tokens:,}",
            stats.pool.num_blocks_used,
        )


def _exit_after_timeout() -> None:
    """A thread may be blocked on a file: the process exits all the same, so that another can be started."""
    timer = threading.Timer(CLOSE_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _ready(config: EngineConfig, built: Built[Any]) -> Ready:
    report = built.report
    return Ready(
        model=report.model,
        pid=os.getpid(),
        described=_described(config, built.source),
        default_sampling=built.default_sampling,
        limits=report.limits,
        start=report.start,
        lines=report.lines(),
        pool=report.pool or None,
        vectors=report.vectors,
    )


def _described(config: EngineConfig, source: Source) -> Described:
    files = tokenizer_files(config.model, source)
    return Described(files.text, dict(files.config), dict(source.tokenizer_config()))


class _ProgressReporter:
    """Progress for the parent: the first and the last number of a stage, and some between."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._last = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        stage, at = self._last
        now = time.monotonic()
        if what != stage or done >= total or now - at > PROGRESS_SECONDS:
            self._last = (what, now)
            self._channel.send(Progress(what, done, total))


def _end_with_parent(path: str) -> None:
    """However the parent ended, this process does not outlive it and leaves no socket behind."""
    with suppress(OSError):
        while os.read(0, 1):  # not through sys.stdin: a thread blocked in there breaks the interpreter's exit
            pass
    remove_socket(path)
    os._exit(0)
