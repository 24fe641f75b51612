"""Fields that change what an answer means and that are not served yet: refused by name, never dropped silently."""

from quire.server.errors import not_supported
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.protocol.completions import CompletionRequest


def refuse_unsupported_chat(body: ChatCompletionRequest, trust_template: bool) -> None:
    if body.tools and body.tool_choice != "none":
        raise not_supported("tools", "tools are not supported yet: leave them out")
    if body.tool_choice not in (None, "none", "auto"):
        raise not_supported(
            "tool_choice", "tool_choice needs tools, which are not supported yet: leave it out"
        )
    if body.chat_template is not None and not trust_template:
        raise not_supported(
            "chat_template",
            "a request's own chat template is not accepted: start the server with --trust-request-chat-template",
        )
    _refuse_format(body.response_format)


def refuse_unsupported_completion(body: CompletionRequest) -> None:
    if body.suffix:
        raise not_supported("suffix", "suffix (filling in the middle) is not supported: leave it out")
    _refuse_format(body.response_format)


def _refuse_format(response_format: dict[str, object] | None) -> None:
    kind = (response_format or {}).get("type", "text")
    if kind != "text":
        raise not_supported(
            "response_format",
            f"response_format of type {kind!r} is not supported yet: use 'text' or leave it out",
        )
