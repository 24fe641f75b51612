"""Stream: the updates of requests that were submitted together, in order, until all have ended."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Update = TypeVar("Update")  # SequenceUpdate, or an encoder's Pooled


class Stream(Generic[Update]):
    """Belongs to one consumer, which must close it. Updates wait in `pending` until the consumer takes them."""

    def __init__(self, request_ids: Iterable[str], close: Callable[["Stream[Update]"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.open_ids = set(self.request_ids)  # requests that the engine may still send updates for
        self.queue_seconds: dict[str, float] = {}  # of requests that have begun to run
        self.pending: deque[Update] = deque()
        self._close = close
        self._fault: Exception | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def wait(self) -> "asyncio.Future[None]":
        """A future that is done once there is something to take or to raise.

        It is no coroutine: a stream waits once per token, and the future is the only object that this makes.
        """
        wakeup = self._wakeup = asyncio.get_running_loop().create_future()
        if self.pending or self._fault is not None:
            wakeup.set_result(None)
        return wakeup

    def check(self) -> None:
        """Raises what ended the stream. Updates that came before it should be taken first."""
        if self._fault is not None:
            raise self._fault

    async def updates(self) -> list[Update]:
        """At least one update, waiting for it; raises what ended the stream."""
        while not self.pending:
            self.check()
            await self.wait()
        taken = list(self.pending)
        self.pending.clear()
        return taken

    def done(self, request_id: str) -> None:
        """The consumer has all it needs of this request, which has ended in the engine too."""
        self.open_ids.discard(request_id)

    def close(self) -> None:
        """Aborts what has not ended. Calling it twice is fine."""
        self._close(self)

    def fail(self, fault: Exception) -> None:
        """Ends the stream from outside: its requests are aborted at once, its consumer gets `fault`."""
        if self._fault is None:
            self._fault = fault
        self.close()
        self._wake()

    # called by the client

    def push(self, update: Update) -> None:
        self.pending.append(update)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
