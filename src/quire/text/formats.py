"""AnswerFormats: which parsers read a model's answers, chosen by name or by what its chat template shows."""

from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.text.reasoning.registry import MARKERS, REASONING_PARSERS, guessed_reasoning
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tools.registry import TOOL_PARSERS, guessed_tool_parser, tool_markers

NONE = "none"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Names of parsers; None: such things are plain text."""

    tools: str | None = None
    reasoning: str | None = None

    def kept_ids(self, tokenizer: Tokenizer | None, with_tools: bool) -> frozenset[int]:
        """Special tokens that must stay in the text for the parsers to see."""
        if tokenizer is None:
            return frozenset()
        markers: tuple[str, ...] = MARKERS if self.reasoning else ()
        markers += tool_markers(self.tools) if self.tools and with_tools else ()
        found = {tokenizer.token_id(marker) for marker in markers}
        return tokenizer.special_ids.intersection(token_id for token_id in found if token_id is not None)


def choose_formats(template: ChatTemplate | None, tools: str | None, reasoning: str | None) -> AnswerFormats:
    """By name, `none` for none; where no name is given, by the template. One that knows no tools is told of them
    as Hermes would be."""
    text = template.text if template is not None else ""
    guessed = guessed_tool_parser(text) if template is None or template.reads_tools else "hermes"
    return AnswerFormats(
        _chosen("tool_call_parser", tools, TOOL_PARSERS, guessed),
        _chosen("reasoning_parser", reasoning, REASONING_PARSERS, guessed_reasoning(text)),
    )


def _chosen(setting: str, name: str | None, known: tuple[str, ...], guessed: str | None) -> str | None:
    if name is None:
        return guessed
    if name == NONE:
        return None
    if name not in known:
        raise ConfigError(f"{setting}={name!r} is not known: choose one of {', '.join(known)}, or {NONE}")
    return name
