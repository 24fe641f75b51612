"""The prompt that answers a question with passages: as many as fit the model's context.

The best passage is the last one, next to the question: small models answer from what they read last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.rag.library import CitedPassage
from quire.text.tokenizer import Tokenizer

INSTRUCTION = "Use the passages to answer the question."
_MARGIN = 64  # tokens of the chat template and of the words around passages
_LEAST = 32  # tokens of a passage that is worth to be cut


class AskPrompt(NamedTuple):
    messages: list[dict[str, str]]
    sources: list[CitedPassage]  # that are in the prompt, the best first, [1] to [n]


def ask_prompt(
    question: str, passages: Sequence[CitedPassage], tokenizer: Tokenizer | None, max_tokens: int
) -> AskPrompt:
    """A chat whose prompt has `max_tokens` tokens at most. The last passage that does not fit whole is cut."""
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
