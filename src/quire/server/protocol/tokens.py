"""/tokenize and /detokenize, in vLLM's shape."""

from typing import Any, NotRequired

from typing_extensions import TypedDict

from quire.server.protocol.base import Int, RequestBody


class TokenizeRequest(RequestBody):
    """A prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[Int]


class Detokenized(TypedDict):
    prompt: str
