"""/v1/completions and /v1/chat/completions."""

from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.protocol.base import Int, PromptLogprob, SamplingFields, Usage


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[Int] | list[list[Int]] = Field(
        description="Text, token ids, or a list of either."
    )
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
    messages: list[dict[str, Any]] = Field(json_schema_extra=_MESSAGES)
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # not deprecated=True, with which pydantic warns whenever a field is read
    functions: list[dict[str, Any]] | None = Field(None, json_schema_extra={"deprecated": True})
    function_call: str | dict[str, Any] | None = Field(None, json_schema_extra={"deprecated": True})

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


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


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]


class ChatCompletionChunk(AnswerHead):
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
