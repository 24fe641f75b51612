"""OpenAI's older names for tools, `functions` and `function_call`: requests to tools, and answers back."""

from typing import Any

from quire.core.errors import InvalidRequest
from quire.server.protocol.completions import ChatCompletionRequest, ChatDelta, ChatMessage

# What errors call a chat's fields where the request has the older ones.
NAMES = {"tools": "functions", "tool_choice": "function_call", ".function.": "."}


def with_tools(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """The same request with tools. An answer then has one call at most."""
    messages = _messages(body.messages)
    if body.functions is None and body.function_call is None:
        return body.model_copy(update={"messages": messages})
    for name in ("tools", "tool_choice"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"functions and {name} are names for the same: send tools alone", name)
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    choice: Any = body.function_call
    match choice:
        case {"name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case None | "auto" | "none":
            pass
        case _:
            raise InvalidRequest(
                f"function_call is {choice!r:.80}: give 'auto', 'none' or {{'name': '…'}}", "function_call"
            )
    fields = {"messages": messages, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    return body.model_copy(update=fields)


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls get ids by their place: a function's message answers the call before it."""
    made: list[dict[str, Any]] = []
    call_id = ""
    for index, message in enumerate(messages):
        if isinstance(message.get("function_call"), dict):
            call_id = f"call_{index}"
            call = {"id": call_id, "type": "function", "function": message["function_call"]}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            made.append({"content": None, **rest, "tool_calls": [call]})
        elif message.get("role") == "function":
            made.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            made.append(message)
    return made


def function_message(message: ChatMessage) -> ChatMessage:
    """A message of an answer, its call under the older name."""
    calls = message.pop("tool_calls", None)
    if calls:
        message["function_call"] = calls[0]["function"]
    return message


def function_delta(delta: ChatDelta) -> ChatDelta:
    """A delta of an answer, its part of the call under the older name."""
    calls = delta.pop("tool_calls", None)
    if calls:
        delta["function_call"] = calls[0]["function"]
    return delta


def function_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
