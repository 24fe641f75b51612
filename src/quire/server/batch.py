"""run_batch: a file of requests through the server's own endpoints, without a socket.

Each line goes to the same application that `quire serve` runs, called in-process: what an endpoint can do, a batch can
do. The engine is a process of its own as there, and is started again if it dies; its requests are then asked again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import httpx

from quire.core.config import EngineConfig
from quire.core.queue_bounds import QueueBounds
from quire.link.client import EngineClient
from quire.link.messages import Ready
from quire.server.app import create_app
from quire.server.batch_files import RowFile
from quire.server.batch_lines import BadLine, BatchLine, answer_row, error_row, parse_line
from quire.server.encoders import Encoders
from quire.server.service import SICK_AFTER, Service
from quire.server.settings import ServerSettings
from quire.weights.peek import is_encoder

MAX_ATTEMPTS = 3
LONGEST_WAIT = 120.0  # seconds for an engine that is being restarted
AGAIN = (429, 500, 502, 503)  # not the request's own fault, perhaps


@dataclass(slots=True)
class Tally:
    """What became of the lines."""

    num_answered: int = 0
    num_skipped: int = 0  # finished by an earlier run
    refused: Counter[str] = field(default_factory=Counter)  # by status and code
    num_malformed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_skipped + self.refused.total() + self.num_malformed


OnRow = Callable[[Tally], None]
OnReady = Callable[[Ready], None]
OnProgress = Callable[[str, int, int], None]


async def run_batch(
    config: EngineConfig,
    lines: BinaryIO,
    rows: RowFile,
    max_concurrency: int | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_ready: OnReady = lambda _ready: None,
    on_row: OnRow = lambda _tally: None,
) -> Tally:
    """Rows come in the order of finishing; every line gets exactly one, but for those finished before."""
    async with _started(config, on_progress) as service:
        ready = service.engines[0].ready
        assert ready is not None
        on_ready(ready)
        batch = _Batch(service, rows, on_row)
        # twice what runs at once: the engine never waits for the next line
        await batch.run(lines, max_concurrency or 2 * ready.max_num_seqs)
        return batch.tally


@asynccontextmanager
async def _started(config: EngineConfig, on_progress: OnProgress | None) -> AsyncIterator[Service]:
    """The queue has no bound of its own: the number of lines under way is one."""
    name = config.model.served_model_name
    settings = ServerSettings(
        max_queue_requests=None, max_queue_tokens=None, served_names=(name,) if name else ()
    )
    embeds = is_encoder(config.model.model, config.model.revision)
    client = None if embeds else EngineClient(config, QueueBounds(), on_progress)
    service = Service(client, settings, Encoders(settings, config, embeds, on_progress))
    try:
        await service.start()
        yield service
    finally:
        await asyncio.gather(*(engine.close() for engine in service.engines))
        await service.close()


class _Batch:
    def __init__(self, service: Service, rows: RowFile, on_row: OnRow) -> None:
        self.tally = Tally()
        self._service = service
        self._rows = rows
        self._on_row = on_row
        self._seen: set[str] = set()
        transport = httpx.ASGITransport(create_app(service))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)

    async def run(self, lines: BinaryIO, max_concurrency: int) -> None:
        started = time.monotonic()
        waiting: asyncio.Queue[BatchLine | None] = asyncio.Queue(maxsize=max_concurrency)
        async with self._http, asyncio.TaskGroup() as tasks:
            for _ in range(max_concurrency):
                tasks.create_task(self._work(waiting))
            await self._read(lines, waiting)
            for _ in range(max_concurrency):
                await waiting.put(None)
        self.tally.seconds = time.monotonic() - started

    async def _read(self, lines: BinaryIO, waiting: "asyncio.Queue[BatchLine | None]") -> None:
        number = 0
        while text := await asyncio.to_thread(lines.readline):  # from a pipe it may take its time
            number += 1
            if not text.strip():
                continue
            line = parse_line(number, text.decode("utf-8", "replace"))
            if isinstance(line, BadLine):
                self._malformed(line, line.message)
            elif line.custom_id in self._seen:
                self._malformed(line, f"has the custom_id {line.custom_id!r}, which an earlier line has")
            else:
                self._seen.add(line.custom_id)
                await self._take(line, waiting)

    async def _take(self, line: BatchLine, waiting: "asyncio.Queue[BatchLine | None]") -> None:
        if line.custom_id in self._rows.finished:
            self.tally.num_skipped += 1
            self._on_row(self.tally)
        else:
            await waiting.put(line)

    async def _work(self, waiting: "asyncio.Queue[BatchLine | None]") -> None:
        while (line := await waiting.get()) is not None:
            response = await self._ask(line)
            self._count(response)
            self._write(
                answer_row(
                    line, response.status_code, response.headers.get("X-Request-Id", ""), _content(response)
                )
            )

    async def _ask(self, line: BatchLine) -> httpx.Response:
        """A request that an engine's death took with it is asked again."""
        attempt = 1
        while True:
            response = await self._http.post(line.url, json=line.body)
            if response.status_code not in AGAIN or attempt >= MAX_ATTEMPTS:
                return response
            if not await self._engine_returns():
                return response
            attempt += 1

    async def _engine_returns(self) -> bool:
        deadline = time.monotonic() + LONGEST_WAIT
        await asyncio.sleep(0.2)  # a death is noticed a moment after its requests have failed
        while down := [engine for engine in self._service.engines if not engine.is_ready]:
            if any(engine.num_failures >= SICK_AFTER for engine in down) or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)
        return True

    def _count(self, response: httpx.Response) -> None:
        content = _content(response)
        if response.status_code == 200:
            usage = content.get("usage") or {}
            self.tally.num_answered += 1
            self.tally.num_prompt_tokens += usage.get("prompt_tokens") or 0
            self.tally.num_output_tokens += usage.get("completion_tokens") or 0
        else:
            error = content.get("error") or {}
            self.tally.refused[f"HTTP {response.status_code} {error.get('code') or ''}".strip()] += 1

    def _malformed(self, line: BatchLine | BadLine, message: str) -> None:
        self.tally.num_malformed += 1
        self._write(error_row(line, "invalid_line", message))

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.write(row)
        self._on_row(self.tally)


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:  # no endpoint of ours does so
        return {"error": {"message": response.text, "type": "server_error", "param": None, "code": None}}
