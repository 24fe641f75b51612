"""Admission: how much may wait for the engine. Decided on this side of the link, so a refusal takes no time."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.sampling import SamplingParams
from quire.link.messages import Figures

MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait; what runs is bounded by max_num_seqs and the pool."""

    max_requests: int
    max_tokens: int | None = None  # of waiting prompts together


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for the engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    adapter: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class EmbedAsk:
    """One request for an encoder: all its texts."""

    request_id: str
    texts: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


class Admission:
    """Knows every request from its submission to its end, and which of them have begun to run."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._waiting: dict[str, int] = {}  # request id -> prompt tokens
        self._running: set[str] = set()
        self._waiting_tokens = 0
        self._last_begin = 0.0
        self._seconds_per_begin = 0.0  # a moving average, for Retry-After

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self, asks: Sequence[Ask | EmbedAsk], figures: Figures, max_num_seqs: int) -> None:
        """All of them or none: raises QueueFull, or InvalidRequest if they could never wait together."""
        num_tokens = sum(ask.num_tokens for ask in asks)
        self._refuse_hopeless(len(asks), num_tokens, max_num_seqs)
        self.check_room(len(asks), figures, max_num_seqs)
        limit = self.bounds.max_tokens
        if limit is not None and self._waiting and self._waiting_tokens + num_tokens > limit:
            raise QueueFull(
                f"{self._waiting_tokens} prompt tokens are waiting and {num_tokens} more would pass {limit}: "
                "try again later, or raise max_queue_tokens"
            )

    def check_room(self, num_asks: int, figures: Figures, max_num_seqs: int) -> None:
        """As `check`, before anyone knows how long the prompts are."""
        # An engine in which nobody waits takes as many more as it has rows; they pass through the queue at once.
        room = max(0, max_num_seqs - figures.num_running) if figures.num_waiting == 0 else 0
        if self.num_waiting + num_asks > self.bounds.max_requests + room:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting already: try again later, or raise max_queue_requests"
            )

    def enter(self, asks: Sequence[Ask | EmbedAsk]) -> None:
        for ask in asks:
            num_tokens = self._waiting[ask.request_id] = ask.num_tokens
            self._waiting_tokens += num_tokens

    def begin(self, request_id: str) -> None:
        """The request left the queue."""
        num_tokens = self._waiting.pop(request_id, None)
        if num_tokens is None:
            return  # it ended meanwhile
        self._waiting_tokens -= num_tokens
        self._running.add(request_id)
        now = time.monotonic()
        if self._last_begin:
            self._seconds_per_begin += 0.1 * (now - self._last_begin - self._seconds_per_begin)
        self._last_begin = now

    def leave(self, request_id: str) -> None:
        self._waiting_tokens -= self._waiting.pop(request_id, 0)
        self._running.discard(request_id)

    def retry_seconds(self) -> int:
        """When half of the queue should be gone, going by how requests began lately."""
        expected = math.ceil(self._seconds_per_begin * self.num_waiting / 2)
        return min(max(1, expected), MAX_RETRY_SECONDS)

    def _refuse_hopeless(self, num_asks: int, num_tokens: int, max_num_seqs: int) -> None:
        most = self.bounds.max_requests + max_num_seqs
        if num_asks > most:
            raise InvalidRequest(
                f"{num_asks} prompts in one request are more than can run and wait ({most}): "
                "send fewer at a time, or raise max_queue_requests",
                "prompt",
            )
        limit = self.bounds.max_tokens
        if limit is not None and num_asks > 1 and num_tokens > limit:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens together and {limit} may wait: "
                "send fewer at a time, or raise max_queue_tokens",
                "prompt",
            )
