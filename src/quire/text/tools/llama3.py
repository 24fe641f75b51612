"""Llama 3: {"name": …, "parameters": {…}}, several with `;` between them, <|python_tag|> before them or not."""

from collections.abc import Collection

from quire.text.pieces import Arguments, Content, Piece, held_from
from quire.text.tools.call_object import CallObject
from quire.text.tools.parser import CallParser

TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Without the tag only an answer that begins with a call holds one, and only of a known tool: JSON may be meant."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        """No names: any will do."""
        super().__init__(self._before_call)
        self._names = frozenset(tool_names)

    def finish(self) -> list[Piece]:
        if self.call is not None and self.call.begun:
            self.end_call(self._in_text)
        self.show_held()
        return self.taken()

    def _before_call(self) -> bool:
        """White space, a tag or none, and the first brace."""
        bare = self.rest.lstrip()
        if not bare or (len(bare) < len(TAG) and TAG.startswith(bare)):
            return False
        if bare.startswith(TAG):
            self.pass_over(len(self.rest) - len(bare) + len(TAG))
            self.state = self._behind_tag
            return True
        return self._open(bare)

    def _behind_tag(self) -> bool:
        bare = self.rest.lstrip()
        return bool(bare) and self._open(bare)

    def _open(self, bare: str) -> bool:
        if bare.startswith("{"):
            self.call = CallObject(self.num_calls, self._accepts, needs_arguments=True)
            self.state = self._in_call
        else:
            self.refuse(self._in_text)
        return True

    def _in_call(self) -> bool:
        call = self.read_call()
        if call.closed or (call.broken and call.complete and call.begun):
            self.end_call(self._behind_call)
        elif call.broken and call.begun:
            self.pieces.append(Arguments(self.num_calls, self.rest))  # nothing says where these end
            self.pass_over(len(self.rest))
        elif call.broken:
            self.refuse(self._in_text)
        return True

    def _behind_call(self) -> bool:
        """A semicolon, and then another call. Anything else is text."""
        bare = self.rest.lstrip()
        if not bare:
            return False
        if bare.startswith(";"):
            self.pass_over(len(self.rest) - len(bare) + 1)
            self.state = self._before_call
        else:
            self.state = self._in_text
        return True

    def _in_text(self) -> bool:
        start = self.rest.find(TAG)
        cut = held_from(self.rest, TAG) if start < 0 else len(self.rest[:start].rstrip())
        self.pieces.append(Content(self.rest[:cut]))
        self.rest = self.rest[cut:]
        if start >= 0:
            self.state = self._before_call
        return start >= 0

    def _accepts(self, name: str) -> bool:
        return not self._names or name in self._names
