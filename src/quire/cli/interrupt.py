"""ctrl-C as a wish, not an exception: an exception inside a step would leave the engine half-way."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, ctrl-C makes the yielded function true; a third one raises KeyboardInterrupt as usual."""
    presses = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 2:  # something hangs: better half-way than not at all
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)
