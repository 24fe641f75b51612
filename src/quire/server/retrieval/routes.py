"""The routes of an open data folder: files, uploads, vector stores, batches and fine-tuning jobs.

A route's name is that of its method in `Endpoints`, which the first request loads.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.protocol.base import Deleted
from quire.server.protocol.fine_tuning import (
    FineTuningJobList,
    FineTuningJobObject,
    JobCheckpointList,
    JobEventList,
    NewFineTuningJob,
)
from quire.server.protocol.retrieval import (
    AttributesUpdate,
    BatchList,
    BatchObject,
    CompleteUpload,
    FileBatchObject,
    FileContent,
    FileList,
    FileObject,
    MessageBatch,
    MessageBatchList,
    NewBatch,
    NewFile,
    NewFileBatch,
    NewMessageBatch,
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


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    name: str
    answer: Any  # the type of its JSON; None: other bytes
    about: str = ""  # for the OpenAPI document
    body: Any = None  # the type of the request's JSON; None: it has none


FILE, UPLOAD = "/v1/files/{file_id}", "/v1/uploads/{upload_id}"
STORE = "/v1/vector_stores/{store_id}"
STORE_FILE = f"{STORE}/files/{{file_id}}"
STORE_BATCH = f"{STORE}/file_batches/{{batch_id}}"
BATCH = "/v1/batches/{batch_id}"
MESSAGE_BATCH = "/v1/messages/batches/{batch_id}"
JOB = "/v1/fine_tuning/jobs/{job_id}"

# By tag and attribute of Endpoints.
ROUTES: dict[tuple[str, str], tuple[Route, ...]] = {
    ("files", "files"): (
        Route("POST", "/v1/files", "create_file", FileObject,
              "Uploads a file (multipart/form-data: file, purpose, expires_after)."),
        Route("GET", "/v1/files", "list_files", FileList,
              "Files of this key, by `purpose`, `order`, `after` and `limit`."),
        Route("GET", FILE, "retrieve_file", FileObject),
        Route("GET", f"{FILE}/content", "retrieve_file_content", None, "The file's bytes."),
        Route("DELETE", FILE, "delete_file", Deleted, "Deletes a file, also from the vector stores that have it."),
        Route("POST", "/v1/uploads", "create_upload", UploadObject,
              "Begins a file that comes in parts; it must be complete within an hour.", NewUpload),
        Route("POST", f"{UPLOAD}/parts", "create_upload_part", UploadPartObject,
              "A part of at most 64 MiB (multipart/form-data: data)."),
        Route("POST", f"{UPLOAD}/complete", "complete_upload", UploadObject,
              "Joins the parts in the order of `part_ids` to a file.", CompleteUpload),
        Route("POST", f"{UPLOAD}/cancel", "cancel_upload", UploadObject),
    ),
    ("vector stores", "stores"): (
        Route("POST", "/v1/vector_stores", "create_vector_store", VectorStoreObject,
              "Makes a store; files of `file_ids` are parsed and embedded in the background.", NewStore),
        Route("GET", "/v1/vector_stores", "list_vector_stores", VectorStoreList),
        Route("GET", STORE, "retrieve_vector_store", VectorStoreObject),
        Route("POST", STORE, "modify_vector_store", VectorStoreObject,
              "Replaces the name, the metadata or the expiry.", StoreUpdate),
        Route("DELETE", STORE, "delete_vector_store", Deleted, "Deletes a store; its files stay."),
        Route("POST", f"{STORE}/search", "search_vector_store", SearchResults,
              "The passages that fit a query best, by vectors and words.", StoreSearch),
        Route("POST", f"{STORE}/files", "create_vector_store_file", StoreFileObject,
              "Adds a file, which is parsed and embedded in the background.", NewFile),
        Route("GET", f"{STORE}/files", "list_vector_store_files", StoreFileList,
              "Files of a store, by `filter` (a status), `order`, `after`, `before` and `limit`."),
        Route("GET", STORE_FILE, "retrieve_vector_store_file", StoreFileObject),
        Route("POST", STORE_FILE, "update_vector_store_file", StoreFileObject,
              "Replaces the attributes of a file in this store.", AttributesUpdate),
        Route("DELETE", STORE_FILE, "delete_vector_store_file", Deleted,
              "Takes a file out of the store; the file itself stays."),
        Route("GET", f"{STORE_FILE}/content", "retrieve_vector_store_file_content", FileContent,
              "The text that was parsed from the file."),
        Route("POST", f"{STORE}/file_batches", "create_file_batch", FileBatchObject,
              "Adds up to 2,000 files at once.", NewFileBatch),
        Route("GET", STORE_BATCH, "retrieve_file_batch", FileBatchObject),
        Route("POST", f"{STORE_BATCH}/cancel", "cancel_file_batch", FileBatchObject,
              "Files that are not completed yet will not be."),
        Route("GET", f"{STORE_BATCH}/files", "list_file_batch_files", StoreFileList),
    ),
    ("batches", "batches"): (
        Route("POST", "/v1/batches", "create_batch", BatchObject,
              "Answers the requests of a file, one a line, in the background.", NewBatch),
        Route("GET", "/v1/batches", "list_batches", BatchList),
        Route("GET", BATCH, "retrieve_batch", BatchObject),
        Route("POST", f"{BATCH}/cancel", "cancel_batch", BatchObject,
              "Ends a batch; what was answered until then is in its files."),
        Route("POST", "/v1/messages/batches", "create_message_batch", MessageBatch,
              "Answers messages in the background, as Anthropic's API does.", NewMessageBatch),
        Route("GET", "/v1/messages/batches", "list_message_batches", MessageBatchList),
        Route("GET", MESSAGE_BATCH, "retrieve_message_batch", MessageBatch),
        Route("GET", f"{MESSAGE_BATCH}/results", "retrieve_message_batch_results", None,
              "One line of JSON for each request, once the batch has ended."),
        Route("POST", f"{MESSAGE_BATCH}/cancel", "cancel_message_batch", MessageBatch),
        Route("DELETE", MESSAGE_BATCH, "delete_message_batch", None,
              "Deletes a batch that has ended, with its results."),
    ),
    ("fine-tuning", "tuning"): (
        Route("POST", "/v1/fine_tuning/jobs", "create_job", FineTuningJobObject,
              "Trains an adapter of the model on an uploaded file; it is served when it is done.", NewFineTuningJob),
        Route("GET", "/v1/fine_tuning/jobs", "list_jobs", FineTuningJobList),
        Route("GET", JOB, "retrieve_job", FineTuningJobObject),
        Route("GET", f"{JOB}/events", "list_job_events", JobEventList,
              "The newest first; with `stream=true` as server-sent events, the oldest first, until the job ends."),
        Route("GET", f"{JOB}/checkpoints", "list_job_checkpoints", JobCheckpointList),
        Route("POST", f"{JOB}/cancel", "cancel_job", FineTuningJobObject, "Ends a job for good; its checkpoints stay."),
        Route("POST", f"{JOB}/pause", "pause_job", FineTuningJobObject,
              "Ends the job's process after its step, with a checkpoint."),
        Route("POST", f"{JOB}/resume", "resume_job", FineTuningJobObject, "Goes on with a paused job."),
    ),
}  # fmt: skip


def data_router(service: Service) -> APIRouter:
    router = APIRouter()
    for (tag, group), routes in ROUTES.items():
        for route in routes:
            router.add_api_route(
                route.path,
                _endpoint(service, group, route),
                methods=[route.method],
                name=route.name,
                description=route.about,
                tags=[tag],
                responses=ERRORS if route.answer is None else answers(route.answer),
            )
    return router


def _endpoint(service: Service, group: str, route: Route) -> Callable[..., Any]:
    """Calls the route's method with the parameters of its path, its body and the request; FastAPI reads their types
    from the signature."""

    async def endpoint(**given: Any) -> Response:
        endpoints = getattr(await service.retrieval.opened(), group)
        return await getattr(endpoints, route.name)(**given)

    types: dict[str, Any] = dict.fromkeys(re.findall(r"{(\w+)}", route.path), str)
    types |= {"request": Request} if route.body is None else {"body": route.body, "request": Request}
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in types.items()]
    endpoint.__signature__ = Signature(parameters, return_annotation=Response)  # type: ignore[attr-defined]
    return endpoint
