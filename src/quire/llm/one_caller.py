"""OneCaller: one call at a time, in the process that loaded the model, until it is closed."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import EngineDead, QuireError


class OneCaller:
    """Refuses calls of an LLM or Embedder that could not end: a second one would take the first one's results, and a
    forked process has none of the engine's threads."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        if self._closed:
            raise EngineDead("the engine was closed: load the model again")
        if os.getpid() != self._process:
            raise EngineDead(
                f"this process was forked from {self._process}, which loaded the model: load it here instead"
            )
        if not self._lock.acquire(blocking=False):
            raise QuireError(
                "another call is under way, of another thread or an iterator that has not ended: wait for it, or use "
                "AsyncLLM for several callers"
            )
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        self._closed = True
