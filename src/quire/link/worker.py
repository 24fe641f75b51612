"""The engine process: `python -m quire.link.worker SOCKET PIPE`, its config on stdin. Started by supervise.py only.

stdin stays open for as long as the parent lives; its end is how an orphan learns that it is one.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.engine.build import Built, build
from quire.engine.encoder_build import BuiltEncoder, build_encoder
from quire.engine.encoder_engine import EncoderEngine
from quire.engine.engine import Engine
from quire.kernels import build as compilation
from quire.link.channel import WorkerChannel, remove_socket
from quire.link.encoder_loop import EncoderLoop
from quire.link.heartbeat import beat
from quire.link.loop import EngineLoop
from quire.link.messages import (
    AnyReady,
    Described,
    EncoderReady,
    Failed,
    Note,
    Progress,
    Ready,
    read_config,
)
from quire.observe.logs import get_logger
from quire.text.load import tokenizer_files
from quire.weights.peek import is_encoder
from quire.weights.source import Source

log = get_logger(__name__)
CLOSE_SECONDS = 5.0  # for threads that still read files
PROGRESS_SECONDS = 0.1
# 1: unforeseen; 2: a setting or a model that cannot work
FAULT, BAD_SETTING = 1, 2


class Leave:
    """SIGTERM: an engine at work finishes what it has, one that loads ends at once; so does a second SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        self.serving = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.asked or not self.serving:
            raise SystemExit(128 + number)
        self.asked = True


def main() -> int:
    path, pipe = sys.argv[1], int(sys.argv[2])
    leave = Leave()
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    config = read_config(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, args=(path,), name="parent-watch", daemon=True).start()
    channel = WorkerChannel(path)
    try:
        return _serve(config, channel, leave, pipe)
    finally:
        channel.close()


def _serve(config: EngineConfig, channel: WorkerChannel, leave: Leave, pipe: int) -> int:
    try:
        _announce_compiling(channel)
        served = _load(config, channel, leave)
    except QuireError as error:
        channel.send(Failed(type(error).__name__, str(error)))
        return BAD_SETTING
    except Exception as fault:
        log.debug("the engine could not start", exc_info=True)
        channel.send(Failed("fault", f"{type(fault).__name__}: {fault}"))
        return FAULT
    leave.serving = True
    channel.send(served.ready)
    beat(pipe, served.loop)
    try:
        served.loop.run()
    except Exception as fault:
        log.exception("the engine stopped")
        channel.send(Failed("fault", f"{type(fault).__name__}: {fault}"))
        return FAULT
    finally:
        _end_in_time()
        served.engine.close()
    return 0


def _end_in_time() -> None:
    """A thread may wait for a file that never comes: the process ends all the same, and another can take its place."""
    timer = threading.Timer(CLOSE_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


@dataclass(frozen=True, slots=True)
class _Served:
    """An engine, what it says of itself, and the loop that drives it."""

    engine: Engine | EncoderEngine
    ready: AnyReady
    loop: EngineLoop | EncoderLoop


def _load(config: EngineConfig, channel: WorkerChannel, leave: Leave) -> _Served:
    """What the model is decides which engine serves it."""
    reporter = _Reporter(channel)
    if is_encoder(config.model.model, config.model.revision):
        encoder = build_encoder(config, reporter)
        loop = EncoderLoop(encoder.engine, channel, leave)
        return _Served(encoder.engine, _encoder_ready(config, encoder), loop)
    built = build(config, reporter)
    return _Served(built.engine, _ready(config, built), EngineLoop(built.engine, channel, leave))


def _ready(config: EngineConfig, built: Built) -> Ready:
    report, limits = built.report, built.engine.limits
    return Ready(
        model=report.model,
        pid=os.getpid(),
        described=_described(config, built.source),
        default_sampling=built.default_sampling,
        vocab_size=limits.vocab_size,
        max_model_len=report.max_model_len,
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        num_blocks=report.pool.num_blocks,
        block_size=report.pool.block_size,
        pool_bytes=report.pool.num_bytes,
        weights_bytes=report.weights_bytes,
        num_threads=report.num_threads,
        seconds=report.seconds,
        lines=report.lines(),
    )


def _encoder_ready(config: EngineConfig, built: BuiltEncoder) -> EncoderReady:
    report, limits = built.report, built.engine.limits
    return EncoderReady(
        model=report.model,
        pid=os.getpid(),
        described=_described(config, built.source),
        vocab_size=limits.vocab_size,
        width=report.width,
        normalize=report.normalize,
        max_model_len=report.max_model_len,
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        weights_bytes=report.weights_bytes,
        num_threads=report.num_threads,
        seconds=report.seconds,
        lines=report.lines(),
    )


def _described(config: EngineConfig, source: Source) -> Described:
    files = tokenizer_files(config.model, source)
    return Described(files.text, dict(files.config), dict(source.tokenizer_config()))


class _Reporter:
    """Progress for the parent: a stage's first and last figure, and some between."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._last = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        stage, at = self._last
        now = time.monotonic()
        if what != stage or done >= total or now - at > PROGRESS_SECONDS:
            self._last = (what, now)
            self._channel.send(Progress(what, done, total))


def _announce_compiling(channel: WorkerChannel) -> None:
    """The one start that takes a minute must not look like one that hangs."""
    with suppress(compilation.BuildError, OSError):  # without a compiler there is nothing to wait for
        if not compilation.library_path().exists():
            channel.send(Note("compiling kernels for this CPU, once: about a minute …"))


def _end_with_parent(path: str) -> None:
    """Whatever ended the parent, this process does not outlive it, and leaves no socket behind."""
    with suppress(OSError):
        while os.read(0, 1):  # not through sys.stdin: a thread blocked in there breaks the interpreter's exit
            pass
    remove_socket(path)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
