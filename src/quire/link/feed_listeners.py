"""FeedListeners: who listens to an engine's feed in this process. The engine works for it only while there is one."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_RECORDS = 32  # of a listener that is slow; then it starts again with a whole record


class FeedListener:
    """Has one consumer."""

    def __init__(self) -> None:
        self._records: deque[bytes] = deque()
        self._fault: Exception | None = None
        self._wakeup = asyncio.Event()

    async def next(self) -> bytes:
        """The next record; raises what ended the feed."""
        while not self._records:
            if self._fault is not None:
                raise self._fault
            self._wakeup.clear()
            await self._wakeup.wait()
        return self._records.popleft()

    def push(self, record: bytes) -> bool:
        """False: the listener is too slow, and what waited for it is dropped."""
        is_slow = len(self._records) >= MAX_RECORDS
        if is_slow:
            self._records.clear()
        else:
            self._records.append(record)
        self._wakeup.set()
        return not is_slow

    def fail(self, fault: Exception) -> None:
        self._fault = fault
        self._wakeup.set()


class FeedListeners:
    """Used from one event loop."""

    def __init__(self, switch: Callable[[bool], None]) -> None:
        """`switch` tells the engine: with True it begins with a whole record, with False it stops."""
        self._switch = switch
        self._listeners: set[FeedListener] = set()

    @contextmanager
    def listen(self) -> Iterator[FeedListener]:
        listener = FeedListener()
        self._listeners.add(listener)
        self._switch(True)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._switch(False)

    def deliver(self, record: bytes) -> None:
        kept_up = [listener.push(record) for listener in self._listeners]
        if not all(kept_up):
            self._switch(True)

    def fail(self, fault: Exception) -> None:
        """Ends every listener with `fault`."""
        for listener in self._listeners:
            listener.fail(fault)
