"""/v1/classify and /v1/score, in vLLM's shape; /v1/rerank, in Jina's and Cohere's; /v1/fill-mask."""

from typing import NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Inputs, Int, Many, Name, RequestBody, Usage
from quire.server.protocol.models import EmbeddingUsage


class EncoderRequest(RequestBody):
    """What all of them take."""

    model: Name | None = None
    truncate_prompt_tokens: Int | None = Field(
        None, description="Cut texts, or pairs, to this many tokens; -1: to what the model takes."
    )
    user: Name | None = None


class ClassifyRequest(EncoderRequest):
    input: Inputs
    add_special_tokens: bool | None = None


class ClassifiedText(TypedDict):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class EncoderAnswer(TypedDict):
    """What most answers begin with."""

    id: str
    object: str
    created: int
    model: str


class ClassifiedTexts(EncoderAnswer):
    data: list[ClassifiedText]
    usage: Usage


class ScoreRequest(EncoderRequest):
    text_1: str | Many[str] = Field(description="One text, or one for each of text_2.")
    text_2: str | Many[str] = Field(description="What is scored against text_1.")


class Score(TypedDict):
    index: int
    object: str
    score: float


class ScoreList(EncoderAnswer):
    data: list[Score]
    usage: Usage


class TextDocument(RequestBody):
    text: str


class RerankRequest(EncoderRequest):
    query: str
    documents: Many[str | TextDocument] = Field(description="Texts, or objects with a text.")
    top_n: Int | None = Field(None, ge=0, description="How many are returned; 0 or none: all.")
    return_documents: bool | None = Field(None, description="False leaves the texts out of the answer.")


class RerankedText(TypedDict):
    text: str


class RerankedDocument(TypedDict):
    index: int
    document: NotRequired[RerankedText]
    relevance_score: float


class RerankedDocuments(TypedDict):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankedDocument]


class FillMaskRequest(EncoderRequest):
    input: str | Many[str] = Field(description="Texts with the model's mask token, such as [MASK] or <mask>.")
    top_k: Int = Field(5, description="Predictions of each masked token.")


class MaskToken(TypedDict):
    score: float
    token: int
    token_str: str
    sequence: str


class FilledMasks(TypedDict):
    index: int
    object: str
    masks: list[list[MaskToken]]


class FilledMaskList(EncoderAnswer):
    data: list[FilledMasks]
    usage: EmbeddingUsage
