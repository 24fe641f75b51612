"""EncoderEngine: texts become vectors, first come first served. A text is closed in one step and takes no blocks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.pooled import Pooled
from quire.runner.encoder_runner import Vectors


class TextRunner(Protocol):
    """Computes one step."""

    def run(self, sequences: Sequence[Sequence[int]]) -> Vectors: ...


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """What one text, one step and the queue may hold."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_requests: int
    max_queue_tokens: int | None = None


@dataclass(slots=True)
class EncoderStats:
    """Plain counters, read by upper rooms."""

    num_requests: int = 0
    num_finished: int = 0  # texts
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Text:
    request_id: str
    index: int
    token_ids: Sequence[int]


class EncoderEngine:
    """One encoder, one queue. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, limits: EncoderLimits, runner: TextRunner) -> None:
        self.limits = limits
        self.stats = EncoderStats()
        self.num_waiting_tokens = 0
        self._runner = runner
        self._queue: deque[_Text] = deque()  # those of aborted requests stay until they come to the front
        self._open: dict[str, int] = {}  # request id -> texts that wait

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests with a text that waits."""
        return len(self._open)

    def add(self, request_id: str, texts: Sequence[Sequence[int]]) -> None:
        """Queues all texts of a request or none. Raises InvalidRequest if one can never run, QueueFull if not now."""
        if request_id in self._open:
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        if not texts:
            raise InvalidRequest("there is nothing to embed: send at least one text", "input")
        for text in texts:
            self._check(text)
        num_tokens = sum(map(len, texts))
        self._check_queue(num_tokens)
        self._queue.extend(_Text(request_id, index, text) for index, text in enumerate(texts))
        self._open[request_id] = len(texts)
        self.num_waiting_tokens += num_tokens
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += num_tokens

    def abort(self, request_id: str) -> bool:
        """Drops what a request still has in the queue. False if nobody knows it."""
        if self._open.pop(request_id, None) is None:
            return False
        kept = [text for text in self._queue if text.request_id != request_id]
        self._queue = deque(kept)
        self.num_waiting_tokens = sum(len(text.token_ids) for text in kept)
        return True

    def step(self) -> list[Pooled]:
        """Computes the texts at the front of the queue, as many as one step takes."""
        texts = self._take()
        if not texts:
            return []
        result = self._runner.run([text.token_ids for text in texts])
        num_tokens = sum(len(text.token_ids) for text in texts)
        self.stats.num_steps += 1
        self.stats.num_finished += len(texts)
        self.stats.num_computed_tokens += num_tokens
        self.stats.step_seconds += result.seconds
        return [_pooled(text, row) for text, row in zip(texts, result.values, strict=True)]

    def close(self) -> None:
        """Forgets what waits. Calling it twice is fine."""
        self._queue.clear()
        self._open.clear()
        self.num_waiting_tokens = 0

    def _take(self) -> list[_Text]:
        """In order of arrival: a short text never overtakes a long one, so nobody waits for ever."""
        taken: list[_Text] = []
        room = self.limits.max_num_batched_tokens
        while self._queue and len(taken) < self.limits.max_num_seqs:
            length = len(self._queue[0].token_ids)
            if length > room:
                break
            room -= length
            taken.append(self._queue.popleft())
        for text in taken:
            self.num_waiting_tokens -= len(text.token_ids)
            self._open[text.request_id] -= 1
            if self._open[text.request_id] == 0:
                del self._open[text.request_id]
        return taken

    def _check(self, text: Sequence[int]) -> None:
        limits = self.limits
        if not text:
            raise InvalidRequest("a text has no tokens: send at least one", "input")
        if len(text) > limits.max_model_len:
            raise InvalidRequest(
                f"a text has {len(text)} tokens and this model takes {limits.max_model_len}: shorten it, cut it with "
                "truncate_prompt_tokens, or split it and embed the parts",
                "input",
            )
        low, high = min(text), max(text)
        if low < 0 or high >= limits.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {limits.vocab_size}: use 0 to {limits.vocab_size - 1}",
                "input",
            )

    def _check_queue(self, num_tokens: int) -> None:
        limits = self.limits
        if len(self._open) >= limits.max_queue_requests:
            raise QueueFull(
                f"{len(self._open)} requests are waiting already: try again later, or raise max_queue_requests"
            )
        limit = limits.max_queue_tokens
        if limit is not None and self._open and self.num_waiting_tokens + num_tokens > limit:
            raise QueueFull(
                f"{self.num_waiting_tokens} tokens are waiting and {num_tokens} more would pass {limit}: "
                "try again later, or raise max_queue_tokens"
            )


def _pooled(text: _Text, vector: numpy.ndarray) -> Pooled:
    """A vector that is none is its own text's fault alone, not its neighbours'."""
    num_tokens = len(text.token_ids)
    if not numpy.isfinite(vector).all():
        message = "the model gave a vector that is not finite: check the weights, or try dtype=float32"
        return Pooled(text.request_id, text.index, b"", num_tokens, message)
    return Pooled(text.request_id, text.index, vector.astype(numpy.float32, copy=False).tobytes(), num_tokens)
