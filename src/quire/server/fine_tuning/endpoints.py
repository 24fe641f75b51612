"""TuningEndpoints: what /v1/fine_tuning/jobs does."""

import asyncio
import json
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from quire.core.config import ADAPTER_CONFIG_FILE
from quire.core.errors import ConfigError, EngineDead, InvalidRequest, NotFound
from quire.observe.host import default_num_threads
from quire.server.fine_tuning.jobs import CANCELLED, ENDED, PAUSED, QUEUED, RUNNING, Job, Jobs
from quire.server.protocol.fine_tuning import (
    FineTuningJobObject,
    JobCheckpoint,
    JobEvent,
    NewFineTuningJob,
)
from quire.server.reply import JsonReply
from quire.server.retrieval.file_endpoints import owner_of
from quire.server.retrieval.retrieval import Retrieval
from quire.server.service import Service
from quire.server.stored import page_limit
from quire.train.settings import AUTO, FAILED, METHODS, SUPERVISED, TrainSettings

T = TypeVar("T")
# OpenAI's and PEFT's names of settings; others go by their own
_NAMES = {
    "n_epochs": "epochs",
    "lora_rank": "rank",
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "gradient_checkpointing": "recompute",
}
_FLAGS = {"targets": "target-modules", "recompute": "gradient-checkpointing", "paged": "offload-optimizer"}
_METRICS = {  # OpenAI's names of an event's fields
    "step": "step",
    "total_steps": "num_steps",
    "train_loss": "loss",
    "full_valid_loss": "validation_loss",
    "train_accuracy": "accuracy",
    "learning_rate": "learning_rate",
}
WEIGHTS = "adapter_model.safetensors"
STREAM_SECONDS = 0.5  # between looks at a job's log


class TuningEndpoints:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self._service, self._retrieval = service, retrieval
        threads = max(1, int(service.settings.train_share * default_num_threads()))
        self.jobs = Jobs(retrieval.folder / "fine_tuning", threads, self._register)

    async def _register(self, name: str, folder: Path) -> None:
        """Copies a finished adapter to the folder of adapters, where servers find it by its name from now on.

        EngineDead: not now.
        """
        client, served = self._service.client, self._service.models.config.adapters.lora_dir
        if not client.is_ready:  # before a copy, as jobs ask again and again
            raise EngineDead(client.status)
        assert served is not None
        target = Path(served) / name
        await asyncio.to_thread(_publish, folder, target)
        await client.load_adapter(name, str(target.resolve()))

    # ------------------------------------------------------------------ requests

    async def create_job(self, body: NewFineTuningJob, request: Request) -> Response:
        service, owner = self._service, owner_of(request)
        if service.models.config.adapters.lora_dir is None:
            raise InvalidRequest(
                "a fine-tuned model is an adapter, and adapters of jobs have no folder: start with --enable-lora or "
                "--lora-dir FOLDER"
            )
        model = service.model_named(body.model)
        if service.adapter_named(body.model) is not None:
            raise InvalidRequest(f"{body.model} is an adapter: fine-tune {model.names[0]}", "model")
        method, given = _method(body)
        flags = _flags(method, given, body.seed or 0)
        rank, highest = flags.get("rank", TrainSettings().rank), service.models.config.adapters.max_lora_rank
        if highest is not None and rank > highest:
            raise InvalidRequest(
                f"hyperparameters: rank={rank} cannot be served: give at most {highest}, or raise --max-lora-rank",
                "hyperparameters",
            )
        job = Job(
            id=f"ftjob-{uuid.uuid4().hex[:24]}",
            owner=owner,
            model=model.names[0],
            base=service.models.config.model.model,
            suffix=body.suffix,
            training_file=body.training_file,
            validation_file=body.validation_file,
            flags=flags,
            hyperparameters=given,
            method=method,
            seed=body.seed or 0,
            created_at=int(time.time()),
            metadata=body.metadata,
        )
        training = await self._path_of(owner, body.training_file, "training_file")
        validation = None
        if body.validation_file is not None:
            validation = await self._path_of(owner, body.validation_file, "validation_file")
        await self.jobs.create(job, training, validation)
        return await self._reply(job)

    async def list_jobs(self, request: Request) -> Response:
        jobs, more = _page(self.jobs.all_of(owner_of(request)), request, lambda job: job.id)
        return _list(await asyncio.to_thread(lambda: [self._shown(job) for job in jobs]), more)

    async def retrieve_job(self, job_id: str, request: Request) -> Response:
        return await self._reply(self._job(job_id, request))

    async def _change(self, action: str, job_id: str, request: Request) -> Response:
        job = self._job(job_id, request)
        wanted, allowed = {
            "cancel": (CANCELLED, (QUEUED, RUNNING, PAUSED)),
            "pause": (PAUSED, (QUEUED, RUNNING)),
            "resume": (QUEUED, (PAUSED, FAILED)),
        }[action]
        if job.status == FAILED and wanted == QUEUED:
            self.jobs.refuse_if_taken(job)
            if not self.jobs.files(job).checkpoints.steps():
                raise InvalidRequest(f"the job {job.id} failed without a checkpoint: create it again")
        if job.status not in allowed:
            raise InvalidRequest(
                f"the job {job.id} is {job.status}: only {' or '.join(allowed)} jobs take {action}"
            )
        self.jobs.change(job, wanted)
        return await self._reply(job)

    cancel_job = partialmethod(_change, "cancel")
    pause_job = partialmethod(_change, "pause")
    resume_job = partialmethod(_change, "resume")

    async def list_job_events(self, job_id: str, request: Request) -> Response:
        job = self._job(job_id, request)
        if request.query_params.get("stream") == "true":
            return StreamingResponse(self._stream(job), media_type="text/event-stream")
        events = await asyncio.to_thread(self._events, job)
        return _list(*_page(events[::-1], request, lambda event: event["id"]))

    async def list_job_checkpoints(self, job_id: str, request: Request) -> Response:
        job = self._job(job_id, request)
        checkpoints = await asyncio.to_thread(self._checkpoints, job)
        return _list(*_page(checkpoints[::-1], request, lambda one: one["id"]))

    # ------------------------------------------------------------------ inside

    async def _reply(self, job: Job) -> Response:
        """Made in a thread, as are lists: a job's log has a line for each of its steps."""
        return JsonReply(await asyncio.to_thread(self._shown, job))

    def _job(self, job_id: str, request: Request) -> Job:
        job = self.jobs.get(owner_of(request), job_id)
        if job is None:
            raise NotFound.of("fine-tuning job", job_id)
        return job

    async def _path_of(self, owner: str, file_id: str, param: str) -> Path:
        """An uploaded file's content on disk."""
        files = self._retrieval.files
        file = await self._retrieval.run(files.get, owner, file_id)
        if file.purpose != "fine-tune":
            raise InvalidRequest(
                f"the file {file.id} has the purpose {file.purpose!r}: upload it with purpose 'fine-tune'",
                param,
            )
        return files.path(file.id)

    async def _stream(self, job: Job) -> AsyncIterator[str]:
        """Events as they come, until the job ends."""
        sent: set[str] = set()
        while True:
            has_ended = job.status in ENDED
            events = await asyncio.to_thread(self._events, job)
            for event in events:  # one of the training process may come late, before others that were sent
                if event["id"] not in sent:
                    yield f"data: {json.dumps(event)}\n\n"
            sent.update(event["id"] for event in events)
            if has_ended:
                yield "data: [DONE]\n\n"
                return
            await asyncio.sleep(STREAM_SECONDS)

    def _events(self, job: Job) -> list[JobEvent]:
        return [_event(job, event) for event in self.jobs.events(job)]

    def _checkpoints(self, job: Job) -> list[JobCheckpoint]:
        metrics = {e["step"]: e for e in self.jobs.files(job).log.read() if e["type"] == "metrics"}
        return [
            {
                "id": f"ftckpt-{job.id.removeprefix('ftjob-')}-{step}",
                "object": "fine_tuning.job.checkpoint",
                "created_at": metrics[step]["created_at"],
                "fine_tuning_job_id": job.id,
                "fine_tuned_model_checkpoint": f"{job.adapter}:ckpt-step-{step}",
                "step_number": step,
                "metrics": _metrics(metrics[step]),
            }
            for step in self.jobs.files(job).checkpoints.steps()
            if step in metrics
        ]

    def _shown(self, job: Job) -> FineTuningJobObject:
        steps = [event for event in self.jobs.files(job).log.read() if event["type"] == "metrics"]
        left = None
        if job.status == RUNNING and steps:
            seconds = sum(step["seconds"] for step in steps) / len(steps)
            left = int(time.time() + (steps[-1]["num_steps"] - steps[-1]["step"]) * seconds)
        numbers = {
            "n_epochs": AUTO,
            "batch_size": AUTO,
            "learning_rate_multiplier": AUTO,
            **job.hyperparameters,
        }
        return {
            "id": job.id,
            "object": "fine_tuning.job",
            "created_at": job.created_at,
            "finished_at": job.finished_at,
            "estimated_finish": left,
            "model": job.model,
            "fine_tuned_model": job.adapter if job.status == "succeeded" else None,
            "organization_id": "quire",
            "status": job.status,
            "training_file": job.training_file,
            "validation_file": job.validation_file,
            "result_files": [],
            "hyperparameters": numbers,
            "method": {"type": job.method, job.method: {"hyperparameters": numbers}},
            "trained_tokens": sum(step["num_tokens"] for step in steps)
            if job.status == "succeeded"
            else None,
            "error": None
            if job.error is None
            else {"code": "training_failed", "message": job.error, "param": None},
            "seed": job.seed,
            "user_provided_suffix": job.suffix,
            "integrations": [],
            "metadata": job.metadata,
        }


def _publish(folder: Path, target: Path) -> None:
    """The whole folder appears at once; an older one of the name is replaced."""
    beside = target.with_name(f".{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name in (ADAPTER_CONFIG_FILE, WEIGHTS):
        shutil.copyfile(folder / name, beside / name)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _method(body: NewFineTuningJob) -> tuple[str, dict[str, Any]]:
    """The method, and its hyperparameters as they were given."""
    if body.method is None:
        return SUPERVISED, body.hyperparameters or {}
    if body.method.type not in METHODS:
        raise InvalidRequest(
            f"method.type={body.method.type[:40]!r} is not known: choose one of {', '.join(METHODS)}",
            "method",
        )
    own = getattr(body.method, body.method.type)
    return body.method.type, (own.hyperparameters if own is not None else None) or body.hyperparameters or {}


def _flags(method: str, given: dict[str, Any], seed: int) -> dict[str, Any]:
    """The flags of `quire finetune`; InvalidRequest for a value that cannot work."""
    named = {_NAMES.get(name, name): value for name, value in given.items() if value not in (None, AUTO)}
    if isinstance(named.get("targets"), list):
        named["targets"] = tuple(named["targets"])
    settings = {**named, "method": method, "seed": seed}
    try:
        TrainSettings.of(**settings)
    except (ConfigError, TypeError) as error:
        raise InvalidRequest(f"hyperparameters: {error}", "hyperparameters") from None
    return {
        _FLAGS.get(name, name.replace("_", "-")): list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }


def _event(job: Job, event: dict[str, Any]) -> JobEvent:
    data = None
    match event["type"]:
        case "metrics":
            message = f"Step {event['step']}/{event['num_steps']}: training loss={event['loss']:.4f}"
            data = _metrics(event)
        case "checkpoint":
            message = f"Checkpoint created at step {event['step']}"
        case _:
            message = event["message"]
    return {
        "id": f"ftevent-{job.id.removeprefix('ftjob-')}-{event['key']}",
        "object": "fine_tuning.job.event",
        "created_at": event["created_at"],
        "level": event.get("level", "info"),
        "type": "metrics" if event["type"] == "metrics" else "message",
        "message": message,
        "data": data,
    }


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    return {name: event[own] for name, own in _METRICS.items() if event.get(own) is not None}


def _list(shown: Sequence[Any], has_more: bool) -> JsonReply:
    return JsonReply({"object": "list", "data": shown, "has_more": has_more})


def _page(entries: Sequence[T], request: Request, key: Any) -> tuple[list[T], bool]:
    """After the entry that the query names, `limit` of them."""
    limit, after = page_limit(request.query_params.get("limit", "20"), 100), request.query_params.get("after")
    start = 0
    if after is not None:
        start = next((at + 1 for at, entry in enumerate(entries) if key(entry) == after), len(entries))
    return list(entries[start : start + limit]), start + limit < len(entries)
