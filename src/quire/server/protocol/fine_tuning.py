"""/v1/fine_tuning/jobs."""

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Metadata, Name, RequestBody, at_most

Hyperparameters = Annotated[dict[Annotated[str, Field(max_length=64)], Any], at_most(32)]


class MethodFields(RequestBody):
    hyperparameters: Hyperparameters | None = None


class Method(RequestBody):
    type: Name
    supervised: MethodFields | None = None
    dpo: MethodFields | None = None


class NewFineTuningJob(RequestBody):
    model: Name
    training_file: Name
    validation_file: Name | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    hyperparameters: Hyperparameters | None = None  # as older clients send them
    method: Method | None = None
    metadata: Metadata | None = None


class JobError(TypedDict):
    code: str
    message: str
    param: str | None


class FineTuningJobObject(TypedDict):
    id: str
    object: str
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    trained_tokens: int | None
    error: JobError | None
    seed: int
    user_provided_suffix: str | None
    integrations: list[Any]
    metadata: dict[str, str] | None


class JobEvent(TypedDict):
    id: str
    object: str
    created_at: int
    level: str
    type: str
    message: str
    data: dict[str, Any] | None


class JobCheckpoint(TypedDict):
    id: str
    object: str
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, float]


class FineTuningPage(TypedDict):
    object: str
    has_more: bool


class FineTuningJobList(FineTuningPage):
    data: list[FineTuningJobObject]


class JobEventList(FineTuningPage):
    data: list[JobEvent]


class JobCheckpointList(FineTuningPage):
    data: list[JobCheckpoint]
