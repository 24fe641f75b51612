"""AnswerReader: one answer's text, read as thoughts, content and calls."""

import json
from dataclasses import dataclass, field

from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, Reasoning
from quire.text.reasoning.think import ThinkParser
from quire.text.tools.parser import ToolParser


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
    ) -> None:
        """Calls beyond `max_calls` are dropped."""
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._arguments: list[str] = []  # of the call that is open
        self.has_calls = False  # at least one whose arguments are a JSON object, to the end

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
        """The same pieces, without calls that are too many."""
        kept: list[Piece] = []
        for piece in pieces:
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


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
