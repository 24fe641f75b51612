"""/v1/completions."""

from typing import NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Int, PromptLogprob, Usage
from quire.server.protocol.sampling import SamplingFields


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[Int] | list[list[Int]] = Field(
        description="Text, token ids, or a list of either."
    )
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Completion(TypedDict):
    """A whole answer, and the shape of its chunks as well."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
