"""From a response's request to a chat's."""

from collections.abc import Sequence
from typing import Any

from quire.core.errors import InvalidRequest
from quire.server.errors import not_supported
from quire.server.protocol.responses import Item, ResponseInput, ResponseRequest
from quire.server.responses.items import chat_messages

LOGPROBS = "message.output_text.logprobs"
# What a chat request's fields are called here: errors name them so.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    ".function.": ".",  # a tool's fields are flat
}


def refuse_unsupported(body: ResponseInput) -> None:
    """What would change the answer's meaning and is not served: refused by name, never dropped silently."""
    if isinstance(body, ResponseRequest) and body.background:
        raise not_supported("background", "responses cannot run in the background: leave background out")
    if body.conversation is not None:
        raise not_supported("conversation", "conversations are not kept: use previous_response_id instead")
    if body.prompt is not None:
        raise not_supported("prompt", "prompts are not kept here: send their text as instructions and input")


def prompt_fields(body: ResponseInput, items: Sequence[Item]) -> dict[str, Any]:
    """The fields of a chat request that make its prompt; `items` is the conversation up to here."""
    if not items:
        raise InvalidRequest("input is empty: send a text or at least one item", "input")
    tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    choice, tools = _chosen(body.tool_choice, tools)
    fields = body.extras() | {"model": body.model, "messages": chat_messages(items, body.instructions)}
    if variables := _template_variables(body):
        fields["chat_template_kwargs"] = variables
    if tools:
        fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}
    return fields


def chat_fields(body: ResponseRequest, items: Sequence[Item]) -> dict[str, Any]:
    """All fields of the chat request."""
    fields = prompt_fields(body, items) | {
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stop": body.stop,
        "user": body.user,
        "stream": body.stream,
        "response_format": _response_format(body),
    }
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return fields


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise not_supported(
            "tools",
            f"{place} has type {kind!r}: only tools of type 'function', which the caller runs, are supported",
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{place} needs a name", "tools")
    given = {
        name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": {"name": tool["name"], **given}}


def _chosen(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    """The choice as a chat says it, and the tools that it leaves."""
    if choice is None:
        return "auto", tools
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise InvalidRequest(
                f"tool_choice={choice!r} is not known: give 'auto', 'none', 'required' or a function",
                "tool_choice",
            )
    elif choice.get("type") == "function":
        named = {"type": "function", "function": {"name": choice.get("name")}}
        return _given(named, [choice.get("name")], tools), tools
    elif choice.get("type") == "allowed_tools":
        return _allowed(choice, tools)
    else:
        raise not_supported(
            "tool_choice",
            f"tool_choice of type {choice.get('type')!r} is not supported: give 'auto', 'none', 'required', a "
            "function or allowed_tools",
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice 'required' needs tools", "tool_choice")
    return choice, tools


def _allowed(
    choice: dict[str, Any], tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    listed = choice.get("tools")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed) or not listed:
        raise InvalidRequest(
            "tool_choice allowed_tools needs tools: list at least one by name", "tool_choice"
        )
    if choice.get("mode") not in ("auto", "required"):
        raise InvalidRequest("tool_choice allowed_tools needs a mode: 'auto' or 'required'", "tool_choice")
    names = [one.get("name") for one in listed]
    left = [tool for tool in tools if tool["function"]["name"] in names]
    return _given(str(choice["mode"]), names, tools), left


def _given(choice: Any, names: Sequence[Any], tools: list[dict[str, Any]]) -> Any:
    known = [tool["function"]["name"] for tool in tools]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None or None in names:
        raise InvalidRequest(f"tool_choice names {unknown!r}, which is not among the tools", "tool_choice")
    return choice


def _template_variables(body: ResponseInput) -> dict[str, Any]:
    """Templates know how hard to think by these names; those that don't, ignore them."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    thinking: dict[str, Any] = {}
    if effort == "none":
        thinking = {"enable_thinking": False}
    elif effort is not None:
        thinking = {"reasoning_effort": effort}
    return thinking | (body.chat_template_kwargs or {})


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """`text.format` is flat where a chat's `response_format` nests."""
    form = body.text.format if body.text is not None else None
    kind = form.get("type") if form is not None else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        given = {name: form[name] for name in ("name", "description", "schema", "strict") if name in form}
        if not isinstance(given.get("schema"), dict):
            raise InvalidRequest("text.format of type json_schema needs a schema", "text.format")
        return {"type": "json_schema", "json_schema": given}
    raise not_supported(
        "text.format", f"text.format has type {kind!r}: give 'text', 'json_object' or 'json_schema'"
    )
