"""ToolParser: the interface of every format's parser; the state machine that they share; parsers of forced calls."""

from collections.abc import Callable
from typing import Protocol

from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, merged
from quire.text.tools.call_object import CallObject


class ToolParser(Protocol):
    """Reads one answer. However it is cut, the merged pieces are the same; it never raises.

    A call is passed on as soon as its name is known and its arguments begin. Text that turns out to be no call
    before that is content, as it was written; arguments that break later cannot be taken back, and end as they are.
    """

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after this much more text."""
        ...

    def finish(self) -> list[Piece]:
        """The pieces that were held back until the answer ended."""
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
        """The text that was read is no call: it is shown as it was written."""
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


# ---------------------------------------------------------------------- calls that a grammar forces


class JsonArrayParser(CallParser):
    """[{"name": …, "parameters": {…}}, …]. From the first character that breaks the array, text is content."""

    def __init__(self) -> None:
        super().__init__(self._before_array)

    def finish(self) -> list[Piece]:
        if self.call is not None and self.call.begun:
            self.end_call(self._in_text, forced=True)
        if self.state == self._behind_array:
            self.written = []
        self.show_held()
        return self.taken()

    def _before_array(self) -> bool:
        return self._expect({"[": self._before_call})

    def _before_call(self) -> bool:
        if self.rest.lstrip().startswith("{"):
            self.call = CallObject(self.num_calls, needs_arguments=True)
            self.state = self._in_call
            return True
        return self._expect({})

    def _in_call(self) -> bool:
        call = self.read_call()
        if call.closed:
            self.end_call(self._behind_call, forced=True)
        elif call.broken and call.begun:
            self.end_call(self._in_text, forced=True)
        elif call.broken:
            self.refuse(self._in_text)
        return True

    def _behind_call(self) -> bool:
        return self._expect({",": self._before_call, "]": self._behind_array})

    def _behind_array(self) -> bool:
        return self._expect({})

    def _in_text(self) -> bool:
        self.pieces.append(Content(self.rest))
        self.rest = ""
        return False

    def _expect(self, states: dict[str, Callable[[], bool]]) -> bool:
        """One character behind white space selects the next state; any other starts text."""
        bare = self.rest.lstrip()
        self.pass_over(len(self.rest) - len(bare))
        if not bare:
            return False
        state = states.get(bare[0])
        if state is None:
            self.refuse(self._in_text)
        else:
            self.pass_over(1)
            self.state = state
        return True


class NamedParser:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Piece]:
        if self._begun:
            return [Arguments(0, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._begun = True
        return [CallBegin(0, self._name), Arguments(0, text)]

    def finish(self) -> list[Piece]:
        return [CallEnd(0, "")] if self._begun else []
