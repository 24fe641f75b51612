"""RequestTemplates: chat templates that came with requests, rendered in sandboxed processes."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import InvalidRequest
from quire.observe.bounded import BoundedProcess
from quire.server.errors import ApiError

WORKER = "quire.server.template_worker"
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

    def job(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "variables": self.variables or {}}


class RequestTemplates:
    """A template that loops, grows or crashes costs its own request (400) and one worker process."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._idle: list[BoundedProcess] = []
        self._room = asyncio.Semaphore(NUM_WORKERS)
        self._num_waiting = 0

    async def render(self, rendering: Rendering) -> str:
        """The text. Raises InvalidRequest with the reason, or 429 if too many wait for a worker."""
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
            answer = await self._answered(rendering.job())
        finally:
            self._room.release()
        if "error" in answer:
            raise InvalidRequest(answer["error"], answer.get("param"))
        return answer["text"]

    async def close(self) -> None:
        """Ends idle workers; one at work ends by its own alarm."""
        while self._idle:
            worker = self._idle.pop()
            worker.process.kill()
            await asyncio.to_thread(worker.close)

    async def _answered(self, job: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.is_alive:
            env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            arguments = (self._seconds, MAX_CHARACTERS)
            worker = await asyncio.to_thread(BoundedProcess, WORKER, *arguments, env=env)
        try:
            # it keeps its own time; the limit here is for one that cannot
            reply = await asyncio.to_thread(worker.ask, job, self._seconds + START_SECONDS)
        except BaseException:  # cancelled, perhaps: the worker may be anywhere in its work
            worker.process.kill()
            asyncio.get_running_loop().run_in_executor(None, worker.close)
            raise
        if reply is None:
            code = await asyncio.to_thread(worker.close)
            return {"error": self._why_it_ended(code), "param": "chat_template"}
        self._idle.append(worker)
        return reply[0]

    def _why_it_ended(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"the chat template took longer than {self._seconds:g} s: does it loop?"
        return f"the chat template broke the process that rendered it (exit code {code})"
