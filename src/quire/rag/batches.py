"""BatchRecords: batches of requests, as the database keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.rag.database import PageQuery, RagDatabase, new_id, now, record

BATCH_SECONDS = 24 * 3600  # in which a batch must end
KEPT_SECONDS = 30 * 86400  # for which a batch that ended is kept
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class BatchRecord:
    id: str
    owner: str
    api: str  # openai | anthropic
    status: str
    created_at: int
    expires_at: int
    body: dict[str, Any]  # the request's fields, counts, times of each status and files


class BatchRecords:
    def __init__(self, database: RagDatabase) -> None:
        self._database = database

    def create(self, owner: str, api: str, body: Mapping[str, Any], kind: str) -> BatchRecord:
        """`kind` is what its id begins with."""
        created, batch_id = now(), new_id(kind)
        self._database.add(
            "batches",
            id=batch_id,
            owner=owner,
            api=api,
            status="validating",
            created_at=created,
            expires_at=created + BATCH_SECONDS,
            body=dict(body),
        )
        return self.get(owner, api, batch_id)

    def get(self, owner: str, api: str, batch_id: str) -> BatchRecord:
        select = "SELECT * FROM batches WHERE id = ? AND owner = ? AND api = ?"
        return self._database.known(BatchRecord, "batch", batch_id, select, batch_id, owner, api)

    def page(self, owner: str, api: str, query: PageQuery) -> tuple[list[BatchRecord], bool]:
        where = "owner = ? AND api = ?"
        return self._database.page(BatchRecord, "batches", query, where, [owner, api], "batch")

    def unfinished(self) -> list[BatchRecord]:
        marks = ", ".join("?" * len(UNFINISHED))
        select = f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number"
        return [record(BatchRecord, row) for row in self._database.rows(select, *UNFINISHED)]

    def old(self) -> list[BatchRecord]:
        """Batches that ended, and were made more than KEPT_SECONDS ago."""
        rows = self._database.rows("SELECT * FROM batches WHERE created_at < ?", now() - KEPT_SECONDS)
        return [record(BatchRecord, row) for row in rows if row["status"] not in UNFINISHED]

    def update(self, batch: BatchRecord, status: str | None = None, **body: Any) -> BatchRecord:
        """Changes fields of the body, and the status, with its time. A batch that is being cancelled stays so."""
        with self._database.transaction():
            latest = self.get(batch.owner, batch.api, batch.id)
            if status is not None:
                body[f"{status}_at"] = now()
            if latest.status == "cancelling" and status in ("in_progress", "finalizing"):
                status = None
            self._database.change(
                "UPDATE batches SET status = ?, body = ? WHERE id = ?",
                *(status or latest.status, {**latest.body, **body}, batch.id),
            )
            return self.get(batch.owner, batch.api, batch.id)

    def delete(self, batch: BatchRecord) -> None:
        self._database.change("DELETE FROM batches WHERE id = ?", batch.id)
