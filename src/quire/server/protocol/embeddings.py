"""/v1/embeddings."""

from typing import Literal

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Int, RequestBody


class EmbeddingRequest(RequestBody):
    model: str | None = None
    input: str | list[str] | list[Int] | list[list[Int]] = Field(
        description="Text, token ids, or a list of either."
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = Field(None, description="Keep this many numbers of each vector.")
    truncate_prompt_tokens: Int | None = Field(
        None, description="Cut texts to so many tokens; -1: to what the model takes."
    )
    add_special_tokens: bool | None = None
    user: str | None = None


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
