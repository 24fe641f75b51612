"""The formats of tool calls by name: their parsers, their markers, which of them a chat template uses, and how tools
are described to a model whose template does not know them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from quire.text.messages import checked_messages
from quire.text.tools import hermes, llama3
from quire.text.tools.parser import ToolParser

_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": hermes.HermesParser,
    "llama3_json": llama3.Llama3Parser,
}
_MARKERS = {"hermes": (hermes.OPEN, hermes.CLOSE), "llama3_json": (llama3.TAG,)}
TOOL_PARSERS = tuple(sorted(_PARSERS))


def tool_parser(name: str, tool_names: Collection[str]) -> ToolParser:
    return _PARSERS[name](tool_names)


def tool_markers(name: str) -> tuple[str, ...]:
    """The format's markers: kept in the text even if they are special tokens."""
    return _MARKERS[name]


def guessed_tool_parser(template: str) -> str | None:
    """The format that a chat template teaches, if that is clear."""
    if "<function=" in template:  # a format of its own within the same markers
        return None
    if hermes.OPEN in template:
        return "hermes"
    if llama3.TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None


# ---------------------------------------------------------------------- descriptions

_HERMES = f"""You may call tools. For each call write
{hermes.OPEN}
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
{hermes.CLOSE}
and nothing after the last one. You will get each result in <tool_response> tags. These are the tools:"""

_LLAMA3 = """You may call tools. To do so, write only
{"name": "the tool's name", "parameters": {"parameter": "value"}}
and "; " between two calls. You will get each result in <tool_response> tags. These are the tools:"""


def described(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    parser_name: str | None = None,
) -> list[dict[str, Any]]:
    """Messages with roles and contents only: tools are in the first, a system message; calls and results are text.

    Calls are described as that parser reads them, Hermes' if there is none.
    """
    is_llama = parser_name == "llama3_json"
    plain = [_as_text(message, is_llama) for message in checked_messages(messages)]
    if not tools:
        return plain
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = "\n".join([_LLAMA3 if is_llama else _HERMES, *lines])
    if plain[0]["role"] == "system":
        text = f"{plain[0]['content']}\n\n{text}"
        plain = plain[1:]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: dict[str, Any], is_llama: bool) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call.get("function", call) for call in message.pop("tool_calls", None) or ()]
    if calls:
        text = "; ".join(map(_llama_call, calls)) if is_llama else "\n".join(map(_hermes_call, calls))
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
    return message


def _hermes_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{hermes.OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{hermes.CLOSE}"


def _llama_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "parameters": function.get("arguments") or {}}
    return json.dumps(call, ensure_ascii=False)
