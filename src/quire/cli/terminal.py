"""Text and ctrl-C at a terminal. Imports nothing that takes time."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

INTERRUPTED = 130  # the exit code after ctrl-C, as in shells


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
