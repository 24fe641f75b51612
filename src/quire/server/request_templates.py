"""RequestTemplates: chat templates that came with requests, rendered in sandboxed processes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.core.errors import InvalidRequest
from quire.server.errors import ApiError

SECONDS = 2.0  # for one rendering; an honest template takes a millisecond
MAX_CHARACTERS = 4_000_000  # of rendered text
START_SECONDS = 20.0  # for a worker to come up on a busy machine
NUM_WORKERS = 2  # each about 26 MB, started when first needed
MAX_WAITING = 16  # requests; more are refused at once
_PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # never a key


@dataclass(frozen=True, slots=True)
class Rendering:
    """What ChatTemplate.render needs to know, of JSON's own types."""

    template: str
    special: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None

    def line(self) -> bytes:
        job = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**job, "variables": self.variables or {}}).encode() + b"\n"


class RequestTemplates:
    """A template that loops, grows or crashes costs its own request (400) and one worker process."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._idle: list[asyncio.subprocess.Process] = []
        self._room = asyncio.Semaphore(NUM_WORKERS)
        self._num_waiting = 0

    async def render(self, rendering: Rendering) -> str:
        """The text. Raises InvalidRequest with the reason, or 429 if too many wait for a worker."""
        line = await asyncio.to_thread(rendering.line)
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} requests with chat templates of their own are waiting already: try again later",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        self._num_waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._num_waiting -= 1
        try:
            answer = await self._answered(line)
        finally:
            self._room.release()
        if "error" in answer:
            raise InvalidRequest(answer["error"], answer.get("param"))
        return answer["text"]

    async def close(self) -> None:
        """Ends idle workers; one at work ends by its own alarm."""
        while self._idle:
            worker = self._idle.pop()
            _kill(worker)
            await worker.wait()

    async def _answered(self, line: bytes) -> dict[str, Any]:
        worker = self._idle.pop() if self._idle else None
        if worker is None or worker.returncode is not None:
            worker = await self._started()
        try:
            answer = await self._asked(worker, line)
            if answer is None:
                return {"error": self._why_it_ended(await worker.wait()), "param": "chat_template"}
        except BaseException:  # cancelled, perhaps: the worker may be anywhere in its work
            _kill(worker)
            raise
        self._idle.append(worker)
        return answer

    async def _asked(self, worker: asyncio.subprocess.Process, line: bytes) -> dict[str, Any] | None:
        """None: the worker is gone. It keeps its own time, so that it ends even if this process does not see to it;
        the wait here is for one that cannot."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(self._seconds + START_SECONDS):
                with suppress(BrokenPipeError, ConnectionResetError):
                    worker.stdin.write(line)
                    await worker.stdin.drain()
                reply = await worker.stdout.readline()
        except (TimeoutError, ValueError):  # stopped, or a line beyond all bounds
            _kill(worker)
            return None
        return json.loads(reply) if reply.endswith(b"\n") else None

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.server.template_worker",
            str(self._seconds),
            str(MAX_CHARACTERS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=12 * MAX_CHARACTERS + 1000,  # a character takes up to twelve bytes in JSON
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )

    def _why_it_ended(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"the chat template took longer than {self._seconds:g} s: does it loop?"
        return f"the chat template broke the process that rendered it (exit code {code})"


def _kill(worker: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        worker.kill()
