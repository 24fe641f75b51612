"""/v1/models; /tokenize and /detokenize, in vLLM's shape; /v1/embeddings."""

from typing import Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Inputs, Int, Many, Name, RequestBody


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    task: str  # "generate", or "embed" for all that encoders do
    parent: NotRequired[str]  # of an adapter: its base
    max_model_len: NotRequired[int]  # not known of an embedding model that has not been started


class ModelList(TypedDict):
    object: str
    data: list[Model]


class AnthropicModel(TypedDict):
    """For clients that send `anthropic-version`."""

    type: str
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizeRequest(RequestBody):
    """A prompt, or messages for the chat template."""

    model: Name | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[dict[str, Any]] | None = None


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeRequest(RequestBody):
    model: Name | None = None
    tokens: Many[Int]


class Detokenized(TypedDict):
    prompt: str


class EmbeddingRequest(RequestBody):
    model: Name | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = Field(None, description="Keep this many numbers of each vector.")
    truncate_prompt_tokens: Int | None = Field(
        None, description="Cut texts to this many tokens; -1: to what the model takes."
    )
    add_special_tokens: bool | None = None
    prompt_name: Name | None = Field(
        None, description="Texts begin with the model's own prompt of that name, such as query."
    )
    user: Name | None = None


class Embedding(TypedDict):
    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
