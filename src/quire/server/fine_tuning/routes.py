"""The routes of /v1/fine_tuning/jobs. What they do is loaded by the first request."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.protocol.fine_tuning import (
    FineTuningJobList,
    FineTuningJobObject,
    JobCheckpointList,
    JobEventList,
    NewFineTuningJob,
)
from quire.server.reply import ERRORS, answers
from quire.server.service import Service

PATH = "/v1/fine_tuning/jobs"
JOB = f"{PATH}/{{job_id}}"


def fine_tuning_router(service: Service) -> APIRouter:
    router, opened = APIRouter(tags=["fine-tuning"]), service.retrieval.opened

    @router.post(PATH, responses={**answers(FineTuningJobObject), **ERRORS})
    async def create_job(body: NewFineTuningJob, request: Request) -> Response:
        """Trains an adapter of the model on an uploaded file; it is served when it is done."""
        return await (await opened()).tuning.create(body, request)

    @router.get(PATH, responses={**answers(FineTuningJobList), **ERRORS})
    async def list_jobs(request: Request) -> Response:
        return await (await opened()).tuning.list_all(request)

    @router.get(JOB, responses={**answers(FineTuningJobObject), **ERRORS})
    async def retrieve_job(job_id: str, request: Request) -> Response:
        return await (await opened()).tuning.retrieve(job_id, request)

    @router.get(f"{JOB}/events", responses={**answers(JobEventList), **ERRORS})
    async def list_job_events(job_id: str, request: Request) -> Response:
        """The newest first; with `stream=true` as server-sent events, the oldest first, until the job ends."""
        return await (await opened()).tuning.events(job_id, request)

    @router.get(f"{JOB}/checkpoints", responses={**answers(JobCheckpointList), **ERRORS})
    async def list_job_checkpoints(job_id: str, request: Request) -> Response:
        return await (await opened()).tuning.checkpoints(job_id, request)

    @router.post(f"{JOB}/cancel", responses={**answers(FineTuningJobObject), **ERRORS})
    async def cancel_job(job_id: str, request: Request) -> Response:
        """Ends a job for good; its checkpoints stay."""
        return await (await opened()).tuning.change(job_id, "cancel", request)

    @router.post(f"{JOB}/pause", responses={**answers(FineTuningJobObject), **ERRORS})
    async def pause_job(job_id: str, request: Request) -> Response:
        """Ends the job's process after its step, with a checkpoint."""
        return await (await opened()).tuning.change(job_id, "pause", request)

    @router.post(f"{JOB}/resume", responses={**answers(FineTuningJobObject), **ERRORS})
    async def resume_job(job_id: str, request: Request) -> Response:
        """Goes on with a paused job."""
        return await (await opened()).tuning.change(job_id, "resume", request)

    return router
