"""Answers that a grammar makes into calls: a JSON array of them, or one call's arguments and nothing else."""

from collections.abc import Callable

from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece
from quire.text.tools.call_object import CallObject
from quire.text.tools.parser import CallParser


class JsonArrayParser(CallParser):
    """[{"name": …, "parameters": {…}}, …]. What is no such array is content from where it goes wrong."""

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
        """One letter behind white space, which leads on; any other begins text."""
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
