"""How many objects a streamed token makes on the HTTP side, from Stream.push to the ASGI send.

How they are counted: the event loop runs under an opcode trace. At every opcode the handler reads
sys.getallocatedblocks() and adds what it has grown by since the last opcode: an object that an opcode makes lives at
least until the next one, so transient objects count too. CPython keeps freed lists, dicts and tuples for reuse, which
would hide new ones; the handler empties those stores after each reading. A container's own storage counts as part of
the container. Floats (the clock's readings, latencies) are not counted, nor what tracing itself makes when a function
is entered, nor the locks of the metrics, nor what Starlette makes behind the ASGI send. The driver's own
cost is measured without a token and taken off.

A program of its own, since getallocatedblocks() walks the whole heap: it prints one line of JSON.
"""

import asyncio
import dis
import gc
import inspect
import json
import sys
from types import FrameType
from typing import Any

import uvloop

from quire.engine.streams import Stream
from tests.server.scripted import ScriptedEngine, posted, scripted_app, update

NUM_TOKENS = 20
WARM_UP = 10  # tokens: caches are filled and buffers have their size
# Behind the ASGI send, the metrics, and the driver; not what tests the counter.
_NOT_OURS = (
    "/starlette/",
    "/prometheus_client/",
    "/observe/",
    "/server/metrics.py",
    "/tests/server/scripted.py",
)
_SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_PER_FRAME = 3  # what tracing makes for a function that is entered: its frame object and a dict of its locals
_OPCODES: dict[Any, dict[int, str]] = {}


def opcode_at(frame: FrameType) -> str:
    names = _OPCODES.get(frame.f_code)
    if names is None:
        names = _OPCODES[frame.f_code] = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}
    return names.get(frame.f_lasti, "")


class ObjectCount:
    """Counts while it is `on`; `by_line` says where they were made."""

    def __init__(self) -> None:
        self.on = False
        self.total = 0
        self.by_line: dict[str, int] = {}
        self._held: list[Any] = [None] * 1_000_000
        self._num_held = 0
        self._opcode, self._line = "", ""
        self._blocks = 0

    def trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code in _OWN_CODE:
            return None
        grown = sys.getallocatedblocks() - self._blocks
        if self.on:
            if event == "opcode" and grown > 0:
                self._add(1 if self._opcode.startswith("BUILD_") else grown)
            elif event == "call" and not frame.f_code.co_flags & _SUSPENDS and grown > _PER_FRAME:
                self._add(grown - _PER_FRAME)  # an object before its __init__, a tuple of *args
        frame.f_trace_opcodes = True
        if self.on:
            self._opcode = opcode_at(frame)
            self._line = f"{frame.f_code.co_filename}:{frame.f_lineno} {self._opcode}"
        self._drain(3)
        self._blocks = sys.getallocatedblocks()
        return self.trace

    def start(self) -> None:
        gc.collect()
        self._drain(3000)
        self.total, self.on, self._line = 0, True, ""
        self._blocks = sys.getallocatedblocks()

    def _add(self, count: int) -> None:
        if any(part in self._line for part in _NOT_OURS):
            return
        self.total += count
        self.by_line[self._line] = self.by_line.get(self._line, 0) + count

    def _drain(self, count: int) -> None:
        """Takes what the stores of freed lists, dicts and tuples hold."""
        held, at = self._held, self._num_held
        for _ in range(count):
            held[at] = [at]
            held[at + 1] = {at: at}
            held[at + 2] = (held,)
            held[at + 3] = (held, at)
            held[at + 4] = (held, at, at)
            at += 5
        self._num_held = at


_OWN_CODE = {ObjectCount.start.__code__, ObjectCount._drain.__code__}


class Driver(ScriptedEngine):
    """Pushes one token, lets the reader run, and so on; then the same without tokens."""

    def __init__(self, count: ObjectCount) -> None:
        super().__init__([])
        self.count = count
        self.with_tokens = self.without = 0

    async def _play(self, stream: Stream[Any]) -> None:
        request_id = stream.request_ids[0]
        updates = [update((65 + at % 5,)) for at in range(WARM_UP + NUM_TOKENS)]
        for one in updates:
            one.request_id = request_id
        for _ in range(30):
            await asyncio.sleep(0)
        previous = sys.gettrace()
        sys.settrace(self.count.trace)
        sys._getframe().f_trace = self.count.trace
        for one in updates[:WARM_UP]:
            stream.push(one)
            await asyncio.sleep(0)
        self.count.start()
        for one in updates[WARM_UP:]:
            stream.push(one)
            await asyncio.sleep(0)
        self.with_tokens = self.count.total
        self.count.start()
        for _ in updates[WARM_UP:]:
            await asyncio.sleep(0)
        self.without = self.count.total
        self.count.on = False
        sys.settrace(previous)
        last = update("", finish_reason="stop")
        last.request_id = request_id
        stream.push(last)


def count_known_objects() -> ObjectCount:
    """What the counter says of four objects, ten times."""
    count = ObjectCount()

    def made() -> None:
        for _ in range(10):
            kept: Any = [object(), {"a": object()}]
            kept = None
        del kept

    sys.settrace(count.trace)
    count.start()
    made()
    count.on = False
    sys.settrace(None)
    return count


def count_streamed_objects() -> tuple[Driver, int, list[bytes]]:
    """The counted stream, its status and what it sent."""
    engine = Driver(ObjectCount())
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    app = scripted_app(engine, reasoning_parser="none", tool_call_parser="none")
    gc.collect()
    gc.disable()  # a collection in between runs callbacks of libraries, whose objects would be counted
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `quire serve` does
        return engine, *runner.run(posted(app, "/v1/chat/completions", body))


if __name__ == "__main__":
    known = count_known_objects()
    engine, status, pieces = count_streamed_objects()
    result = {
        "known": known.total,
        "status": status,
        "pieces": len(pieces) - WARM_UP - NUM_TOKENS,
        "per_token": (engine.with_tokens - engine.without) / NUM_TOKENS,
        "by_line": engine.count.by_line,
    }
    print(json.dumps(result))
