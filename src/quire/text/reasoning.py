"""Reasoning: parses <think>…</think> before an answer; the parsers by name."""

from collections.abc import Sequence

from quire.text.pieces import Content, Piece, PieceParser, Reasoning
from quire.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)
# Whether an answer starts inside its reasoning, where the prompt's end does not show it.
_BEGINS_INSIDE = {"deepseek_r1": True, "qwen3": False}
REASONING_PARSERS = tuple(sorted(_BEGINS_INSIDE))


class ThinkParser(PieceParser):
    """Only the start of an answer can be reasoning; without a closing marker all of it is. White space around the
    markers is left out."""

    def __init__(self, inside: bool) -> None:
        """`inside`: the text starts inside the reasoning (and may repeat OPEN)."""
        super().__init__(self._before)
        self._inside = inside

    def begins_with_reasoning(self, text: str) -> bool:
        """Whether an answer that starts with `text` has reasoning."""
        return self._inside or text.lstrip().startswith(OPEN)

    def feed(self, text: str) -> list[Piece]:
        if self.state == self.show_rest:
            return [Content(text)] if text else []
        return super().feed(text)

    def finish(self) -> list[Piece]:
        if self.state == self._behind:
            self.rest = ""
        elif self.state == self._thoughts or self._inside:
            self.pieces.append(Reasoning(self.rest))
        else:
            self.pieces.append(Content(self.rest))
        self.rest = ""
        return self.taken()

    def _before(self) -> bool:
        bare = self.rest.lstrip()
        if not bare or (len(bare) < len(OPEN) and OPEN.startswith(bare)):
            return False
        if bare.startswith(OPEN):
            self.rest = bare[len(OPEN) :]
            self.state = self._first_thought
        elif self._inside:
            self.state = self._first_thought
        else:
            self.state = self.show_rest
        return True

    def _first_thought(self) -> bool:
        self.rest = self.rest.lstrip()
        if self.rest:
            self.state = self._thoughts
        return bool(self.rest)

    def _thoughts(self) -> bool:
        if not self.show_until(CLOSE, Reasoning):
            return False
        self.rest = self.rest.lstrip().removeprefix(CLOSE)
        self.state = self._behind
        return True

    def _behind(self) -> bool:
        self.rest = self.rest.lstrip()
        if self.rest:
            self.state = self.show_rest
        return bool(self.rest)


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
