"""Fields that change what an answer means and that are not served yet: refused by name, never dropped silently."""

from quire.server.errors import not_supported
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.protocol.completions import CompletionRequest


def refuse_unsupported_chat(body: ChatCompletionRequest, trust_template: bool) -> None:
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise not_supported(name, f"{name} was OpenAI's old name: send {instead}")
    if body.chat_template is not None and not trust_template:
        raise not_supported(
            "chat_template",
            "a request's own chat template is not accepted: start the server with --trust-request-chat-template",
        )


def refuse_unsupported_completion(body: CompletionRequest) -> None:
    if body.suffix:
        raise not_supported("suffix", "suffix (filling in the middle) is not supported: leave it out")
