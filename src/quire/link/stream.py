"""Stream: the updates of requests that were submitted together, in order, until all have ended."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Update = TypeVar("Update")  # SequenceUpdate, or an encoder's Pooled


class Stream(Generic[Update]):
    """Belongs to one consumer, who must close it. Updates that nobody took yet come together."""

    def __init__(self, request_ids: Iterable[str], close: Callable[["Stream[Update]"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.open_ids = set(self.request_ids)  # those that the engine may still say something about
        self.queue_seconds: dict[str, float] = {}  # of those that have begun to run
        self._close = close
        self._pending: list[Update] = []
        self._fault: Exception | None = None
        self._wakeup: asyncio.Future[None] | None = None

    async def updates(self) -> list[Update]:
        """At least one update, waiting for it; raises what ended the stream."""
        while not self._pending:
            if self._fault is not None:
                raise self._fault
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        pending, self._pending = self._pending, []
        return pending

    def done(self, request_id: str) -> None:
        """The consumer has all it wants of this request, which has ended in the engine too."""
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
        self._pending.append(update)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
