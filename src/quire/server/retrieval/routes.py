"""The routes of /v1/files, /v1/uploads, /v1/vector_stores and batches. What they do is loaded by the first request."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.protocol.base import Deleted
from quire.server.protocol.batches import (
    BatchList,
    BatchObject,
    MessageBatch,
    MessageBatchList,
    NewBatch,
    NewMessageBatch,
)
from quire.server.protocol.retrieval import (
    AttributesUpdate,
    CompleteUpload,
    FileBatchObject,
    FileContent,
    FileList,
    FileObject,
    NewFile,
    NewFileBatch,
    NewStore,
    NewUpload,
    SearchResults,
    StoreFileList,
    StoreFileObject,
    StoreSearch,
    StoreUpdate,
    UploadObject,
    UploadPartObject,
    VectorStoreList,
    VectorStoreObject,
)
from quire.server.reply import ERRORS, answers
from quire.server.service import Service

STORE = "/v1/vector_stores/{store_id}"
STORE_FILE = f"{STORE}/files/{{file_id}}"
STORE_BATCH = f"{STORE}/file_batches/{{batch_id}}"


def files_router(service: Service) -> APIRouter:
    router, opened = APIRouter(tags=["files"]), service.retrieval.opened

    @router.post("/v1/files", responses={**answers(FileObject), **ERRORS})
    async def create_file(request: Request) -> Response:
        """Uploads a file (multipart/form-data: file, purpose, expires_after)."""
        return await (await opened()).files.create(request)

    @router.get("/v1/files", responses={**answers(FileList), **ERRORS})
    async def list_files(request: Request) -> Response:
        """Files of this key, by `purpose`, `order`, `after` and `limit`."""
        return await (await opened()).files.list_all(request)

    @router.get("/v1/files/{file_id}", responses={**answers(FileObject), **ERRORS})
    async def retrieve_file(file_id: str, request: Request) -> Response:
        return await (await opened()).files.retrieve(file_id, request)

    @router.get("/v1/files/{file_id}/content", responses=ERRORS)
    async def retrieve_file_content(file_id: str, request: Request) -> Response:
        """The file's bytes."""
        return await (await opened()).files.content(file_id, request)

    @router.delete("/v1/files/{file_id}", responses={**answers(Deleted), **ERRORS})
    async def delete_file(file_id: str, request: Request) -> Response:
        """Deletes a file, also from the vector stores that have it."""
        return await (await opened()).files.delete(file_id, request)

    @router.post("/v1/uploads", responses={**answers(UploadObject), **ERRORS})
    async def create_upload(body: NewUpload, request: Request) -> Response:
        """Begins a file that comes in parts; it must be complete within an hour."""
        return await (await opened()).files.create_upload(body, request)

    @router.post("/v1/uploads/{upload_id}/parts", responses={**answers(UploadPartObject), **ERRORS})
    async def create_upload_part(upload_id: str, request: Request) -> Response:
        """A part of at most 64 MiB (multipart/form-data: data)."""
        return await (await opened()).files.add_part(upload_id, request)

    @router.post("/v1/uploads/{upload_id}/complete", responses={**answers(UploadObject), **ERRORS})
    async def complete_upload(upload_id: str, body: CompleteUpload, request: Request) -> Response:
        """Joins the parts in the order of `part_ids` to a file."""
        return await (await opened()).files.complete_upload(upload_id, body, request)

    @router.post("/v1/uploads/{upload_id}/cancel", responses={**answers(UploadObject), **ERRORS})
    async def cancel_upload(upload_id: str, request: Request) -> Response:
        return await (await opened()).files.cancel_upload(upload_id, request)

    return router


def stores_router(service: Service) -> APIRouter:
    router, opened = APIRouter(tags=["vector stores"]), service.retrieval.opened

    @router.post("/v1/vector_stores", responses={**answers(VectorStoreObject), **ERRORS})
    async def create_vector_store(body: NewStore, request: Request) -> Response:
        """Makes a store; files of `file_ids` are parsed and embedded in the background."""
        return await (await opened()).stores.create(body, request)

    @router.get("/v1/vector_stores", responses={**answers(VectorStoreList), **ERRORS})
    async def list_vector_stores(request: Request) -> Response:
        return await (await opened()).stores.list_all(request)

    @router.get(STORE, responses={**answers(VectorStoreObject), **ERRORS})
    async def retrieve_vector_store(store_id: str, request: Request) -> Response:
        return await (await opened()).stores.retrieve(store_id, request)

    @router.post(STORE, responses={**answers(VectorStoreObject), **ERRORS})
    async def modify_vector_store(store_id: str, body: StoreUpdate, request: Request) -> Response:
        """Replaces the name, the metadata or the expiry."""
        return await (await opened()).stores.update(store_id, body, request)

    @router.delete(STORE, responses={**answers(Deleted), **ERRORS})
    async def delete_vector_store(store_id: str, request: Request) -> Response:
        """Deletes a store; its files stay."""
        return await (await opened()).stores.delete(store_id, request)

    @router.post(f"{STORE}/search", responses={**answers(SearchResults), **ERRORS})
    async def search_vector_store(store_id: str, body: StoreSearch, request: Request) -> Response:
        """The passages that fit a query best, by vectors and words."""
        return await (await opened()).stores.search(store_id, body, request)

    _add_store_files(router, service)
    _add_file_batches(router, service)
    return router


def _add_store_files(router: APIRouter, service: Service) -> None:
    opened = service.retrieval.opened

    @router.post(f"{STORE}/files", responses={**answers(StoreFileObject), **ERRORS})
    async def create_vector_store_file(store_id: str, body: NewFile, request: Request) -> Response:
        """Adds a file, which is parsed and embedded in the background."""
        return await (await opened()).stores.add_file(store_id, body, request)

    @router.get(f"{STORE}/files", responses={**answers(StoreFileList), **ERRORS})
    async def list_vector_store_files(store_id: str, request: Request) -> Response:
        """Files of a store, by `filter` (a status), `order`, `after`, `before` and `limit`."""
        return await (await opened()).stores.list_files(store_id, request)

    @router.get(STORE_FILE, responses={**answers(StoreFileObject), **ERRORS})
    async def retrieve_vector_store_file(store_id: str, file_id: str, request: Request) -> Response:
        return await (await opened()).stores.retrieve_file(store_id, file_id, request)

    @router.post(STORE_FILE, responses={**answers(StoreFileObject), **ERRORS})
    async def update_vector_store_file(
        store_id: str, file_id: str, body: AttributesUpdate, request: Request
    ) -> Response:
        """Replaces the attributes of a file in this store."""
        return await (await opened()).stores.update_file(store_id, file_id, body, request)

    @router.delete(STORE_FILE, responses={**answers(Deleted), **ERRORS})
    async def delete_vector_store_file(store_id: str, file_id: str, request: Request) -> Response:
        """Takes a file out of the store; the file itself stays."""
        return await (await opened()).stores.remove_file(store_id, file_id, request)

    @router.get(f"{STORE_FILE}/content", responses={**answers(FileContent), **ERRORS})
    async def retrieve_vector_store_file_content(store_id: str, file_id: str, request: Request) -> Response:
        """The text that was parsed from the file."""
        return await (await opened()).stores.file_content(store_id, file_id, request)


def _add_file_batches(router: APIRouter, service: Service) -> None:
    opened = service.retrieval.opened

    @router.post(f"{STORE}/file_batches", responses={**answers(FileBatchObject), **ERRORS})
    async def create_file_batch(store_id: str, body: NewFileBatch, request: Request) -> Response:
        """Adds up to 2,000 files at once."""
        return await (await opened()).stores.create_batch(store_id, body, request)

    @router.get(STORE_BATCH, responses={**answers(FileBatchObject), **ERRORS})
    async def retrieve_file_batch(store_id: str, batch_id: str, request: Request) -> Response:
        return await (await opened()).stores.retrieve_batch(store_id, batch_id, request)

    @router.post(f"{STORE_BATCH}/cancel", responses={**answers(FileBatchObject), **ERRORS})
    async def cancel_file_batch(store_id: str, batch_id: str, request: Request) -> Response:
        """Files that are not completed yet will not be."""
        return await (await opened()).stores.retrieve_batch(store_id, batch_id, request, cancel=True)

    @router.get(f"{STORE_BATCH}/files", responses={**answers(StoreFileList), **ERRORS})
    async def list_file_batch_files(store_id: str, batch_id: str, request: Request) -> Response:
        return await (await opened()).stores.list_files(store_id, request, batch_id)


def batches_router(service: Service) -> APIRouter:
    router, opened = APIRouter(tags=["batches"]), service.retrieval.opened

    @router.post("/v1/batches", responses={**answers(BatchObject), **ERRORS})
    async def create_batch(body: NewBatch, request: Request) -> Response:
        """Answers the requests of a file, one a line, in the background."""
        return await (await opened()).batches.create(body, request)

    @router.get("/v1/batches", responses={**answers(BatchList), **ERRORS})
    async def list_batches(request: Request) -> Response:
        return await (await opened()).batches.list_all(request)

    @router.get("/v1/batches/{batch_id}", responses={**answers(BatchObject), **ERRORS})
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        return await (await opened()).batches.retrieve(batch_id, request)

    @router.post("/v1/batches/{batch_id}/cancel", responses={**answers(BatchObject), **ERRORS})
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """Ends a batch; what was answered until then is in its files."""
        return await (await opened()).batches.cancel(batch_id, request)

    _add_message_batches(router, service)
    return router


def _add_message_batches(router: APIRouter, service: Service) -> None:
    opened, path = service.retrieval.opened, "/v1/messages/batches"

    @router.post(path, responses={**answers(MessageBatch), **ERRORS})
    async def create_message_batch(body: NewMessageBatch, request: Request) -> Response:
        """Answers messages in the background, as Anthropic's API does."""
        return await (await opened()).batches.create_messages(body, request)

    @router.get(path, responses={**answers(MessageBatchList), **ERRORS})
    async def list_message_batches(request: Request) -> Response:
        return await (await opened()).batches.list_messages(request)

    @router.get(f"{path}/{{batch_id}}", responses={**answers(MessageBatch), **ERRORS})
    async def retrieve_message_batch(batch_id: str, request: Request) -> Response:
        return await (await opened()).batches.retrieve_messages(batch_id, request)

    @router.get(f"{path}/{{batch_id}}/results", responses=ERRORS)
    async def retrieve_message_batch_results(batch_id: str, request: Request) -> Response:
        """One line of JSON for each request, once the batch has ended."""
        return await (await opened()).batches.message_results(batch_id, request)

    @router.post(f"{path}/{{batch_id}}/cancel", responses={**answers(MessageBatch), **ERRORS})
    async def cancel_message_batch(batch_id: str, request: Request) -> Response:
        return await (await opened()).batches.cancel_messages(batch_id, request)

    @router.delete(f"{path}/{{batch_id}}", responses=ERRORS)
    async def delete_message_batch(batch_id: str, request: Request) -> Response:
        """Deletes a batch that has ended, with its results."""
        return await (await opened()).batches.delete_messages(batch_id, request)
