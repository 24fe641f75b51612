"""Types that all endpoints share, and the sampling fields of chats and completions."""

from collections.abc import Sized
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from quire.core.sampling import MAX_LOGIT_BIASES, MAX_STOPS

# JSON's integers have no bound; the engine's have.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
T = TypeVar("T")
# A list whose first wrong item ends the validation: one finding, not a million.
Many = Annotated[list[T], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=1024)]  # of a model, a user or a cache salt
Inputs = Annotated[
    str | Many[str] | Many[Int] | Many[Many[Int]], Field(description="Text, token ids, or a list of either.")
]


def at_most(limit: int) -> BeforeValidator:
    """Counts the entries of an object before any is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries and {limit} are allowed: send fewer")
        return value

    return BeforeValidator(check)


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]


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


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


class ListPage(TypedDict):
    """What the pages of lists have beside their `data`."""

    object: str
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: str
    input_tokens: int


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = (
        None  # with include_usage: token counts so far in every chunk, as vLLM has it
    )


class PromptLogprob(TypedDict):
    """vLLM's shape of a prompt token's alternatives, by token id."""

    logprob: float
    rank: int
    decoded_token: str | None


# ---------------------------------------------------------------------- sampling


ModelName = Annotated[
    Name | None, Field(description="A name that /v1/models lists; the first of them if left out.")
]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]


class SamplingFields(RequestBody):
    """What /v1/chat/completions and /v1/completions share: OpenAI's fields, then vLLM's."""

    model: ModelName = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = Field(None, description="Answers per prompt, at most max_num_seqs.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="The same seed and request give the same tokens."
    )
    stop: str | Stops | None = None
    max_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_LOGIT_BIASES)] = Field(
        None, description="Token id, as text, to a bias in [-100, 100]."
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="The answer's form: {'type': 'json_schema', 'json_schema': {'schema': …}} or 'json_object'.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: Many[Int] | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[Int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = Field(
        None, description="Keep this many of the prompt's last tokens; -1: as many as fit."
    )
    priority: Int | None = None
    cache_salt: Name | None = Field(None, description="Requests share cached prefixes within one salt only.")
    add_special_tokens: bool | None = None

    use_beam_search: bool | None = Field(None, description="best_of beams, at most 32; not with stream.")
    best_of: Int | None = Field(None, description="Sequences to make, or beams; the n best are returned.")
    length_penalty: float | None = Field(None, description="Of beams: above 0 favours longer ones.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Of beams.")

    structured_outputs: dict[str, Any] | None = Field(
        None, description="The answer's form: one of json, regex, choice, grammar."
    )
    regex: str | None = Field(None, description="The answer matches this as a whole.")
    grammar: str | None = Field(
        None, description="The answer follows this grammar, in Lark's notation or GBNF."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None


class ExtraFields(RequestBody):
    """What /v1/responses and /v1/messages take beyond their own APIs."""

    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: Many[Int] | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    cache_salt: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def extras(self) -> dict[str, Any]:
        """The fields that are set, under their names in a chat request."""
        return {
            name: value for name in ExtraFields.model_fields if (value := getattr(self, name)) is not None
        }
