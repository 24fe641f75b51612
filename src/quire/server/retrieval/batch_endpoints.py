"""BatchEndpoints: what /v1/batches and /v1/messages/batches do."""

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from quire.core.errors import InvalidRequest
from quire.rag.batches import UNFINISHED, BatchRecord
from quire.rag.files import checked_disk
from quire.server.batch import URLS
from quire.server.protocol.retrieval import BatchCounts, BatchObject, MessageBatch, NewBatch, NewMessageBatch
from quire.server.reply import JsonReply
from quire.server.retrieval.batch_jobs import BatchJobs, RowCounts, read_rows
from quire.server.retrieval.file_endpoints import in_thread, owner_of, page_query
from quire.server.retrieval.retrieval import Retrieval
from quire.server.stored import list_page

OPENAI, ANTHROPIC = "openai", "anthropic"
MESSAGES = "/v1/messages"
MAX_LISTED_MESSAGES = 1000
_ENDPOINTS = tuple(url for url in URLS if url != MESSAGES)
_LATER_FIELDS = (  # of a batch's object, null until they are known
    *("model", "errors", "metadata", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at"),
    *("completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class BatchEndpoints:
    def __init__(self, retrieval: Retrieval, jobs: BatchJobs) -> None:
        self.retrieval = retrieval
        self._jobs = jobs
        self._records = jobs.records

    async def create_batch(self, body: NewBatch, request: Request) -> Response:
        owner = owner_of(request)
        if body.endpoint not in _ENDPOINTS:
            raise InvalidRequest(
                f"endpoint={body.endpoint[:80]!r}: choose one of {', '.join(_ENDPOINTS)}", "endpoint"
            )
        file = await self.retrieval.run(self.retrieval.files.get, owner, body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"the file {file.id} has the purpose {file.purpose!r}: upload it with purpose 'batch'",
                "input_file_id",
            )
        seconds = body.output_expires_after.seconds if body.output_expires_after is not None else None
        fields = {
            "endpoint": body.endpoint,
            "input_file_id": file.id,
            "metadata": body.metadata,
            "output_seconds": seconds,
        }
        batch = await self.retrieval.run(self._records.create, owner, OPENAI, fields, "batch_")
        self._jobs.start(batch)
        return JsonReply(_shown(batch))

    @in_thread()
    def list_batches(self, request: Request) -> dict[str, Any]:
        batches, more = self._records.page(owner_of(request), OPENAI, page_query(request.query_params))
        return list_page([_shown(batch) for batch in batches], more)

    async def retrieve_batch(self, batch_id: str, request: Request) -> Response:
        return JsonReply(_shown(await self._record(request, OPENAI, batch_id)))

    async def cancel_batch(self, batch_id: str, request: Request) -> Response:
        batch = await self._record(request, OPENAI, batch_id)
        if batch.status not in UNFINISHED:
            raise InvalidRequest(
                f"the batch {batch_id} is {batch.status} and cannot be cancelled", "batch_id"
            )
        return JsonReply(_shown(await self._jobs.cancel(batch)))

    async def _record(self, request: Request, api: str, batch_id: str) -> BatchRecord:
        return await self.retrieval.run(self._records.get, owner_of(request), api, batch_id)

    # ------------------------------------------------------------------ Anthropic's

    async def create_message_batch(self, body: NewMessageBatch, request: Request) -> Response:
        seen: set[str] = set()
        for index, entry in enumerate(body.requests):
            if entry.custom_id in seen:
                raise InvalidRequest(
                    f"requests[{index}].custom_id is that of an earlier request: give each its own",
                    "requests",
                )
            if entry.params.get("stream"):
                raise InvalidRequest(f"requests[{index}].params.stream: a batch has no streams", "requests")
            seen.add(entry.custom_id)

        def make() -> BatchRecord:
            counts = {"total": len(body.requests), "completed": 0, "failed": 0}
            with self.retrieval.database.transaction():
                batch = self._records.create(
                    owner_of(request), ANTHROPIC, {"request_counts": counts}, "msgbatch_"
                )
                with checked_disk(), self._jobs.input_path(batch).open("w", encoding="utf-8") as file:
                    for entry in body.requests:
                        line = {"custom_id": entry.custom_id, "url": MESSAGES, "body": entry.params}
                        file.write(json.dumps(line) + "\n")
                return batch

        batch = await self.retrieval.run(make)
        self._jobs.start(batch)
        return JsonReply(_shown_messages(batch, str(request.base_url)))

    @in_thread()
    def list_message_batches(self, request: Request) -> dict[str, Any]:
        asked = page_query(request.query_params, MAX_LISTED_MESSAGES, after="after_id", before="before_id")
        batches, more = self._records.page(owner_of(request), ANTHROPIC, asked)
        shown = list_page([_shown_messages(batch, str(request.base_url)) for batch in batches], more)
        del shown["object"]
        return shown

    async def retrieve_message_batch(self, batch_id: str, request: Request) -> Response:
        batch = await self._record(request, ANTHROPIC, batch_id)
        return JsonReply(_shown_messages(batch, str(request.base_url)))

    async def cancel_message_batch(self, batch_id: str, request: Request) -> Response:
        """One that has ended already is returned as it is."""
        batch = await self._record(request, ANTHROPIC, batch_id)
        if batch.status in UNFINISHED:
            batch = await self._jobs.cancel(batch)
        return JsonReply(_shown_messages(batch, str(request.base_url)))

    async def delete_message_batch(self, batch_id: str, request: Request) -> Response:
        batch = await self._record(request, ANTHROPIC, batch_id)
        if batch.status in UNFINISHED:
            raise InvalidRequest(f"the batch {batch_id} still runs: cancel it first", "batch_id")
        await self.retrieval.run(self._jobs.drop, batch)
        return JsonReply({"id": batch_id, "type": "message_batch_deleted"})

    async def retrieve_message_batch_results(self, batch_id: str, request: Request) -> Response:
        """A line for each request, in the order in which they ended; then the requests without an answer."""
        batch = await self._record(request, ANTHROPIC, batch_id)
        if batch.status in UNFINISHED:
            raise InvalidRequest(
                f"the batch {batch_id} is not done: its results come when processing_status is 'ended'",
                "batch_id",
            )
        lines: AsyncIterator[str] = iterate_in_threadpool(self._result_lines(batch))
        return StreamingResponse(lines, media_type="application/x-jsonl")

    def _result_lines(self, batch: BatchRecord) -> Iterator[str]:
        seen: set[str] = set()
        for row in read_rows(self._jobs.rows_path(batch)):
            seen.add(row["custom_id"])
            yield json.dumps({"custom_id": row["custom_id"], "result": _result(row)}) + "\n"
        left = {"type": "expired" if batch.status == "expired" else "canceled"}
        for row in read_rows(self._jobs.input_path(batch)):
            if row["custom_id"] not in seen:
                yield json.dumps({"custom_id": row["custom_id"], "result": left}) + "\n"


def _shown(batch: BatchRecord) -> BatchObject:
    body = batch.body
    counts: BatchCounts = body.get("request_counts", {"total": 0, "completed": 0, "failed": 0})
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": body["endpoint"],
        "input_file_id": body["input_file_id"],
        "completion_window": "24h",
        "status": batch.status,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "request_counts": counts,
        "usage": body.get("usage") or RowCounts().usage,
        **{name: body.get(name) for name in _LATER_FIELDS},  # type: ignore[typeddict-item]
    }


def _shown_messages(batch: BatchRecord, base_url: str) -> MessageBatch:
    body, counts = batch.body, batch.body["request_counts"]
    is_ended = batch.status not in UNFINISHED
    left = counts["total"] - counts["completed"] - counts["failed"]
    ended = [
        body[f"{name}_at"] for name in ("completed", "failed", "expired", "cancelled") if f"{name}_at" in body
    ]
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_ended else status,
        "request_counts": {
            "processing": 0 if is_ended else left,
            "succeeded": counts["completed"],
            "errored": counts["failed"],
            "canceled": left if batch.status in ("cancelled", "failed") else 0,
            "expired": left if batch.status == "expired" else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended[0]) if is_ended and ended else None,
        "archived_at": None,
        "cancel_initiated_at": _time(body["cancelling_at"]) if "cancelling_at" in body else None,
        "results_url": f"{base_url.rstrip('/')}{MESSAGES}/batches/{batch.id}/results" if is_ended else None,
    }


def _result(row: dict[str, Any]) -> dict[str, Any]:
    response = row.get("response")
    if response is None:
        message = (row.get("error") or {}).get("message", "")
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        return {"type": "errored", "error": error}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
