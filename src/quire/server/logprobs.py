"""Logprobs in the shapes that clients know."""

from collections.abc import Sequence

from quire.core.step import TokenLogprobs
from quire.server.protocol.base import PromptLogprob
from quire.server.protocol.completions import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> ChatLogprobs:
    content: list[TokenLogprob] = [
        {
            **_top(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _top(token_id, logprob, tokenizer)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs | int], tokenizer: Tokenizer | None, offset: int = 0
) -> CompletionLogprobs:
    """`offset` is where the first token's text begins. A bare id is a token that nothing predicts: the first."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    offsets: list[int] = []
    best: list[dict[str, float] | None] = []
    for entry in entries:
        token_id = entry if isinstance(entry, int) else entry.token_id
        token = token_text(token_id, tokenizer)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        if isinstance(entry, int):
            chosen.append(None)
            best.append(None)
            continue
        chosen.append(_finite(entry.logprob))
        alternatives = {
            token_text(other_id, tokenizer): _finite(logprob)
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


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token_id)
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _position(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, PromptLogprob]:
    by_token: dict[str, PromptLogprob] = {}
    ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(ranked, 1):
        by_token[str(token_id)] = _prompt_logprob(token_id, logprob, rank, tokenizer)
    by_token[str(entry.token_id)] = _prompt_logprob(entry.token_id, entry.logprob, entry.rank, tokenizer)
    return by_token


def _prompt_logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> PromptLogprob:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}


def _top(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id) if tokenizer is not None else b""
    return {"token": token_text(token_id, tokenizer), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
