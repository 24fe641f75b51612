"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, as often as there are calls."""

from collections.abc import Collection

from quire.text.pieces import Arguments, Content, Piece, held_from
from quire.text.tools.call_object import CallObject
from quire.text.tools.parser import CallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Text may stand before, between and after calls; a missing last brace or CLOSE is accepted."""

    def __init__(self, _tool_names: Collection[str] = ()) -> None:
        """Any tool name is accepted: text between these markers is a call."""
        super().__init__(self._in_text)

    def finish(self) -> list[Piece]:
        if self.call is not None and self.call.begun:
            if self.state == self._in_broken:
                self._argue(len(self.rest))
            self.rest = ""  # half a CLOSE at most
            self.end_call(self._in_text)
        self.show_held()
        return self.taken()

    def _in_text(self) -> bool:
        start = self.rest.find(OPEN)
        cut = held_from(self.rest, OPEN) if start < 0 else len(self.rest[:start].rstrip())
        self.pieces.append(Content(self.rest[:cut]))
        self.rest = self.rest[cut:]
        if start < 0:
            return False
        self.pass_over(start - cut + len(OPEN))
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
        """White space, then CLOSE. Anything else is text again."""
        bare = self.rest.lstrip()
        if not bare or (len(bare) < len(CLOSE) and CLOSE.startswith(bare)):
            return False
        if bare.startswith(CLOSE):
            self.pass_over(len(self.rest) - len(bare) + len(CLOSE))
        self.end_call(self._in_text)
        return True

    def _in_broken(self) -> bool:
        """Arguments that are not JSON are passed on as they come: their beginning is out already."""
        start = self.rest.find(CLOSE)
        cut = held_from(self.rest, CLOSE) if start < 0 else len(self.rest[:start].rstrip())
        self._argue(cut)
        if start < 0:
            return False
        self.pass_over(start - cut + len(CLOSE))
        self.end_call(self._in_text)
        return True

    def _argue(self, end: int) -> None:
        self.pieces.append(Arguments(self.num_calls, self.rest[:end]))
        self.pass_over(end)
