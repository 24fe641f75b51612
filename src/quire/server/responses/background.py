"""Responses that run in the background: their events, their end, and readers that follow them."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message, Receive

from quire.core.errors import InvalidRequest
from quire.observe.logs import get_logger
from quire.server.access import until_gone
from quire.server.errors import ApiError, ClientGone, as_api_error
from quire.server.protocol.responses import Item
from quire.server.reply import named_event, named_events
from quire.server.responses.builder import ResponseBuilder
from quire.server.translation import TranslatedEvents

log = get_logger(__name__)
MAX_RUNNING = 128
MAX_EVENT_BYTES = 4 << 20  # of one response, for readers that come back


class Cancelled(Exception):
    """The response's owner asked for its end."""


async def stay() -> Message:
    """A `receive` of a client that never leaves."""
    return await asyncio.get_running_loop().create_future()


class EventLog:
    """The last events of a stream, by their numbers, for any number of readers."""

    def __init__(self, events: bytes = b"", *, ended: bool = False) -> None:
        """`events`: what `encoded` of an earlier log returned."""
        self.ended = ended
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed: asyncio.Future[None] | None = None
        self.first = 0  # the number of the first event that is kept
        self.add(events)
        if self._events:
            payload = self._events[0].partition(b"data: ")[2]
            self.first = msgspec.json.decode(payload)["sequence_number"]

    @property
    def end_number(self) -> int:
        """The number of the next event."""
        return self.first + len(self._events)

    def add(self, data: bytes) -> None:
        for event in data.split(b"\n\n")[:-1]:  # JSON has no line breaks
            self._events.append(event + b"\n\n")
            self._num_bytes += len(event) + 2
        while self._num_bytes > MAX_EVENT_BYTES and len(self._events) > 1:
            self._num_bytes -= len(self._events.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def since(self, number: int) -> bytes:
        """The events from this number on."""
        if number < self.first:
            raise InvalidRequest(
                f"starting_after={number - 1}: the events before {self.first} are no longer kept: retrieve the "
                "response without stream",
                "starting_after",
            )
        return b"".join([self._events[index - self.first] for index in range(number, self.end_number)])

    def encoded(self) -> bytes:
        return b"".join(self._events)

    def changed(self) -> "asyncio.Future[None]":
        """Done when an event is added, or the log ends."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


def ended_log(events: bytes) -> EventLog | None:
    """The log of a response that has ended, if its events were kept."""
    return EventLog(events, ended=True) if events else None


class FollowedEvents:
    """An EventSource: the events of a log from a number on, until it ends or the client leaves."""

    def __init__(self, events: EventLog, number: int, receive: Receive) -> None:
        self.generation = self
        self._log = events
        self._number = number
        events.since(number)  # refused before the response begins
        self._gone = asyncio.create_task(until_gone(receive))

    @property
    def is_open(self) -> bool:
        return not self._log.ended or self._number < self._log.end_number

    async def wait(self) -> None:
        if self._number >= self._log.end_number and not self._log.ended:
            await asyncio.wait({self._log.changed(), self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done():
            raise ClientGone

    def take(self) -> bytes:
        data = self._log.since(self._number)
        self._number = max(self._number, self._log.end_number)
        return data

    def end(self) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        shown = {"code": error.code, "message": str(error), "param": error.param}
        return named_event({"type": "error", **shown, "sequence_number": self._number})

    def close(self) -> None:
        self._gone.cancel()


@dataclass(slots=True, eq=False)
class RunningResponse:
    owner: str | None
    items: list[Item]  # its input and the conversation before it
    num_bytes: int  # of the items
    builder: ResponseBuilder
    source: TranslatedEvents
    held: ExitStack  # the place among the requests of its key, until it ends
    keep: Callable[[bytes], None]  # called with the events when it has ended
    events: EventLog | None  # if it is streamed
    task: "asyncio.Task[None] | None" = field(default=None)

    def add(self, data: bytes) -> None:
        if self.events is not None:
            self.events.add(data)

    async def run(self) -> None:
        generation = self.source.generation
        try:
            while generation.is_open:
                await generation.wait()
                self.add(self.source.take())
            self.add(self.source.end())
        except Cancelled:
            self.add(named_events(self.builder.cancel()))
        except Exception as fault:
            error = as_api_error(fault)
            if error.status == 500:
                log.error("%s", fault, extra={"request_id": self.builder.response["id"]})
            self.add(self.source.fail(error))
        finally:
            generation.close()
            self.held.close()
            if self.events is not None:
                self.events.end()
            self.keep(self.events.encoded() if self.events is not None else b"")


class BackgroundResponses:
    """The responses that run now: at most MAX_RUNNING, and `max_bytes` of input."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._running: dict[str, RunningResponse] = {}

    def check_room(self, num_bytes: int) -> None:
        """Raises 429 if a response with that much input cannot run in the background now."""
        total = sum(running.num_bytes for running in self._running.values())
        if len(self._running) >= MAX_RUNNING or total + num_bytes > self._max_bytes:
            raise ApiError(
                429,
                f"{len(self._running)} responses with {total} bytes of input run in the background already, of at most "
                f"{MAX_RUNNING} and {self._max_bytes} bytes: wait for one to end",
                code="background_full",
                headers={"Retry-After": "1"},
            )

    def start(self, running: RunningResponse) -> None:
        """Raises 429, and aborts the response, if others have taken the room since `check_room`."""
        try:
            self.check_room(running.num_bytes)
        except ApiError:
            running.source.generation.close()
            running.held.close()
            raise
        response_id = running.builder.response["id"]
        running.add(named_events(running.builder.queue()))
        self._running[response_id] = running
        running.task = asyncio.create_task(self._run(response_id, running.run()))

    async def _run(self, response_id: str, run: Coroutine[Any, Any, None]) -> None:
        try:
            await run
        finally:
            del self._running[response_id]

    def get(self, owner: str | None, response_id: str) -> RunningResponse | None:
        running = self._running.get(response_id)
        return running if running is not None and running.owner == owner else None

    async def cancel(self, owner: str | None, response_id: str) -> None:
        """Returns when it has ended; does nothing if it does not run."""
        running = self.get(owner, response_id)
        if running is not None and running.task is not None:
            running.source.generation.fail(Cancelled())
            await asyncio.wait({running.task})
