"""What every format's parser promises, and the frame that those who look for JSON objects share."""

from collections.abc import Callable
from typing import Protocol

from quire.text.pieces import CallEnd, Content, Piece, merged
from quire.text.tools.call_object import CallObject


class ToolParser(Protocol):
    """Reads one answer. However it is cut, the merged pieces are the same; it never raises.

    A call is passed on as soon as its name is known and its arguments begin. What turns out before that to be no
    call is content, as it was written; arguments that break later cannot be taken back, and end as they are.
    """

    def feed(self, text: str) -> list[Piece]:
        """What is certain after this much more text."""
        ...

    def finish(self) -> list[Piece]:
        """What was still held back when the answer ended."""
        ...


class CallParser:
    """A ToolParser that is always in one state: a method that decides about the text at hand.

    It says whether there is more to decide; if not, the rest waits for more text.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self.rest = ""  # not looked at yet, or waiting
        self.written: list[str] = []  # looked at, and undecided: a call's text, and what led to it
        self.pieces: list[Piece] = []
        self.num_calls = 0
        self.call: CallObject | None = None  # the one that is being read
        self.state = state

    def feed(self, text: str) -> list[Piece]:
        self.rest += text
        while self.rest and self.state():
            pass
        return self.taken()

    def read_call(self) -> CallObject:
        """Lets the open call take what it can."""
        assert self.call is not None
        self.pass_over(self.call.feed(self.rest))
        self.pieces += self.call.take()
        return self.call

    def pass_over(self, end: int) -> None:
        self.written.append(self.rest[:end])
        self.rest = self.rest[end:]

    def end_call(self, state: Callable[[], bool], forced: bool = False) -> None:
        self.pieces.append(CallEnd(self.num_calls, "" if forced else "".join(self.written)))
        self.written = []
        self.num_calls += 1
        self.call = None
        self.state = state

    def refuse(self, state: Callable[[], bool]) -> None:
        """What was looked at is no call: it is shown as it was written."""
        self.pieces.append(Content("".join(self.written)))
        self.written = []
        self.call = None
        self.state = state

    def show_held(self) -> None:
        """At the end: all that waited is text. White space behind calls is not."""
        held = "".join(self.written) + self.rest
        if held.strip() or not self.num_calls:
            self.pieces.append(Content(held))
        self.written, self.rest = [], ""

    def taken(self) -> list[Piece]:
        pieces, self.pieces = self.pieces, []
        return merged(pieces)
