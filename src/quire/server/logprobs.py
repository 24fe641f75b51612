"""Logprobs in the shapes that clients know."""

from collections.abc import Sequence

from quire.core.step import TokenLogprobs
from quire.server.protocol.base import PromptLogprob
from quire.server.protocol.completions import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from quire.text.answer import Detokenizer
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


class TextOffsets:
    """Where the tokens of a choice begin in its text. They are taken in order, over all chunks of a stream.

    A token that is not shown, or that holds a part of a character, begins where the next text begins.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, skip_special_tokens: bool, context_id: int | None = None
    ) -> None:
        self._text: Detokenizer | None = None
        self._special: frozenset[int] = frozenset()
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, skip_special_tokens, context_id=context_id)
            self._special = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.at_start = tokenizer is not None and context_id is None  # no token with text was taken
        self._next = 0

    def take(self, token_id: int, own: str) -> int:
        """Where the token's `own` text begins. The text that it completes may begin before: bytes are held back."""
        shown = own if self._text is None else self._text.push_token(token_id)
        held = len(shown) - len(own) if shown.endswith(own) else 0
        start, self._next = self._next + held, self._next + len(shown)
        self.at_start = self.at_start and token_id in self._special
        return start


def chat_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, at_start: bool = False
) -> ChatLogprobs:
    """`at_start`: the first entry begins a text, where SentencePiece drops a space."""
    content: list[TokenLogprob] = []
    for position, entry in enumerate(entries):
        first = at_start and position == 0
        best = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [_top(token_id, logprob, tokenizer, first) for token_id, logprob in best]
        content.append({**_top(entry.token_id, entry.logprob, tokenizer, first), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs | int], tokenizer: Tokenizer | None, places: TextOffsets
) -> CompletionLogprobs:
    """A bare id is a token that nothing predicts: the first."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    offsets: list[int] = []
    best: list[dict[str, float] | None] = []
    for entry in entries:
        token_id = entry if isinstance(entry, int) else entry.token_id
        at_start = places.at_start
        token = token_text(token_id, tokenizer, at_start)
        tokens.append(token)
        offsets.append(places.take(token_id, token))
        if isinstance(entry, int):
            chosen.append(None)
            best.append(None)
            continue
        chosen.append(_finite(entry.logprob))
        alternatives = {
            token_text(other_id, tokenizer, at_start): _finite(logprob)
            for other_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        best.append({**alternatives, token: _finite(entry.logprob)} if alternatives else None)
    with_best = any(entry is not None for entry in best)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": best if with_best else None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[str, PromptLogprob] | None]:
    """Nothing predicts the first token."""
    return [None, *(_position(entry, tokenizer) for entry in entries)]


def token_text(token_id: int, tokenizer: Tokenizer | None, at_start: bool = False) -> str:
    """The text that a token adds; `at_start` of a text, or in its middle."""
    if tokenizer is None:
        return str(token_id)
    if at_start:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    return tokenizer.token_text(token_id)


def _position(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, PromptLogprob]:
    by_token: dict[str, PromptLogprob] = {}
    ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(ranked, 1):
        by_token[str(token_id)] = _prompt_logprob(token_id, logprob, rank, tokenizer)
    by_token[str(entry.token_id)] = _prompt_logprob(entry.token_id, entry.logprob, entry.rank, tokenizer)
    return by_token


def _prompt_logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> PromptLogprob:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}


def _top(token_id: int, logprob: float, tokenizer: Tokenizer | None, at_start: bool) -> TopLogprob:
    token = token_text(token_id, tokenizer, at_start)
    raw = tokenizer.token_bytes(token_id) if tokenizer is not None else b""
    if raw.startswith(b" ") and not token.startswith(" "):  # the space that the start of a text loses
        raw = raw[1:]
    return {"token": token, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
