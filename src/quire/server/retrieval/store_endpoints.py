"""StoreEndpoints: what /v1/vector_stores does."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.rag.filters import check_attributes
from quire.rag.stores import COUNTS, FileBatch, NewStoreFile, StoreFile, VectorStore
from quire.server.protocol.base import Deleted
from quire.server.protocol.retrieval import (
    AttributesUpdate,
    ChunkingStrategy,
    FileBatchObject,
    FileContent,
    NewFile,
    NewFileBatch,
    NewStore,
    SearchResults,
    StoreFileObject,
    StoreSearch,
    StoreUpdate,
    VectorStoreObject,
)
from quire.server.reply import JsonReply
from quire.server.retrieval.file_endpoints import in_thread, owner_of, page_query
from quire.server.retrieval.retrieval import Retrieval
from quire.server.retrieval.search import SearchOptions, filter_of, rewritten, shown_result
from quire.server.service import Service
from quire.server.stored import list_page

DEFAULT_TOKENS, DEFAULT_OVERLAP = 800, 400


class StoreEndpoints:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self._service = service
        self.retrieval = retrieval
        self._stores = retrieval.stores

    @in_thread(adds_files=True)
    def create_vector_store(self, body: NewStore, request: Request) -> VectorStoreObject:
        owner = owner_of(request)
        days = body.expires_after.days if body.expires_after is not None else None
        files = [
            NewFile(file_id=name, chunking_strategy=body.chunking_strategy) for name in body.file_ids or ()
        ]
        added = self._checked(owner, files)
        store = self._stores.create(owner, body.name or "", body.description, body.metadata or {}, days)
        if added:
            self._stores.add_files(store, added)
        return self._shown(store)

    @in_thread()
    def list_vector_stores(self, request: Request) -> dict[str, Any]:
        stores, more = self._stores.page(owner_of(request), page_query(request.query_params))
        return list_page([self._shown(store) for store in stores], more)

    @in_thread()
    def retrieve_vector_store(self, store_id: str, request: Request) -> VectorStoreObject:
        return self._shown(self._store(store_id, request))

    @in_thread()
    def modify_vector_store(self, store_id: str, body: StoreUpdate, request: Request) -> VectorStoreObject:
        changes: dict[str, Any] = {}
        for field in body.model_fields_set:
            if field == "expires_after":
                changes["expires_days"] = body.expires_after.days if body.expires_after is not None else None
            elif field == "metadata":
                changes["metadata"] = body.metadata or {}
            elif body.name is not None:
                changes["name"] = body.name
        return self._shown(self._stores.update(owner_of(request), store_id, changes))

    @in_thread()
    def delete_vector_store(self, store_id: str, request: Request) -> Deleted:
        self._stores.delete(owner_of(request), store_id)
        return {"id": store_id, "object": "vector_store.deleted", "deleted": True}

    async def search_vector_store(self, store_id: str, body: StoreSearch, request: Request) -> Response:
        options, filter = SearchOptions.of(body), filter_of(body)
        queries = [body.query] if isinstance(body.query, str) else body.query
        store = await self.retrieval.run(self._stores.usable, owner_of(request), store_id)
        if body.rewrite_query:
            queries = await rewritten(self._service, request, queries)
        passages = await self.retrieval.search(store, queries, options, filter)
        results: SearchResults = {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": [shown_result(passage) for passage in passages],
            "has_more": False,
            "next_page": None,
        }
        return JsonReply(results)

    # ------------------------------------------------------------------ files of a store

    @in_thread(adds_files=True)
    def create_vector_store_file(self, store_id: str, body: NewFile, request: Request) -> StoreFileObject:
        owner = owner_of(request)
        added = self._checked(owner, [body])
        store = self._stores.usable(owner, store_id)
        self._stores.add_files(store, added)
        return shown_store_file(self._stores.file(store, body.file_id))

    @in_thread()
    def list_vector_store_files(
        self, store_id: str, request: Request, batch_id: str | None = None
    ) -> dict[str, Any]:
        asked, status = page_query(request.query_params), request.query_params.get("filter")
        if status is not None and status not in COUNTS:
            raise InvalidRequest(f"filter={status[:40]!r}: give one of {', '.join(COUNTS)}", "filter")
        store = self._store(store_id, request)
        if batch_id is not None:
            self._stores.batch(store, batch_id)
        files, more = self._stores.file_page(store, asked, status, batch_id)
        return list_page([shown_store_file(file) for file in files], more)

    @in_thread()
    def retrieve_vector_store_file(self, store_id: str, file_id: str, request: Request) -> StoreFileObject:
        return shown_store_file(self._stores.file(self._store(store_id, request), file_id))

    @in_thread()
    def update_vector_store_file(
        self, store_id: str, file_id: str, body: AttributesUpdate, request: Request
    ) -> StoreFileObject:
        attributes, store = _attributes(body.attributes), self._store(store_id, request)
        return shown_store_file(self._stores.set_attributes(store, file_id, attributes))

    @in_thread()
    def delete_vector_store_file(self, store_id: str, file_id: str, request: Request) -> Deleted:
        """From the store only: the file itself stays."""
        self._stores.remove_file(self._store(store_id, request), file_id)
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @in_thread()
    def retrieve_vector_store_file_content(
        self, store_id: str, file_id: str, request: Request
    ) -> FileContent:
        store = self._store(store_id, request)
        file = self._stores.file(store, file_id)
        name = self.retrieval.files.get(owner_of(request), file_id).filename
        return {
            "object": "vector_store.file_content.page",
            "file_id": file_id,
            "filename": name,
            "attributes": file.attributes,
            "data": [{"type": "text", "text": self._stores.text(store, file_id)}],
            "has_more": False,
            "next_page": None,
        }

    # ------------------------------------------------------------------ batches of files

    @in_thread(adds_files=True)
    def create_file_batch(self, store_id: str, body: NewFileBatch, request: Request) -> FileBatchObject:
        owner = owner_of(request)
        if (body.file_ids is None) == (body.files is None):
            raise InvalidRequest("send either file_ids or files", "file_ids")
        files = body.files or [
            NewFile(file_id=name, attributes=body.attributes, chunking_strategy=body.chunking_strategy)
            for name in body.file_ids or ()
        ]
        added = self._checked(owner, files)
        return self._shown_batch(self._stores.create_batch(self._stores.usable(owner, store_id), added))

    @in_thread()
    def retrieve_file_batch(self, store_id: str, batch_id: str, request: Request) -> FileBatchObject:
        return self._shown_batch(self._stores.batch(self._store(store_id, request), batch_id))

    @in_thread()
    def cancel_file_batch(self, store_id: str, batch_id: str, request: Request) -> FileBatchObject:
        return self._shown_batch(self._stores.cancel_batch(self._store(store_id, request), batch_id))

    list_file_batch_files = list_vector_store_files

    def _store(self, store_id: str, request: Request) -> VectorStore:
        return self._stores.get(owner_of(request), store_id)

    def _checked(self, owner: str, files: Sequence[NewFile]) -> list[NewStoreFile]:
        """What is to be added; raises if a file is not there, or a field is wrong."""
        added: dict[str, NewStoreFile] = {}
        for file in files:
            tokens, overlap = _chunking(file.chunking_strategy)
            added[file.file_id] = NewStoreFile(file.file_id, _attributes(file.attributes), tokens, overlap)
        for name in added:
            self.retrieval.files.get(owner, name)
        return list(added.values())

    def _shown(self, store: VectorStore) -> VectorStoreObject:
        counts, num_bytes = self._stores.counts(store.id)
        status = "in_progress" if counts["in_progress"] else "completed"
        days = store.expires_days
        return {
            "id": store.id,
            "object": "vector_store",
            "created_at": store.created_at,
            "name": store.name,
            "description": store.description,
            "usage_bytes": num_bytes,
            "file_counts": counts,  # type: ignore[typeddict-item]
            "status": "expired" if store.is_expired else status,
            "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
            "expires_at": store.expires_at,
            "last_active_at": store.last_active_at,
            "metadata": store.metadata,
        }

    def _shown_batch(self, batch: FileBatch) -> FileBatchObject:
        counts, _ = self._stores.counts(batch.store_id, batch.id)
        status = "in_progress" if counts["in_progress"] else "completed"
        if status == "completed" and counts["total"] and counts["failed"] == counts["total"]:
            status = "failed"
        return {
            "id": batch.id,
            "object": "vector_store.files_batch",
            "created_at": batch.created_at,
            "vector_store_id": batch.store_id,
            "status": "cancelled" if batch.is_cancelled else status,
            "file_counts": counts,  # type: ignore[typeddict-item]
        }


def shown_store_file(file: StoreFile) -> StoreFileObject:
    error = None
    if file.error_code is not None:
        error = {"code": file.error_code, "message": file.error_message or ""}
    return {
        "id": file.id,
        "object": "vector_store.file",
        "usage_bytes": file.usage_bytes,
        "created_at": file.created_at,
        "vector_store_id": file.store_id,
        "status": file.status,
        "last_error": error,
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": file.max_tokens, "chunk_overlap_tokens": file.overlap},
        },
        "attributes": file.attributes,
    }


def _chunking(strategy: ChunkingStrategy | None) -> tuple[int, int]:
    if strategy is None or strategy.type != "static":
        return DEFAULT_TOKENS, DEFAULT_OVERLAP
    static = strategy.static
    if static is None:
        raise InvalidRequest("chunking_strategy of type static needs static", "chunking_strategy")
    if 2 * static.chunk_overlap_tokens > static.max_chunk_size_tokens:
        raise InvalidRequest(
            f"chunk_overlap_tokens={static.chunk_overlap_tokens} is more than half of max_chunk_size_tokens="
            f"{static.max_chunk_size_tokens}: lower it",
            "chunking_strategy",
        )
    return static.max_chunk_size_tokens, static.chunk_overlap_tokens


def _attributes(given: dict[str, Any] | None) -> dict[str, Any]:
    try:
        return check_attributes(given or {})
    except ValueError as error:
        raise InvalidRequest(str(error), "attributes") from None
