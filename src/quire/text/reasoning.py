"""Reasoning: parses <think>…</think> before an answer; the parsers by name."""

from collections.abc import Sequence

from quire.text.pieces import Content, Piece, Reasoning, held_from, merged
from quire.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)
# Whether an answer starts inside its reasoning, where the prompt's end does not show it.
_BEGINS_INSIDE = {"deepseek_r1": True, "qwen3": False}
REASONING_PARSERS = tuple(sorted(_BEGINS_INSIDE))


class ThinkParser:
    """However the text is cut, the merged pieces are the same. White space around the markers is left out.

    Only the start of an answer can be reasoning; without a closing marker all of it is.
    """

    def __init__(self, inside: bool) -> None:
        """`inside`: the text starts inside the reasoning (and may repeat OPEN)."""
        self._inside = inside
        self._state = self._before
        self._rest = ""
        self._pieces: list[Piece] = []

    def begins_with_reasoning(self, text: str) -> bool:
        """Whether an answer that starts with `text` has reasoning."""
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
        end_marker = self._rest.find(CLOSE)
        cut = held_from(self._rest, CLOSE) if end_marker < 0 else len(self._rest[:end_marker].rstrip())
        self._pieces.append(Reasoning(self._rest[:cut]))
        if end_marker < 0:
            self._rest = self._rest[cut:]
            return False
        self._rest = self._rest[end_marker + len(CLOSE) :]
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


def reasoning_parser(name: str, prompt: str | None) -> ThinkParser | None:
    """For the answer to this prompt; None if the prompt has closed the reasoning.

    Templates often write the first marker themselves, or both where thinking is switched off.
    """
    end = (prompt or "").rstrip()
    if end.endswith(CLOSE):
        return None
    return ThinkParser(inside=_BEGINS_INSIDE[name] or end.endswith(OPEN))


def guessed_reasoning(template: str) -> str | None:
    """The parser that a chat template calls for, if that is clear."""
    if CLOSE not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def num_reasoning_tokens(text: str, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """How many of an answer's tokens are reasoning, the closing marker included."""
    end = tokenizer.token_id(CLOSE) if tokenizer is not None else None
    if end in token_ids:
        return token_ids.index(end) + 1
    reasoning, end_marker, _ = text.partition(CLOSE)
    if not end_marker or tokenizer is None:
        return len(token_ids)
    return len(tokenizer.encode(reasoning + CLOSE, add_special_tokens=False))
