"""From a model's chat template to parsed answers: AnswerFormats names the parsers, AnswerParsers holds those of one
request, AnswerReader parses one answer."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from quire.core.errors import ConfigError
from quire.text.answer import AnswerSequence
from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, Reasoning
from quire.text.reasoning import (
    MARKERS,
    REASONING_PARSERS,
    ThinkParser,
    guessed_reasoning,
    num_reasoning_tokens,
    reasoning_parser,
)
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import TOOL_PARSERS, guessed_tool_parser, tool_markers
from quire.text.tool_parser import ToolParser

NONE = "none"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Names of parsers; None: tool calls or reasoning are not parsed."""

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
    """Parsers by name (`none`: no parser), or else by the chat template. A template that does not know tools gets
    Hermes' format, in which tools are then described."""
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


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The parsers of a request's answers: makes a reader for each of them."""

    reasoning: str | None = None  # the parser's name
    prompt: str | None = None  # its end says whether reasoning has begun
    make_tool_parser: Callable[[], ToolParser] | None = None
    max_calls: int | None = None
    drops_repeats: bool = False  # calls that equal the call before them

    def reader(self) -> "AnswerReader":
        return AnswerReader(
            reasoning_parser(self.reasoning, self.prompt) if self.reasoning else None,
            self.make_tool_parser() if self.make_tool_parser else None,
            self.max_calls,
            RepeatFilter() if self.drops_repeats else None,
        )

    def num_reasoning_tokens(self, sequence: AnswerSequence, tokenizer: Tokenizer | None) -> int:
        thinking = reasoning_parser(self.reasoning, self.prompt) if self.reasoning else None
        if thinking is None or not thinking.begins_with_reasoning(sequence.text):
            return 0
        return num_reasoning_tokens(sequence.text, sequence.token_ids, tokenizer)


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


class AnswerReader:
    """Takes an answer's text in pieces, or whole; reads one answer."""

    def __init__(
        self,
        reasoning: ThinkParser | None = None,
        tools: ToolParser | None = None,
        max_calls: int | None = None,
        repeats: "RepeatFilter | None" = None,
    ) -> None:
        """Calls beyond `max_calls` are dropped, and repetitions with a filter of `repeats`."""
        self._repeats = repeats
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._arguments: list[str] = []  # of the call that is open
        self.has_calls = False  # at least one whose arguments are a JSON object, to the end

    @property
    def has_repeats(self) -> bool:
        """Whether a call was dropped because it repeats the one before."""
        return self._repeats is not None and self._repeats.num_dropped > 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._through_tools(pieces)

    def finish(self) -> list[Piece]:
        pieces = [] if self._reasoning is None else self._through_tools(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._noted(self._tools.finish())
        return pieces

    def whole(self, text: str) -> ReadAnswer:
        """The answer at once. A call whose arguments are no JSON object is content here, as it was written."""
        read = ReadAnswer()
        for piece in [*self.feed(text), *self.finish()]:
            match piece:
                case Reasoning():
                    read.reasoning += piece.text
                case Content():
                    read.content += piece.text
                case CallBegin():
                    read.calls.append(Call(piece.name))
                case Arguments():
                    read.calls[-1].arguments += piece.text
                case CallEnd(written=written) if written and not _is_object(read.calls[-1].arguments):
                    read.calls.pop()
                    read.content += written
        return read

    def _through_tools(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                found += self._noted(self._tools.feed(piece.text))
            else:
                found.append(piece)
        return found

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        """The same pieces, without the calls beyond `max_calls`."""
        kept: list[Piece] = []
        for piece in pieces if self._repeats is None else self._repeats.filtered(pieces):
            if isinstance(piece, (CallBegin, Arguments, CallEnd)):
                if self._max_calls is not None and piece.index >= self._max_calls:
                    continue
                self._note(piece)
            kept.append(piece)
        return kept

    def _note(self, piece: CallBegin | Arguments | CallEnd) -> None:
        match piece:
            case CallBegin():
                self._arguments = []
            case Arguments():
                self._arguments.append(piece.text)
            case CallEnd():
                self.has_calls = self.has_calls or _is_object("".join(self._arguments))


class RepeatFilter:
    """Drops calls with the name and arguments of the call before, which small models write until a limit ends them.

    A call is held back while it may become such a repetition; one that a limit cuts off before it differs is dropped.
    """

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None
        self._name = ""
        self._arguments = ""
        self._held: list[Piece] = []
        self.num_dropped = 0

    def filtered(self, pieces: Iterable[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, (CallBegin, Arguments, CallEnd)):
                kept.append(piece)
                continue
            if isinstance(piece, CallBegin):
                self._name, self._arguments = piece.name, ""
            elif isinstance(piece, Arguments):
                self._arguments += piece.text
            self._held.append(replace(piece, index=piece.index - self.num_dropped))
            if not self._may_repeat():
                kept += self._held
                self._held = []
            if isinstance(piece, CallEnd):
                self.num_dropped += bool(self._held)
                self._held = []
                self._last = self._name, self._arguments
        return kept

    def _may_repeat(self) -> bool:
        if self._last is None:
            return False
        name, arguments = self._last
        return self._name == name and arguments.startswith(self._arguments)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
