"""The names under which thoughts are told apart, and where a model with such a template is in them at first."""

from collections.abc import Sequence

from quire.text.reasoning.think import CLOSE, OPEN, ThinkParser
from quire.text.tokenizer import Tokenizer

MARKERS = (OPEN, CLOSE)
# Whether an answer begins in the middle of thoughts, where the prompt's own end does not say so.
_BEGINS_INSIDE = {"deepseek_r1": True, "qwen3": False}
REASONING_PARSERS = tuple(sorted(_BEGINS_INSIDE))


def reasoning_parser(name: str, prompt: str | None) -> ThinkParser | None:
    """For the answer to this prompt; None if its thoughts are over before it begins.

    Templates often write the first marker themselves, or both where thinking is switched off.
    """
    end = (prompt or "").rstrip()
    if end.endswith(CLOSE):
        return None
    return ThinkParser(inside=_BEGINS_INSIDE[name] or end.endswith(OPEN))


def guessed_reasoning(template: str) -> str | None:
    """What a chat template shows about its model, if that is clear."""
    if CLOSE not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def num_reasoning_tokens(text: str, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """How many of an answer's tokens are thoughts, the marker that ends them included."""
    end = tokenizer.token_id(CLOSE) if tokenizer is not None else None
    if end in token_ids:
        return token_ids.index(end) + 1
    thoughts, found, _ = text.partition(CLOSE)
    if not found or tokenizer is None:
        return len(token_ids)
    return len(tokenizer.encode(thoughts + CLOSE, add_special_tokens=False))
