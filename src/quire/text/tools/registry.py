"""The formats of tool calls by name, their markers, and which of them a chat template shows."""

from collections.abc import Callable, Collection

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
    """What the format is recognised by: to be kept in the text even if these are special tokens."""
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
