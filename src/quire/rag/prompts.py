"""Passages in a prompt, of a system message or with a question, and which of them an answer is taken from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.rag.library import CitedPassage
from quire.rag.words import word_counts
from quire.text.tokenizer import Tokenizer

INTRODUCTION = "Answer from these passages of the user's files:"
INSTRUCTION = "Use the passages to answer the question."
_MARGIN = 64  # tokens of the chat template and of the words around passages
_LEAST = 32  # tokens of a passage that is worth to be cut
MAX_CITATIONS = 64
MIN_SHARE = 0.6  # of a sentence's words that a passage must have to be its source
_MARK = re.compile(r"\[(\d{1,2})\]|【(\d{1,2})[^】]{0,40}】")
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+(?!\s|$)[^.!?\n]+)*[.!?]*")


def with_passages(instructions: str, passages: Sequence[str]) -> str:
    """A system message with the passages, numbered from 1."""
    numbered = [f"[{number}] {text}" for number, text in enumerate(passages, 1)]
    head = f"{instructions}\n\n{INTRODUCTION}" if instructions else INTRODUCTION
    return "\n\n".join([head, *numbered])


class AskPrompt(NamedTuple):
    messages: list[dict[str, str]]
    sources: list[CitedPassage]  # that are in the prompt, the best first, [1] to [n]


def ask_prompt(
    question: str, passages: Sequence[CitedPassage], tokenizer: Tokenizer | None, max_tokens: int
) -> AskPrompt:
    """A chat whose prompt has `max_tokens` tokens at most. The last passage that does not fit whole is cut.

    The best passage stands next to the question: small models answer from what they read last.
    """
    room = max_tokens - _MARGIN - _count(tokenizer, INSTRUCTION + question)
    parts: list[str] = []
    sources: list[CitedPassage] = []
    for passage in passages:
        text = " ".join(passage.text.split())
        cost = _count(tokenizer, text) + 8
        if cost > room:
            if room < _LEAST:
                break
            text = text[: len(text) * room // cost]
        parts.append(f"[{len(parts) + 1}] {text}")
        sources.append(passage)
        room -= cost
    listed = "\n".join(reversed(parts)) if parts else "(none)"
    content = f"{INSTRUCTION}\n\nPassages:\n{listed}\n\nQuestion: {question}"
    return AskPrompt([{"role": "user", "content": content}], sources)


def _count(tokenizer: Tokenizer | None, text: str) -> int:
    return len(text) // 2 if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Citation:
    """A place in an answer, and the number of the passage that it is taken from."""

    index: int  # characters before it
    passage: int  # from 0


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
