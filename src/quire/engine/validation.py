"""What happens to a request at the door: checked against the model and the pool, taken or refused at once."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.clock import Clock
from quire.core.errors import InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.memory.interface import Memory


@dataclass(frozen=True, slots=True)
class Limits:
    """What a single request may ask for."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]


class RequestValidator:
    """Turns a prompt and its parameters into a Request, or raises InvalidRequest with number and remedy."""

    def __init__(self, limits: Limits, memory: Memory, seed: int, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self._memory = memory
        self._seeds = random.Random(seed)
        self._clock = clock

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        adapter: str | None = None,
    ) -> Request:
        self._check_prompt(prompt_token_ids, sampling)
        self._check_token_ids(sampling)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= frozenset(self.limits.eos_token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1),
            max_len=self._max_len(len(prompt_token_ids), sampling, adapter is not None),
            stop_token_ids=stop_token_ids,
            arrival=self._clock(),
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        self._check_pool(request)
        return request

    def _check_prompt(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        num_tokens, limits = len(prompt_token_ids), self.limits
        if num_tokens == 0:
            raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
        if num_tokens >= limits.max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens and the context is {limits.max_model_len}, which must hold "
                "at least one more: shorten the prompt or raise max_model_len",
                "prompt",
            )
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= limits.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {limits.vocab_size}: use 0 to {limits.vocab_size - 1}",
                "prompt",
            )
        if sampling.num_sequences > limits.max_num_seqs:
            raise InvalidRequest(
                f"n={sampling.num_sequences} sequences can never run together with "
                f"max_num_seqs={limits.max_num_seqs}: lower n or raise max_num_seqs",
                "n",
            )

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        fields = {
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids or (),
        }
        for name, token_ids in fields.items():
            for token_id in token_ids:
                if not 0 <= token_id < self.limits.vocab_size:
                    raise InvalidRequest(
                        f"{name} names token id {token_id}, outside the vocabulary of {self.limits.vocab_size}",
                        name,
                    )

    def _max_len(self, num_prompt_tokens: int, sampling: SamplingParams, has_adapter: bool) -> int:
        limit = self.limits.max_model_len
        if sampling.max_tokens is not None:
            return min(num_prompt_tokens + sampling.max_tokens, limit)
        # nobody asked for a length, so the pool may set it: n sequences share the prompt's full blocks
        memory = self._memory
        shared = num_prompt_tokens // memory.block_size
        available = memory.num_blocks - self._memory.num_pinned
        if has_adapter:  # whose pages come out of the same pool, and whose size is not known yet
            available //= 2
        own_blocks = max(0, available - shared) // sampling.num_sequences
        return max(num_prompt_tokens + 1, min(limit, (shared + own_blocks) * memory.block_size + 1))

    def _check_pool(self, request: Request) -> None:
        needed, available = (
            self._memory.blocks_at_most(request),
            self._memory.num_blocks - self._memory.num_pinned,
        )
        if needed > available:
            raise InvalidRequest(
                f"the request may need {needed} blocks of {self._memory.block_size} tokens and the whole pool has "
                f"{available}: lower max_tokens or n, or raise kv_cache_memory_bytes",
                "max_tokens",
            )
