"""Texts for the other things that encoders do beside vectors: pairs that are scored, and masked tokens."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest, Pooled
from quire.core.stats import VectorFormat
from quire.text.prompts import Prompt
from quire.text.tokenizer import Tokenizer

MASKS = ("[MASK]", "<mask>")  # where the tokenizer's files do not name it
MAX_TOP_K = 100
MAX_PREDICTIONS = 1024  # of one request: masked tokens × top_k


@dataclass(frozen=True, slots=True)
class MaskPrediction:
    """A token in place of a masked one, as transformers' fill-mask has it."""

    score: float
    token: int
    token_str: str
    sequence: str


def with_prompt(texts: Sequence[Prompt], vectors: VectorFormat, name: str | None) -> list[Prompt]:
    """Texts behind the model's own prompt of that name, or its default one; token ids stay as they are."""
    if name is not None and name not in vectors.prompts:
        known = ", ".join(vectors.prompts) or "none"
        raise InvalidRequest(
            f"prompt_name={name!r:.100} is none of this model's prompts ({known}): change it or leave it out",
            "prompt_name",
        )
    prompt = vectors.prompts.get(name or vectors.default_prompt or "", "")
    return [prompt + text if isinstance(text, str) else text for text in texts]


def pair_request(
    request_id: str, pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer | None, keep: int | None
) -> EmbedRequest:
    """The request that scores these pairs, each cut to `keep` tokens if that is given."""
    if tokenizer is None:
        raise InvalidRequest(
            "this model has no tokenizer, and pairs are texts: choose another model", "model"
        )
    encoded = [tokenizer.encode_pair(*pair, keep) for pair in pairs]
    return EmbedRequest(
        request_id, [token_ids for token_ids, _ in encoded], [second for _, second in encoded]
    )


def masked_request(
    request_id: str, texts: Sequence[list[int]], top_k: int, tokenizer: Tokenizer | None, vocab_size: int
) -> EmbedRequest:
    """The request that predicts all masked tokens of these texts."""
    most = min(MAX_TOP_K, vocab_size)
    if not 1 <= top_k <= most:
        raise InvalidRequest(f"top_k={top_k} is outside 1 to {most}: change it", "top_k")
    mask_id = None if tokenizer is None else mask_token_id(tokenizer)
    if mask_id is None:
        raise InvalidRequest("this model's tokenizer has no mask token: choose another model", "model")
    masked = [[at for at, token_id in enumerate(text) if token_id == mask_id] for text in texts]
    for position, positions in enumerate(masked):
        if not positions:
            name = tokenizer.token(mask_id) if tokenizer is not None else ""
            raise InvalidRequest(
                f"input[{position}] has no mask token: put {name} where a token is to be predicted", "input"
            )
    num_masked = sum(map(len, masked))
    if num_masked * top_k > MAX_PREDICTIONS:
        raise InvalidRequest(
            f"input has {num_masked} mask tokens, which with top_k={top_k} are {num_masked * top_k} predictions, and "
            f"one request may have {MAX_PREDICTIONS}: lower top_k, or send several requests",
            "input",
        )
    return EmbedRequest(request_id, texts, masked=masked, top_k=top_k)


def mask_token_id(tokenizer: Tokenizer) -> int | None:
    names = (tokenizer.special_tokens.get("mask_token"), *MASKS)
    return next((found for name in names if name and (found := tokenizer.token_id(name)) is not None), None)


def predictions_of(pooled: Pooled, request: EmbedRequest, tokenizer: Tokenizer) -> list[list[MaskPrediction]]:
    """Of each masked token of one text, the most likely first. As transformers does it, the sequence shows special
    tokens where other masks are left in it."""
    scores, token_ids = array("f", pooled.vector), array("i", pooled.token_ids)
    text, top_k = list(request.texts[pooled.index]), request.top_k
    predictions, masked = [], request.masked[pooled.index]
    for row, position in enumerate(masked):
        kept = text[position]
        parts = range(row * top_k, (row + 1) * top_k)
        row_predictions = []
        for part in parts:
            token_id = text[position] = token_ids[part]
            word = tokenizer.decode([token_id], skip_special_tokens=False)
            sequence = tokenizer.decode(text, skip_special_tokens=len(masked) == 1)
            row_predictions.append(MaskPrediction(scores[part], token_id, word, sequence))
        predictions.append(row_predictions)
        text[position] = kept
    return predictions


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 for a vector of zeros."""
    length = math.sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return min(1.0, max(-1.0, sum(map(mul, first, second)) / length)) if length else 0.0
