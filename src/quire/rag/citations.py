"""Passages in a prompt, and which of them an answer is taken from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.rag.words import word_counts

INTRODUCTION = "Answer from these passages of the user's files:"
MAX_CITATIONS = 64
MIN_SHARE = 0.6  # of a sentence's words that a passage must have to be its source
_MARK = re.compile(r"\[(\d{1,2})\]|【(\d{1,2})[^】]{0,40}】")
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+(?!\s|$)[^.!?\n]+)*[.!?]*")


@dataclass(frozen=True, slots=True)
class Citation:
    """A place in an answer, and the number of the passage that it is taken from."""

    index: int  # characters before it
    passage: int  # from 0


def with_passages(instructions: str, passages: Sequence[str]) -> str:
    """A system message with the passages, numbered from 1."""
    numbered = [f"[{number}] {text}" for number, text in enumerate(passages, 1)]
    head = f"{instructions}\n\n{INTRODUCTION}" if instructions else INTRODUCTION
    return "\n\n".join([head, *numbered])


def citations(answer: str, passages: Sequence[str]) -> list[Citation]:
    """By the marks that a model wrote, such as [1]; without any, by the words that sentences share with passages."""
    marked = [
        Citation(match.end(), number - 1)
        for match in _MARK.finditer(answer)
        if 1 <= (number := int(match[1] or match[2])) <= len(passages)
    ]
    if marked:
        return marked[:MAX_CITATIONS]
    words = [word_counts(passage).keys() for passage in passages]
    made = []
    for match in _SENTENCE.finditer(answer):
        own = word_counts(match[0]).keys()
        if not own or not words:
            continue
        shares = [len(own & theirs) / len(own) for theirs in words]
        best = max(range(len(shares)), key=shares.__getitem__)
        if shares[best] >= MIN_SHARE:
            made.append(Citation(match.end(), best))
    return made[:MAX_CITATIONS]
