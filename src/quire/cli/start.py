"""What commands share at a terminal: starting a model with progress and a report, dim text, ctrl-C."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from quire.cli.flags import engine_settings
from quire.core.config import EngineConfig
from quire.kernels import build as compilation
from quire.llm.llm import LLM
from quire.llm.progress import load_progress
from quire.weights.open import open_source
from quire.weights.source import Source


def start_llm(arguments: argparse.Namespace, *, quiet: bool = False) -> LLM:
    """The model that the flags name, loaded; the start report goes to stderr."""
    settings = engine_settings(arguments)
    if not quiet:
        announce_compiling()
    llm = LLM(settings.pop("model", None), use_tqdm=not quiet and sys.stderr.isatty(), **settings)
    if not quiet:
        for line in llm.report.lines():
            print(dim(line, sys.stderr), file=sys.stderr)
    return llm


def announce_compiling() -> None:
    """A line before the first start on a machine, whose minute of compiling would look like a hang."""
    with suppress(compilation.BuildError, OSError):  # without a compiler there is nothing to wait for
        if not compilation.library_path().exists():
            print("compiling kernels for this CPU, once: about a minute …", file=sys.stderr, flush=True)


def described_source(config: EngineConfig) -> Source:
    """The model's own description: a folder needs config.json only, and with weights it tells how they are stored."""
    options = config.model
    given = options.model or ""
    with_weights = not given or given.lower().endswith(".gguf") or any(Path(given).glob("*.safetensors"))
    load_format = "auto" if with_weights else "dummy"
    with load_progress(sys.stderr.isatty()) as progress:
        return open_source(
            options.model, revision=options.revision, load_format=load_format, progress=progress
        )


def dim(text: str, stream: TextIO) -> str:
    """`text` in the terminal's dim style, where `stream` is a terminal that can show it."""
    plain = not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, ctrl-C only sets a flag, which the yielded function reads: an exception would leave a step half done.

    A third ctrl-C raises KeyboardInterrupt. A process started with SIGINT ignored, as shells start background jobs,
    goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return
    presses = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 2:  # something hangs: better half done than never
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)
