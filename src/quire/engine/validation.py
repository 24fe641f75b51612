"""Checks at arrival: a request that can never run is refused at once, with the number exceeded and the remedy."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire.core.encoder_input import EncoderInput
from quire.core.errors import ContextExceeded, InvalidRequest
from quire.core.request import Clock, EmbedRequest, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import Shown, gauge
from quire.memory.paged import PagedMemory


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the batch allow a single request. Pure: both sides of the link check with it."""

    vocab_size: int
    max_model_len: int = gauge(
        "max_model_len", "Tokens per sequence.", shown=Shown("limits", "{:,} tokens per sequence")
    )
    max_num_seqs: int = gauge(
        "max_num_seqs", "Sequences that run at once.", shown=Shown("limits", "{} sequences")
    )
    eos_token_ids: tuple[int, ...] = ()
    max_num_batched_tokens: int = gauge(
        "max_num_batched_tokens", "Tokens per step.", 0, shown=Shown("limits", "{:,} tokens per step")
    )
    encoder: EncoderInput | None = None  # of an encoder-decoder model

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if the request exceeds the context, the vocabulary or the batch."""
        for name in ("request_id", "cache_salt", "tenant"):
            check_text(name, getattr(request, name))
        self._check_context(request.num_prompt_tokens)
        self._check_vocabulary(request.prompt_token_ids, "prompt")
        if self.encoder is not None:
            self.encoder.check(request)
        self.check_sampling(request.sampling)

    def check_texts(self, request: EmbedRequest) -> None:
        """The same for an encoder, whose texts may fill the context."""
        if not request.texts:
            raise InvalidRequest("there is nothing to embed: send at least one text", "input")
        for position, text in enumerate(request.texts):
            if not text:
                raise InvalidRequest(
                    "{param}[{position}] has no tokens: send at least one", "input", position=position
                )
            if len(text) > self.max_model_len:
                raise ContextExceeded.of_text(position, len(text), self.max_model_len)
            self._check_vocabulary(text, "input")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequest(
                f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}: "
                f"use 0 to {self.vocab_size - 1}",
                param,
            )

    def _check_context(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
        if num_tokens >= self.max_model_len:
            raise ContextExceeded.of_prompt(num_tokens, self.max_model_len)

    def check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.num_sequences > self.max_num_seqs:
            name = "n" if sampling.best_of is None else "best_of"
            raise InvalidRequest(
                f"{name}={sampling.num_sequences} sequences can never run together with "
                f"max_num_seqs={self.max_num_seqs}: lower {name} or raise max_num_seqs",
                name,
            )
        if sampling.min_tokens >= self.max_model_len:
            raise InvalidRequest(
                f"min_tokens={sampling.min_tokens} can never be reached in a context of {self.max_model_len}: "
                "lower min_tokens or raise max_model_len",
                "min_tokens",
            )
        for name, token_ids in _named_tokens(sampling):
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequest(
                        f"{name} names token id {token_id}, outside the vocabulary of {self.vocab_size}", name
                    )


def check_text(name: str, value: str) -> None:
    """Raises InvalidRequest for text that could not be encoded later, where it is hashed, sent or logged."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has half a surrogate pair at character {error.start}, which is no text: remove it", name
        ) from None


def _named_tokens(sampling: SamplingParams) -> tuple[tuple[str, Iterable[int]], ...]:
    """The sampling parameters that name tokens."""
    return (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words_token_ids", (token_id for word in sampling.bad_words_token_ids for token_id in word)),
    )


class RequestValidator:
    """Accepts requests for one engine: checks them and decides seed, maximum length and stop tokens."""

    def __init__(self, limits: Limits, memory: PagedMemory, seed: int, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self._memory = memory
        self._seeds = random.Random(seed)
        self._clock = clock

    def accept(self, request: Request) -> Request:
        """The copy that the engine works with. Raises InvalidRequest if the request can never run."""
        self.limits.check(request)
        if self.limits.encoder is not None:
            request = self.limits.encoder.expand(request, self._memory.block_size, self.limits.max_model_len)
        sampling = request.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= frozenset(self.limits.eos_token_ids)
        accepted = replace(
            request,
            prompt_token_ids=tuple(request.prompt_token_ids),
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1),
            max_len=self._max_len(request),
            stop_token_ids=stop_token_ids,
            arrival=self._clock(),
        )
        self._check_pool(accepted)
        return accepted

    @property
    def _num_blocks(self) -> int:
        """Blocks that requests can have: pinned prefixes keep theirs."""
        return self._memory.num_blocks - self._memory.num_pinned

    def _max_len(self, request: Request) -> int:
        sampling, limit = request.sampling, request.max_len or self.limits.max_model_len
        num_prompt_tokens = request.num_prompt_tokens
        if sampling.max_tokens is not None:
            return min(num_prompt_tokens + sampling.max_tokens, limit)
        # Without max_tokens the pool sets the length: n sequences share the full blocks of the prompt.
        block_size = self._memory.block_size
        shared = num_prompt_tokens // block_size
        available = self._num_blocks
        if request.adapter is not None:  # its pages come out of the same pool, and its size is not known yet
            available //= 2
        own_blocks = max(0, available - shared) // sampling.num_sequences
        return max(num_prompt_tokens + 1, min(limit, (shared + own_blocks) * block_size + 1))

    def _check_pool(self, request: Request) -> None:
        needed, available = self._memory.blocks_at_most(request), self._num_blocks
        if needed > available:
            raise InvalidRequest(
                f"the request may need {needed} blocks of {self._memory.block_size} tokens and the whole pool has "
                f"{available}: lower max_tokens or n, or raise kv_cache_memory_bytes",
                "max_tokens",
            )
