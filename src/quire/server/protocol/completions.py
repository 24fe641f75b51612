"""/v1/completions and /v1/chat/completions."""

from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import (
    Inputs,
    Int,
    ListPage,
    Many,
    Metadata,
    PromptLogprob,
    RequestBody,
    SamplingFields,
    Usage,
)


class CompletionRequest(SamplingFields):
    prompt: Inputs
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = Field(
        None, description="The text after what is to be written, for models with such tokens."
    )


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


class AnswerHead(TypedDict):
    """What whole answers and chunks begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Completion(AnswerHead):
    """A whole answer, and the shape of its chunks as well."""

    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


# ---------------------------------------------------------------------- chats


_MESSAGES: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "null"},
                ]
            },
        },
        "required": ["role"],
    },
}


class ChatCompletionRequest(SamplingFields):
    messages: Many[dict[str, Any]] = Field(json_schema_extra=_MESSAGES)
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = Field(None, description="Keep the answer in memory, for GET /v1/chat/completions.")
    metadata: Metadata | None = Field(None, description="Of a stored answer.")
    # not deprecated=True, with which pydantic warns whenever a field is read
    functions: Many[dict[str, Any]] | None = Field(None, json_schema_extra={"deprecated": True})
    function_call: str | dict[str, Any] | None = Field(None, json_schema_extra={"deprecated": True})

    reasoning_effort: str | None = Field(None, description="For chat templates that know it.")
    modalities: Many[str] | None = Field(None, description="Answers are text.")
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None
    verbosity: Any = None
    moderation: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    echo: Any = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = None


# Fields of a chat that are accepted, and why they have no effect.
CHAT_WITHOUT_EFFECT = {
    "audio": "answers are text",
    "web_search_options": "the server searches nothing",
    "prediction": "use the server's --speculative-config",
    "verbosity": "ask for it in the messages",
    "moderation": "the server moderates nothing",
    "logits_processors": "the server runs no code of a request",
    "kv_transfer_params": "the server transfers no KV blocks",
    "prompt_embeds": "prompts are text",
    "return_token_ids": "use logprobs",
    "return_tokens_as_token_ids": "use logprobs",
    "echo": "chats do not repeat the prompt",
}


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: FunctionCall


class ChatMessage(TypedDict):
    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[FunctionCall]  # where the request has functions
    annotations: NotRequired[list[dict[str, Any]]]  # of an answer from files


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(AnswerHead):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class StoredChatUpdate(RequestBody):
    metadata: Metadata | None = Field(description="In the place of the metadata before.")


class StoredChat(ChatCompletion):
    metadata: dict[str, str]


class StoredChatList(ListPage):
    data: list[StoredChat]


class StoredMessageList(ListPage):
    """The messages of the request, each with an id."""

    data: list[dict[str, Any]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id, type and name; all have more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionDelta]
    annotations: NotRequired[list[dict[str, Any]]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]


class ChatCompletionChunk(AnswerHead):
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
