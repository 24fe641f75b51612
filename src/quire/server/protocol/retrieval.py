"""/v1/files, /v1/uploads, /v1/vector_stores, /v1/batches and /v1/messages/batches."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import ListPage, Many, Metadata, Name, RequestBody, at_most

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MIN_FILE_SECONDS, MAX_FILE_SECONDS = 3600, 30 * 86400
MAX_UPLOAD_BYTES = 8 << 30
MAX_PART_BYTES = 64 << 20
MAX_BATCH_FILES = 2000  # of one request
MAX_QUERIES = 16
MAX_QUERY = 8192  # characters
MAX_RESULTS = 50
MAX_STORES = 8  # of one file search
MAX_REQUESTS = 50_000  # of one batch
MAX_BATCH_BYTES = 200 << 20

FileName = Annotated[str, Field(min_length=1, max_length=1024)]
Attributes = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)] | float | bool],
    at_most(16),
]


class FileExpiry(RequestBody):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_FILE_SECONDS, le=MAX_FILE_SECONDS)


class NewUpload(RequestBody):
    bytes: int = Field(ge=0, le=MAX_UPLOAD_BYTES)
    filename: FileName
    mime_type: Name
    purpose: Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
    expires_after: FileExpiry | None = None


class CompleteUpload(RequestBody):
    part_ids: Many[Name] = Field(min_length=1, max_length=10_000)
    md5: Name | None = Field(None, description="Of the whole file; compared, if it is given.")


class StaticChunks(RequestBody):
    max_chunk_size_tokens: int = Field(800, ge=100, le=4096)
    chunk_overlap_tokens: int = Field(400, ge=0, le=2048)


class ChunkingStrategy(RequestBody):
    type: Literal["auto", "static", "other"]
    static: StaticChunks | None = None


class StoreExpiry(RequestBody):
    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class NewStore(RequestBody):
    name: Name | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    file_ids: Many[Name] | None = Field(None, max_length=MAX_BATCH_FILES)
    metadata: Metadata | None = None
    expires_after: StoreExpiry | None = None
    chunking_strategy: ChunkingStrategy | None = None


class StoreUpdate(RequestBody):
    name: Name | None = None
    metadata: Metadata | None = None
    expires_after: StoreExpiry | None = None


class NewFile(RequestBody):
    file_id: Name
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class NewFileBatch(RequestBody):
    file_ids: Many[Name] | None = Field(None, min_length=1, max_length=MAX_BATCH_FILES)
    files: Many[NewFile] | None = Field(None, min_length=1, max_length=MAX_BATCH_FILES)
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class AttributesUpdate(RequestBody):
    attributes: Attributes | None


class HybridSearch(RequestBody):
    embedding_weight: float = Field(1.0, ge=0, le=1000)
    text_weight: float = Field(1.0, ge=0, le=1000)


class RankingOptions(RequestBody):
    ranker: Name | None = Field(
        None, description="auto (vectors and words), none (vectors), or a served cross-encoder."
    )
    score_threshold: float | None = Field(None, ge=0, le=1)
    hybrid_search: HybridSearch | None = None


class SearchFields(RequestBody):
    """What a search and the tool `file_search` have in common."""

    filters: dict[str, Any] | None = None
    max_num_results: int | None = Field(None, ge=1, le=MAX_RESULTS)
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = Field(None, description="Whether the served chat model rewrites the query.")


Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY)]


class StoreSearch(SearchFields):
    query: Query | Annotated[Many[Query], Field(min_length=1, max_length=MAX_QUERIES)]


class FileSearchTool(SearchFields):
    type: Literal["file_search"]
    vector_store_ids: Many[Name] = Field(min_length=1, max_length=MAX_STORES)


# ---------------------------------------------------------------------- answers


class FileObject(TypedDict):
    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FileList(ListPage):
    data: list[FileObject]


class UploadObject(TypedDict):
    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    file: FileObject | None


class UploadPartObject(TypedDict):
    id: str
    object: str
    created_at: int
    upload_id: str


class FileCounts(TypedDict):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class VectorStoreObject(TypedDict):
    id: str
    object: str
    created_at: int
    name: str
    description: str | None
    usage_bytes: int
    file_counts: FileCounts
    status: str
    expires_after: dict[str, Any] | None
    expires_at: int | None
    last_active_at: int
    metadata: dict[str, str]


class VectorStoreList(ListPage):
    data: list[VectorStoreObject]


class StoreFileObject(TypedDict):
    id: str
    object: str
    usage_bytes: int
    created_at: int
    vector_store_id: str
    status: str
    last_error: dict[str, str] | None
    chunking_strategy: dict[str, Any]
    attributes: dict[str, Any]


class StoreFileList(ListPage):
    data: list[StoreFileObject]


class FileBatchObject(TypedDict):
    id: str
    object: str
    created_at: int
    vector_store_id: str
    status: str
    file_counts: FileCounts


class TextContent(TypedDict):
    type: str
    text: str


class FileContent(TypedDict):
    object: str
    data: list[TextContent]
    file_id: NotRequired[str]
    filename: NotRequired[str]
    attributes: NotRequired[dict[str, Any]]
    has_more: bool
    next_page: None


class SearchResult(TypedDict):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, Any]
    content: list[TextContent]


class SearchResults(TypedDict):
    object: str
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool
    next_page: None


# ---------------------------------------------------------------------- batches of requests


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
    requests: Many[BatchedMessage] = Field(min_length=1, max_length=MAX_REQUESTS)


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
