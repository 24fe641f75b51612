"""Types that all endpoints share."""

from typing import Annotated, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

# JSON's integers have no bound; the engine's have.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class RequestBody(BaseModel):
    """Unknown fields are ignored, as OpenAI ignores them; known ones must have the right type."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class PromptLogprob(TypedDict):
    """vLLM's shape of a prompt token's alternatives, by token id."""

    logprob: float
    rank: int
    decoded_token: str | None
