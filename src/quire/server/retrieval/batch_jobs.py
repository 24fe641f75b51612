"""BatchJobs: runs batches of requests beside other requests, and goes on with them after a restart.

Every answer is a row of the batch's working file, written when it comes. What has a row there is not asked again.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from quire.observe.logs import get_logger
from quire.rag.batches import BatchRecord, BatchRecords
from quire.rag.database import now
from quire.rag.files import checked_disk
from quire.server.access import Keys
from quire.server.app import create_app
from quire.server.batch import BadLine, BatchRun, BatchSummary, RowFile, parse_line, token_counts
from quire.server.protocol.retrieval import MAX_BATCH_BYTES, MAX_REQUESTS
from quire.server.retrieval.retrieval import Retrieval
from quire.server.service import Service

log = get_logger(__name__)
MAX_SHOWN_ERRORS = 100
NOTED_SECONDS = 0.5  # between two notes of a batch's progress
SHARE = 2  # batches have 1 / SHARE of the engine's rows at most


_owner: ContextVar[str] = ContextVar("owner")  # of the batch whose requests a task sends


class BatchOwners(Keys):
    """Every request is of its batch's owner: for an application that is called in-process, by all batches."""

    def __init__(self) -> None:
        super().__init__(())

    def __bool__(self) -> bool:
        return bool(_owner.get())

    def identify(self, offered: bytes | None) -> str | None:
        return _owner.get()


@dataclass(slots=True)
class _Job:
    task: "asyncio.Task[None] | None" = None
    run: "asyncio.Task[None] | None" = None
    is_cancelled: bool = False


class _BatchProgress:
    """Notes the latest counts, at most once in NOTED_SECONDS."""

    def __init__(self, note: Callable[[BatchSummary], Coroutine[Any, Any, None]]) -> None:
        self._note = note
        self._task: asyncio.Task[None] | None = None

    def __call__(self, summary: BatchSummary) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._later(summary))

    async def _later(self, summary: BatchSummary) -> None:
        await asyncio.sleep(NOTED_SECONDS)
        await self._note(summary)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class BatchJobs:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self._service = service
        self._retrieval = retrieval
        self.records = BatchRecords(retrieval.database)
        self._folder = retrieval.folder / "batches"
        self._folder.mkdir(exist_ok=True)
        self._jobs: dict[str, _Job] = {}
        self._slots: asyncio.Semaphore | None = None

    @cached_property
    def _app(self) -> "asyncio.Task[FastAPI]":
        """One for all batches: each would take several MB, of which not all come back. Built in a thread: 0.3 s."""
        return asyncio.create_task(asyncio.to_thread(create_app, self._service, BatchOwners()))

    async def resume(self) -> None:
        """Goes on with what is unfinished, and drops what ended long ago."""
        for batch in await self._retrieval.run(self.records.old):
            await self._retrieval.run(self.drop, batch)
        for batch in await self._retrieval.run(self.records.unfinished):
            log.info("batch     %s goes on", batch.id)
            self.start(batch)

    def start(self, batch: BatchRecord) -> None:
        job = self._jobs[batch.id] = _Job(is_cancelled=batch.status == "cancelling")
        job.task = asyncio.create_task(self._run(batch, job), name="batch")
        job.task.add_done_callback(lambda _task: self._jobs.pop(batch.id, None))

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Requests that are under way are aborted; what has ended is kept."""
        batch = await self._retrieval.run(self.records.update, batch, "cancelling")
        job = self._jobs.get(batch.id)
        if job is not None:
            job.is_cancelled = True
            if job.run is not None:
                job.run.cancel()
        return batch

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def input_path(self, batch: BatchRecord) -> Path:
        """The file of its requests."""
        name = batch.body.get("input_file_id")
        return self._folder / f"{batch.id}.input" if name is None else self._retrieval.files.path(name)

    def rows_path(self, batch: BatchRecord) -> Path:
        return self._folder / f"{batch.id}.rows"

    def drop(self, batch: BatchRecord) -> None:
        self.records.delete(batch)
        for ending in ("input", "rows"):
            (self._folder / f"{batch.id}.{ending}").unlink(missing_ok=True)

    # ------------------------------------------------------------------ running

    async def _run(self, batch: BatchRecord, job: _Job) -> None:
        update = self.records.update
        try:
            if batch.status == "validating":
                path, endpoint = self.input_path(batch), batch.body.get("endpoint")
                total, wrong = await self._retrieval.run(check_lines, path, endpoint)
                counts = {"total": total, "completed": 0, "failed": 0}
                if wrong:
                    errors = {"object": "list", "data": wrong}
                    await self._retrieval.run(update, batch, "failed", errors=errors, request_counts=counts)
                    return
                batch = await self._retrieval.run(update, batch, "in_progress", request_counts=counts)
            if not job.is_cancelled:
                job.run = asyncio.create_task(self._answer(batch))
                await self._ended(job.run, job)
            if self._service.draining:
                return  # the next server goes on
            await self._finish(batch, job)
        except Exception as cause:
            log.error("batch     %s: %s", batch.id, cause)
            error = {"code": "server_error", "message": str(cause), "line": None, "param": None}
            with suppress(Exception):
                await self._retrieval.run(update, batch, "failed", errors={"object": "list", "data": [error]})

    async def _ended(self, run: "asyncio.Task[None]", job: _Job) -> None:
        """Waits for the requests; what ends it from outside ends them too."""
        try:
            await run
        except asyncio.CancelledError:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            if not job.is_cancelled:
                raise

    async def _answer(self, batch: BatchRecord) -> None:
        count = max(1, self._service.models.main.ready.max_num_seqs // SHARE)
        if self._slots is None:
            self._slots = asyncio.Semaphore(count)
        rows = await self._retrieval.run(RowFile, str(self.rows_path(batch)), resume=True)
        before = await self._retrieval.run(count_rows, self.rows_path(batch))
        progress = _BatchProgress(lambda summary: self._note(batch, before, summary))
        _owner.set(batch.owner)
        app = await asyncio.shield(self._app)  # others wait for it too
        run = BatchRun(self._service, app, rows, progress, self._slots)
        left = batch.expires_at - now()
        try:
            with self.input_path(batch).open("rb") as lines, suppress(TimeoutError):
                async with asyncio.timeout(max(0, left)):
                    await run.run(lines, count)
        finally:
            rows.close()
            await progress.close()

    async def _note(self, batch: BatchRecord, before: "RowCounts", summary: BatchSummary) -> None:
        counts = {
            "total": _total(batch),
            "completed": before.completed + summary.num_answered,
            "failed": before.failed + summary.refused.total() + summary.num_malformed,
        }
        await self._retrieval.run(self.records.update, batch, request_counts=counts)

    async def _finish(self, batch: BatchRecord, job: _Job) -> None:
        update = self.records.update
        status = "expired" if now() >= batch.expires_at else "completed"
        status = "cancelled" if job.is_cancelled else status
        await self._retrieval.run(update, batch, "finalizing")
        counted = await self._retrieval.run(count_rows, self.rows_path(batch))
        counts = {"total": _total(batch), "completed": counted.completed, "failed": counted.failed}

        def finish() -> None:
            """Files and record together: a server that is killed meanwhile does it again."""
            with self._retrieval.database.transaction():
                made = self._output_files(batch) if batch.api == "openai" else {}
                update(batch, status, request_counts=counts, usage=counted.usage, model=counted.model, **made)

        await self._retrieval.run(finish)
        if batch.api == "openai":
            self.rows_path(batch).unlink(missing_ok=True)

    def _output_files(self, batch: BatchRecord) -> dict[str, str]:
        """Answers in one file, all else in another; neither if it would be empty."""
        made = {}
        for field, keeps in (("output_file_id", True), ("error_file_id", False)):
            path = self._retrieval.files.temporary()
            with checked_disk(), path.open("w", encoding="utf-8") as file:
                for row in read_rows(self.rows_path(batch)):
                    if _is_answer(row) == keeps:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if path.stat().st_size:
                name = f"{batch.id}_{field.partition('_')[0]}.jsonl"
                add, seconds = self._retrieval.files.add, batch.body.get("output_seconds")
                made[field] = add(batch.owner, path, name, "batch_output", seconds).id
            path.unlink(missing_ok=True)
        return made


# ---------------------------------------------------------------------- files


def check_lines(path: Path, endpoint: str | None) -> tuple[int, list[dict[str, Any]]]:
    """The number of lines, and what is wrong where one is no request for `endpoint` with an id of its own."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    total, num_bytes = 0, path.stat().st_size

    def note(number: int | None, code: str, message: str) -> None:
        if len(errors) < MAX_SHOWN_ERRORS:
            errors.append({"code": code, "line": number, "message": message, "param": None})

    if num_bytes > MAX_BATCH_BYTES:
        note(
            None, "file_too_large", f"the file has {num_bytes} bytes, of at most {MAX_BATCH_BYTES}: divide it"
        )
        return 0, errors
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            total += 1
            if total > MAX_REQUESTS:
                message = f"there are more than {MAX_REQUESTS} requests: divide the file"
                note(number, "too_many_requests", message)
                break
            line = parse_line(number, text.decode("utf-8", "replace"))
            if isinstance(line, BadLine):
                note(number, "invalid_line", f"line {number} {line.message}")
            elif endpoint is not None and line.url != endpoint:
                note(number, "mismatched_endpoint", f"line {number} has the url {line.url}, not {endpoint}")
            elif line.custom_id in seen:
                note(number, "duplicate_custom_id", f"line {number} has the custom_id of an earlier line")
            else:
                seen.add(line.custom_id)
    if not total:
        note(None, "empty_file", "the file has no requests: write one a line")
    return total, errors


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a working file; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):  # cut off by a kill
                yield json.loads(line)


def _is_answer(row: dict[str, Any]) -> bool:
    return bool(row.get("response")) and row["response"]["status_code"] == 200


@dataclass(slots=True)
class RowCounts:
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    model: str | None = None

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def count_rows(path: Path) -> RowCounts:
    counts = RowCounts()
    for row in read_rows(path):
        if not _is_answer(row):
            counts.failed += 1
            continue
        body = row["response"]["body"]
        usage = body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts.completed += 1
        num_prompt, num_output = token_counts(usage)
        counts.input_tokens += num_prompt
        counts.output_tokens += num_output
        counts.cached_tokens += details.get("cached_tokens") or 0
        counts.model = body.get("model") or counts.model
    return counts


def _total(batch: BatchRecord) -> int:
    """Of its requests; 0 before they were counted."""
    total: int = (batch.body.get("request_counts") or {}).get("total", 0)
    return total
