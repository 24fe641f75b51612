"""The model's vocabulary as grammars see it, made from its tokenizer."""

from functools import partial

from quire.core.config import ModelOptions
from quire.engine.validation import Limits
from quire.grammar.errors import GrammarError
from quire.grammar.vocabulary import Vocabulary
from quire.text.load import choose_tokenizer
from quire.weights.source import Source


def model_vocabulary(options: ModelOptions, source: Source, limits: Limits) -> Vocabulary:
    """Takes some tenths of a second: made when the first request needs it."""
    tokenizer = choose_tokenizer(options, source)
    if tokenizer is None:
        raise GrammarError(
            "structured output needs a tokenizer, and this model has none: give one with --tokenizer"
        )
    size = limits.vocab_size  # a model may have more rows than its tokenizer has tokens, or fewer
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(token_id) for token_id in range(size)),
        special_ids=frozenset(one for one in tokenizer.special_ids if one < size),
        end_ids=tuple(one for one in limits.eos_token_ids if one < size),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
