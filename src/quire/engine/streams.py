"""Stream: the updates of requests that were submitted together. OpenStreams: all streams of one client.

Both are used from one event loop; the loop that steps the engine runs in another thread or process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Update(Protocol):
    """A SequenceUpdate, or an encoder's Pooled."""

    @property
    def request_id(self) -> str: ...


U = TypeVar("U", bound=Update)


class Stream(Generic[U]):
    """Updates in order, until all requests have ended. Has one consumer, which must close it.

    Updates wait in `pending` until the consumer takes them.
    """

    def __init__(self, request_ids: Iterable[str], close: Callable[["Stream[U]"], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.open_ids = set(self.request_ids)  # requests that the engine may still send updates for
        self.queue_seconds: dict[str, float] = {}  # of requests that have started to run
        self.pending: deque[U] = deque()
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
        """Raises the fault that ended the stream. Updates that came before it should be taken first."""
        if self._fault is not None:
            raise self._fault

    async def updates(self) -> list[U]:
        """At least one update, waiting for it; raises the fault that ended the stream."""
        while not self.pending:
            self.check()
            await self.wait()
        taken = list(self.pending)
        self.pending.clear()
        return taken

    def done(self, request_id: str) -> None:
        """The request has ended in the engine, and the consumer needs no more of it."""
        self.open_ids.discard(request_id)

    def close(self) -> None:
        """Aborts what has not ended. Calling it twice is fine."""
        self._close(self)

    def fail(self, fault: Exception) -> None:
        """Aborts the requests at once; the consumer gets the pending updates, then `fault`. The first fault counts."""
        if self._fault is None:
            self._fault = fault
        self.close()
        self._wake()

    def push(self, update: U) -> None:
        """Called by the client for each update from the engine."""
        self.pending.append(update)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class OpenStreams(Generic[U]):
    """Streams by request id. Updates and faults of requests that are not open any more are dropped."""

    def __init__(
        self, abort: Callable[[list[str]], None], ended: Callable[[str], None] = lambda _request_id: None
    ) -> None:
        """`abort` tells the engine to end requests; `ended` is called once for each request that is no longer open."""
        self._abort = abort
        self._ended = ended
        self._streams: dict[str, Stream[U]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, request_id: str) -> Stream[U] | None:
        return self._streams.get(request_id)

    def open(self, request_ids: Iterable[str]) -> Stream[U]:
        stream: Stream[U] = Stream(request_ids, self._close)
        for request_id in stream.request_ids:
            self._streams[request_id] = stream
        return stream

    def deliver(self, updates: Iterable[U]) -> None:
        streams = self._streams
        for update in updates:
            stream = streams.get(update.request_id)
            if stream is not None:  # else the request was aborted while the update was on its way
                stream.push(update)

    def refuse(self, request_id: str, fault: Exception) -> None:
        """The engine did not accept the request; the others of its stream are aborted."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.done(request_id)
            stream.fail(fault)

    def fail_all(self, fault: Exception) -> int:
        """Ends every open stream with `fault`; the number of streams."""
        streams = set(self._streams.values())
        for stream in streams:
            stream.fail(fault)
        return len(streams)

    def _close(self, stream: Stream[U]) -> None:
        open_ids = []
        for request_id in stream.request_ids:
            if self._streams.get(request_id) is stream:  # not if another stream has the id by now
                del self._streams[request_id]
                self._ended(request_id)
                open_ids += [request_id] if request_id in stream.open_ids else []
        if open_ids:
            self._abort(open_ids)
