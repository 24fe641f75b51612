"""/v1/responses."""

from typing import Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import (
    ExtraFields,
    Int,
    ListPage,
    Many,
    Metadata,
    ModelName,
    Name,
    RequestBody,
    Stops,
)

# An item of a conversation: a message, a function call, its output or a piece of reasoning. Which fields it has
# hangs on its `type`, and each kind of item has more forms than one: `responses.convert_request` reads them.
Item = dict[str, Any]
# A typed event of a stream.
ResponseEvent = dict[str, Any]

_ITEMS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
    "examples": ["What is the capital of France?"],
}


class TextConfig(RequestBody):
    format: dict[str, Any] | None = Field(None, description="Of type text, json_object or json_schema.")
    verbosity: str | None = None


class ReasoningConfig(RequestBody):
    effort: str | None = None
    summary: str | None = None


class ConversationName(RequestBody):
    id: str


class ConversationInput(RequestBody):
    """The items of a conversation, old and new."""

    model: ModelName = None
    input: str | Many[Item] | None = Field(None, json_schema_extra=_ITEMS)
    instructions: str | None = Field(None, description="A system message; the next response has its own.")
    previous_response_id: Name | None = None
    conversation: Name | ConversationName | None = None
    prompt: Any = None


class ResponseInput(ConversationInput, ExtraFields):
    """The fields that make the prompt: enough to count its tokens."""

    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None


# Fields of a response that are accepted, and why they have no effect.
RESPONSE_WITHOUT_EFFECT = {
    "max_tool_calls": "the server runs no tools",
    "context_management": "use truncation, or /v1/responses/compact",
    "moderation": "the server moderates nothing",
}


class ResponseRequest(ResponseInput):
    context_management: Any = None
    moderation: Any = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    include: Many[str] | None = None
    metadata: Metadata | None = None
    user: Name | None = None
    store: bool | None = Field(None, description="Keep the response in memory; true if left out.")
    stream: bool | None = None
    background: bool | None = None
    stop: str | Stops | None = None


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ConversationReference(TypedDict):
    id: str


class ResponseObject(TypedDict):
    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    user: NotRequired[str | None]
    conversation: NotRequired[ConversationReference]


class ItemList(ListPage):
    data: list[Item]


class CompactedResponse(TypedDict):
    """The user's messages, and one item of type compaction that stands for all the rest."""

    id: str
    object: str
    created_at: int
    output: list[Item]
    usage: ResponseUsage


# ---------------------------------------------------------------------- conversations


MAX_NEW_ITEMS = 20  # of one request


class NewItems(RequestBody):
    items: Many[Item] = Field(max_length=MAX_NEW_ITEMS)


class NewConversation(RequestBody):
    items: Many[Item] | None = Field(None, max_length=MAX_NEW_ITEMS)
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody):
    metadata: Metadata | None = Field(description="In the place of the metadata before.")


class Conversation(TypedDict):
    id: str
    object: str
    created_at: int
    metadata: dict[str, str]
