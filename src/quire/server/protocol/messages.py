"""/v1/messages, in Anthropic's shape."""

from typing import Any, NotRequired

from typing_extensions import TypedDict

from quire.server.protocol.base import ExtraFields, Int, Many, ModelName, Name, RequestBody, Stops

# A piece of a message: text, thinking, the use of a tool or its result. Which fields it has hangs on its `type`.
Block = dict[str, Any]
MessageEvent = dict[str, Any]


class MessageMetadata(RequestBody):
    user_id: Name | None = None


class OutputConfig(RequestBody):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessageInput(ExtraFields):
    """The fields that make the prompt: enough to count its tokens."""

    model: ModelName = None
    messages: Many[dict[str, Any]]
    system: str | Many[Block] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    mcp_servers: list[Any] | None = None
    container: Any = None
    thread: dict[str, Any] | None = None


class MessageRequest(MessageInput):
    max_tokens: Int
    stop_sequences: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: MessageMetadata | None = None
    stream: bool | None = None


class MessageUsage(TypedDict):
    """All input is the sum of what was computed, read from the cache and written for it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    id: str
    type: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class MessageErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class MessageErrorBody(TypedDict):
    type: str
    error: MessageErrorDetail
    request_id: NotRequired[str]
