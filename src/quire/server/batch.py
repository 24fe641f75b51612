"""run_batch: a file of requests through the server's own endpoints, without a socket.

Each line goes to the same application that `quire serve` runs, called in-process: what an endpoint can do, a batch can
do. The engine is a process of its own and is restarted if it dies; its requests are then sent again.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from starlette.types import ASGIApp

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.link.messages import Ready
from quire.server.app import create_app
from quire.server.served_models import OnProgress
from quire.server.service import SICK_AFTER, Service
from quire.server.settings import ServerSettings

MAX_ATTEMPTS = 3
FULL_SECONDS = 1.0  # between attempts while the queue of a server is full
MAX_RESTART_SECONDS = 120.0  # for an engine that is being restarted
RETRIED = (429, 500, 502, 503)  # statuses that may not be the request's own fault
STREAM = "-"  # standard input or output
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"),
    *("/v1/classify", "/v1/score", "/v1/rerank", "/v1/fill-mask"),
)


# ---------------------------------------------------------------------- OpenAI's batch format


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request; it gets a row that says why."""

    number: int
    custom_id: str | None
    message: str


def parse_line(number: int, text: str) -> BatchLine | BadLine:
    try:
        request = json.loads(text.removeprefix("\ufeff"))  # a file may begin with a byte order mark
    except ValueError as error:
        return BadLine(number, None, f"is no valid JSON ({error})")
    if not isinstance(request, dict):
        return BadLine(number, None, f"is no JSON object but {type(request).__name__}")
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "has no custom_id: give each line a text that is its own")
    wrong = _what_is_wrong(request.get("method", "POST"), request.get("url"), body)
    if wrong is not None:
        return BadLine(number, custom_id, wrong)
    assert isinstance(body, dict)
    return BatchLine(number, custom_id, request["url"], body)


def _what_is_wrong(method: Any, url: Any, body: Any) -> str | None:
    if method != "POST":
        return f"has the method {method!r}: write POST"
    if url not in URLS:
        return f"has the url {url!r}: choose one of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return "has no body: give the request as a JSON object"
    if body.get("stream"):
        return "asks for a stream: a batch has none, leave `stream` out"
    return None


def answer_row(line: BatchLine, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Any response of the endpoint, also one that refuses: `error` is for what never reached it."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _row_id(), "custom_id": line.custom_id, "response": response, "error": None}


def error_row(line: BatchLine | BadLine, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": f"line {line.number} {message}"}
    return {"id": _row_id(), "custom_id": line.custom_id, "response": None, "error": error}


def is_finished(row: Any) -> bool:
    """Whether a row of an earlier run stands: an answer, or a refusal that would come again."""
    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str):
        return False
    response = row.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status < 500 and status != 429


def _row_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


# ---------------------------------------------------------------------- files


def open_input(path: str) -> BinaryIO:
    if path == STREAM:
        return sys.stdin.buffer
    try:
        return Path(path).expanduser().open("rb")
    except OSError as error:
        raise ConfigError(f"-i {path}: cannot be read ({error.strerror})") from error


def count_lines(path: str) -> int | None:
    """For a progress bar; None where one cannot look twice."""
    if path == STREAM:
        return None
    with Path(path).expanduser().open("rb") as file:
        return sum(1 for line in file if line.strip())


def is_same_file(path: str, other: str) -> bool:
    """Also through a link or another spelling. Standard input and output are never one file here."""
    if STREAM in (path, other) or not Path(other).expanduser().exists():
        return False
    return Path(path).expanduser().samefile(Path(other).expanduser())


class RowFile:
    """Rows are appended with one write each: whenever the program ends, every row in the file is whole."""

    def __init__(self, path: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.finished: set[str] = set()  # custom_ids that an earlier run has finished
        self._path = path
        self._is_stream = path == STREAM
        if self._is_stream:
            self._descriptor = sys.stdout.fileno()
            return
        file = Path(path).expanduser()
        try:
            if file.exists() and file.stat().st_size and not (resume or overwrite):
                raise ConfigError(
                    f"-o {path}: holds rows already: --resume goes on with them, --overwrite drops them"
                )
            if resume and file.exists():
                self.finished = _keep_finished(file)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if overwrite and not resume else 0)
            self._descriptor = os.open(file, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"-o {path}: cannot be written ({error.strerror})") from error

    def write(self, row: dict[str, Any]) -> None:
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while data:  # a pipe may take less than all of it
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            error.filename = self._path  # for the message
            raise

    def close(self) -> None:
        if not self._is_stream:
            os.close(self._descriptor)


def _keep_finished(file: Path) -> set[str]:
    """Drops the rows of requests to retry: failures, and a row that a crash cut off."""
    kept, finished = [], set()
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if is_finished(row) and line.endswith(b"\n"):
            kept.append(line)
            finished.add(row["custom_id"])
    beside = file.with_name(f"{file.name}.part")
    beside.write_bytes(b"".join(kept))
    os.replace(beside, file)
    return finished


# ---------------------------------------------------------------------- running


@dataclass(slots=True)
class BatchSummary:
    """Counts of what happened to the lines."""

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


OnRow = Callable[[BatchSummary], None]
OnReady = Callable[[Ready], None]


async def run_batch(
    config: EngineConfig,
    lines: BinaryIO,
    rows: RowFile,
    max_concurrency: int | None = None,
    *,
    on_progress: OnProgress | None = None,
    on_ready: OnReady = lambda _ready: None,
    on_row: OnRow = lambda _summary: None,
) -> BatchSummary:
    """Rows come in the order of finishing; every line gets exactly one, but for those finished before."""
    async with _started(config, on_progress) as service:
        ready = service.models.main.ready
        on_ready(ready)
        batch = BatchRun(service, create_app(service), rows, on_row)
        # twice what runs at once: the engine never waits for the next line
        await batch.run(lines, max_concurrency or 2 * ready.max_num_seqs)
        return batch.summary


@asynccontextmanager
async def _started(config: EngineConfig, on_progress: OnProgress | None) -> AsyncIterator[Service]:
    """The queue has no bound of its own: the number of lines under way is one."""
    name = config.model.served_model_name
    settings = ServerSettings(
        max_queue_requests=None, max_queue_tokens=None, served_names=(name,) if name else (), data_dir="none"
    )
    service = Service.of(config, settings, on_progress)
    try:
        await service.start()
        yield service
    finally:
        await service.close()


class BatchRun:
    """The lines of one file through an application."""

    def __init__(
        self,
        service: Service,
        app: ASGIApp,
        rows: RowFile,
        on_row: OnRow,
        slots: "asyncio.Semaphore | None" = None,
    ) -> None:
        """With `slots` it shares a server with other requests: it has that many under way, waits for as long as the
        queue is full, and sends nothing more once the server shuts down."""
        self.summary = BatchSummary()
        self._service = service
        self._slots = slots
        self._rows = rows
        self._on_row = on_row
        self._seen: set[str] = set()
        transport = httpx.ASGITransport(app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)

    async def run(self, lines: BinaryIO, max_concurrency: int) -> None:
        started = time.monotonic()
        waiting: asyncio.Queue[BatchLine | None] = asyncio.Queue(maxsize=max_concurrency)
        try:
            async with self._http, asyncio.TaskGroup() as tasks:
                for _ in range(max_concurrency):
                    tasks.create_task(self._work(waiting))
                await self._read(lines, waiting)
                for _ in range(max_concurrency):
                    await waiting.put(None)
        except ExceptionGroup as faults:  # rows that cannot be written have one cause
            raise faults.exceptions[0] from None
        self.summary.seconds = time.monotonic() - started

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
                if line.custom_id in self._rows.finished:
                    self.summary.num_skipped += 1
                    self._on_row(self.summary)
                else:
                    await waiting.put(line)

    async def _work(self, waiting: "asyncio.Queue[BatchLine | None]") -> None:
        while (line := await waiting.get()) is not None:
            if self._slots is None:
                response = await self._ask(line)
            else:
                async with self._slots:
                    response = await self._ask(line)
            content, request_id = _content(response), response.headers.get("X-Request-Id", "")
            self._count(response.status_code, content)
            self._write(answer_row(line, response.status_code, request_id, content))

    async def _ask(self, line: BatchLine) -> httpx.Response:
        """Sends the request; retries it if the engine died meanwhile."""
        attempt = 1
        while True:
            if self._service.draining:
                await asyncio.get_running_loop().create_future()  # until it is cancelled
            response = await self._http.post(line.url, json=line.body)
            if response.status_code == 429 and self._slots is not None:
                await asyncio.sleep(FULL_SECONDS)
                continue
            if response.status_code not in RETRIED or attempt >= MAX_ATTEMPTS:
                return response
            if not await self._engine_returns():
                return response
            attempt += 1

    async def _engine_returns(self) -> bool:
        deadline = time.monotonic() + MAX_RESTART_SECONDS
        await asyncio.sleep(0.2)  # a death is noticed a moment after its requests have failed
        while down := [engine for engine in self._service.models.engines if not engine.is_ready]:
            if any(engine.num_failures >= SICK_AFTER for engine in down) or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)
        return True

    def _count(self, status: int, content: Any) -> None:
        if status == 200:
            num_prompt, num_output = token_counts(content.get("usage") or {})
            self.summary.num_answered += 1
            self.summary.num_prompt_tokens += num_prompt
            self.summary.num_output_tokens += num_output
        else:
            error = content.get("error") or {}
            self.summary.refused[f"HTTP {status} {error.get('code') or ''}".strip()] += 1

    def _malformed(self, line: BatchLine | BadLine, message: str) -> None:
        self.summary.num_malformed += 1
        self._write(error_row(line, "invalid_line", message))

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.write(row)
        self._on_row(self.summary)


def token_counts(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, in the words of any of the endpoints."""
    num_output = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    return usage.get("prompt_tokens") or usage.get("input_tokens") or 0, num_output


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:  # not JSON, which no endpoint returns
        return {"error": {"message": response.text, "type": "server_error", "param": None, "code": None}}
