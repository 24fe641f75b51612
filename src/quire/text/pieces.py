"""What an answer is made of once it is read: thoughts, text, and calls of tools."""

from collections.abc import Iterable
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
    """More of a call's arguments, letter for letter as the model writes them."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    written: str  # all that the model wrote for this call, to show if it makes no sense; empty: it was made to call


Piece = Reasoning | Content | CallBegin | Arguments | CallEnd


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind in one: how an answer was cut no longer shows."""
    found: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, (CallBegin, CallEnd)):
            if not piece.text:
                continue
            last = found[-1] if found else None
            if isinstance(last, Arguments) and isinstance(piece, Arguments) and last.index == piece.index:
                found[-1] = Arguments(last.index, last.text + piece.text)
                continue
            if isinstance(last, (Reasoning, Content)) and type(last) is type(piece):
                found[-1] = type(last)(last.text + piece.text)
                continue
        found.append(piece)
    return found
