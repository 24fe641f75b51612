"""The pieces of a parsed answer: reasoning, content and tool calls; and how a marker is found in streamed text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # among the answer's calls
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, exactly as the model writes them."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    # the call as the model wrote it, to show if it is no valid call; empty if a grammar forced it
    written: str


Piece = Reasoning | Content | CallBegin | Arguments | CallEnd


class PieceParser:
    """Parses streamed text. It is always in one state: a method that decides about the text at hand, and returns
    whether there is more to decide; if not, the rest waits for more text. However the text is cut, the merged pieces
    are the same."""

    def __init__(self, state: Callable[[], bool]) -> None:
        self.rest = ""  # not looked at yet, or waiting
        self.pieces: list[Piece] = []
        self.state = state

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after this much more text."""
        self.rest += text
        while self.rest and self.state():
            pass
        return self.taken()

    def show_until(self, marker: str, kind: type[Reasoning] | type[Content]) -> bool:
        """Passes on the text before `marker`; False: the marker has not come, and what may become it waits."""
        start = self.rest.find(marker)
        cut = held_from(self.rest, marker) if start < 0 else len(self.rest[:start].rstrip())
        self.pieces.append(kind(self.rest[:cut]))
        self.rest = self.rest[cut:]
        return start >= 0

    def show_rest(self) -> bool:
        """A state in which all text is the answer's."""
        self.pieces.append(Content(self.rest))
        self.rest = ""
        return False

    def taken(self) -> list[Piece]:
        pieces, self.pieces = self.pieces, []
        return merged(pieces)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind joined, so that the result does not depend on how text was cut."""
    joined: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, (CallBegin, CallEnd)):
            if not piece.text:
                continue
            last = joined[-1] if joined else None
            if isinstance(last, Arguments) and isinstance(piece, Arguments) and last.index == piece.index:
                joined[-1] = Arguments(last.index, last.text + piece.text)
                continue
            if isinstance(last, (Reasoning, Content)) and type(last) is type(piece):
                joined[-1] = type(last)(last.text + piece.text)
                continue
        joined.append(piece)
    return joined


def held_from(text: str, marker: str) -> int:
    """Where the part of `text` starts that cannot be shown yet: white space, then what may become `marker`.

    White space is held too, since around markers it belongs to the format and not to the answer.
    """
    cut = len(text)
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            cut -= length
            break
    return len(text[:cut].rstrip())
