"""ThinkParser: <think>thoughts</think> and then the answer, as it comes."""

from quire.text.markers import held_from
from quire.text.pieces import Content, Piece, Reasoning, merged

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """However the text is cut, the merged pieces are the same. White space around the markers is left out.

    Only what the answer begins with can be thoughts; thoughts that never end are all there is.
    """

    def __init__(self, inside: bool) -> None:
        """`inside`: the text begins in the middle of thoughts (and may repeat OPEN)."""
        self._inside = inside
        self._state = self._before
        self._rest = ""
        self._pieces: list[Piece] = []

    def begins_with_thoughts(self, text: str) -> bool:
        """Whether an answer that begins so has thoughts."""
        return self._inside or text.lstrip().startswith(OPEN)

    def feed(self, text: str) -> list[Piece]:
        if self._state == self._answer:
            return [Content(text)] if text else []
        self._rest += text
        while self._rest and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        if self._state == self._behind:
            self._rest = ""
        elif self._state == self._thoughts or self._inside:
            self._pieces.append(Reasoning(self._rest))
        else:
            self._pieces.append(Content(self._rest))
        self._rest = ""
        return self._taken()

    def _before(self) -> bool:
        bare = self._rest.lstrip()
        if not bare or (len(bare) < len(OPEN) and OPEN.startswith(bare)):
            return False
        if bare.startswith(OPEN):
            self._rest = bare[len(OPEN) :]
            self._state = self._first_thought
        elif self._inside:
            self._state = self._first_thought
        else:
            self._state = self._answer
        return True

    def _first_thought(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest:
            self._state = self._thoughts
        return bool(self._rest)

    def _thoughts(self) -> bool:
        found = self._rest.find(CLOSE)
        cut = held_from(self._rest, CLOSE) if found < 0 else len(self._rest[:found].rstrip())
        self._pieces.append(Reasoning(self._rest[:cut]))
        if found < 0:
            self._rest = self._rest[cut:]
            return False
        self._rest = self._rest[found + len(CLOSE) :]
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest:
            self._state = self._answer
        return bool(self._rest)

    def _answer(self) -> bool:
        self._pieces.append(Content(self._rest))
        self._rest = ""
        return False

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return merged(pieces)
