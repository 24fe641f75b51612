"""/v1/batches and /v1/messages/batches."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import ListPage, Metadata, Name, RequestBody
from quire.server.protocol.retrieval import FileExpiry

MAX_REQUESTS = 50_000  # of one batch
MAX_BATCH_BYTES = 200 << 20


class NewBatch(RequestBody):
    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = None


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: str
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(ListPage):
    data: list[BatchObject]


class BatchedMessage(RequestBody):
    custom_id: Annotated[str, Field(min_length=1, max_length=64)]
    params: dict[str, Any]


class NewMessageBatch(RequestBody):
    requests: list[BatchedMessage] = Field(min_length=1, max_length=MAX_REQUESTS)


class MessageBatchCounts(TypedDict):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    id: str
    type: str
    processing_status: str
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    archived_at: None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchList(TypedDict):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None
