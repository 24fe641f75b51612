"""The formats of tool calls by name: their parsers, their markers, which of them a chat template uses, and how tools
are described to a model whose template does not know them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from quire.text.pieces import Arguments, Content, Piece, held_from
from quire.text.template import checked_messages
from quire.text.tool_parser import CallObject, CallParser, ToolParser

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Text may stand before, between and after calls; a missing last brace or HERMES_CLOSE is accepted."""

    def __init__(self, _tool_names: Collection[str] = ()) -> None:
        """Any tool name is accepted: text between these markers is a call."""
        super().__init__(self._in_text)

    def finish(self) -> list[Piece]:
        if self.call is not None and self.call.begun:
            if self.state == self._in_broken:
                self._argue(len(self.rest))
            self.rest = ""  # half a HERMES_CLOSE at most
        return super().finish()

    def _in_text(self) -> bool:
        if not self.show_until(HERMES_OPEN, Content):
            return False
        self.pass_over(self.rest.index(HERMES_OPEN) + len(HERMES_OPEN))
        self.call = CallObject(self.num_calls)
        self.state = self._in_call
        return True

    def _in_call(self) -> bool:
        call = self.read_call()
        if call.closed or (call.broken and call.complete and call.begun):
            self.state = self._behind_call
        elif call.broken and call.begun:
            self.state = self._in_broken
        elif call.broken:
            self.refuse(self._in_text)
        return True

    def _behind_call(self) -> bool:
        """White space, then HERMES_CLOSE. Anything else is text again."""
        bare = self.rest.lstrip()
        if not bare or (len(bare) < len(HERMES_CLOSE) and HERMES_CLOSE.startswith(bare)):
            return False
        if bare.startswith(HERMES_CLOSE):
            self.pass_over(len(self.rest) - len(bare) + len(HERMES_CLOSE))
        self.end_call(self._in_text)
        return True

    def _in_broken(self) -> bool:
        """Arguments that are not JSON are passed on as they come: their beginning is out already."""
        start = self.rest.find(HERMES_CLOSE)
        cut = held_from(self.rest, HERMES_CLOSE) if start < 0 else len(self.rest[:start].rstrip())
        self._argue(cut)
        if start < 0:
            return False
        self.pass_over(start - cut + len(HERMES_CLOSE))
        self.end_call(self._in_text)
        return True

    def _argue(self, end: int) -> None:
        self.pieces.append(Arguments(self.num_calls, self.rest[:end]))
        self.pass_over(end)


LLAMA3_TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Without the tag only an answer that begins with a call holds one, and only of a known tool: JSON may be meant."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        """No names: any will do."""
        super().__init__(self._before_call)
        self._names = frozenset(tool_names)

    def _before_call(self) -> bool:
        """White space, a tag or none, and the first brace."""
        bare = self.rest.lstrip()
        if not bare or (len(bare) < len(LLAMA3_TAG) and LLAMA3_TAG.startswith(bare)):
            return False
        if bare.startswith(LLAMA3_TAG):
            self.pass_over(len(self.rest) - len(bare) + len(LLAMA3_TAG))
            self.state = self._behind_tag
            return True
        return self._open(bare)

    def _behind_tag(self) -> bool:
        bare = self.rest.lstrip()
        return bool(bare) and self._open(bare)

    def _open(self, bare: str) -> bool:
        if bare.startswith("{"):
            self.call = CallObject(self.num_calls, self._accepts, needs_arguments=True)
            self.state = self._in_call
        else:
            self.refuse(self._in_text)
        return True

    def _in_call(self) -> bool:
        call = self.read_call()
        if call.closed or (call.broken and call.complete and call.begun):
            self.end_call(self._behind_call)
        elif call.broken and call.begun:
            self.pieces.append(Arguments(self.num_calls, self.rest))  # nothing says where these end
            self.pass_over(len(self.rest))
        elif call.broken:
            self.refuse(self._in_text)
        return True

    def _behind_call(self) -> bool:
        """A semicolon, and then another call. Anything else is text."""
        bare = self.rest.lstrip()
        if not bare:
            return False
        if bare.startswith(";"):
            self.pass_over(len(self.rest) - len(bare) + 1)
            self.state = self._before_call
        else:
            self.state = self._in_text
        return True

    def _in_text(self) -> bool:
        has_tag = self.show_until(LLAMA3_TAG, Content)
        if has_tag:
            self.state = self._before_call
        return has_tag

    def _accepts(self, name: str) -> bool:
        return not self._names or name in self._names


# ---------------------------------------------------------------------- by name


_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
}
_MARKERS = {"hermes": (HERMES_OPEN, HERMES_CLOSE), "llama3_json": (LLAMA3_TAG,)}
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
    if HERMES_OPEN in template:
        return "hermes"
    if LLAMA3_TAG in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None


# ---------------------------------------------------------------------- descriptions

_HERMES = f"""You may call tools. For each call write
{HERMES_OPEN}
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
{HERMES_CLOSE}
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
    return f"{HERMES_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES_CLOSE}"


def _llama_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "parameters": function.get("arguments") or {}}
    return json.dumps(call, ensure_ascii=False)
