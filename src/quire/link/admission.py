"""QueueAdmission: how much may wait for the engine. Decided on the side of the client, so a refusal is immediate."""

import math
import time
from collections.abc import Sequence

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest, QueueBounds, Request
from quire.core.stats import QueueStats

MAX_RETRY_SECONDS = 60


class QueueAdmission:
    """The requests that were submitted and have not started to run, within bounds."""

    def __init__(self, bounds: QueueBounds) -> None:
        self.bounds = bounds
        self._waiting: dict[str, int] = {}  # request id -> prompt tokens
        self._waiting_tokens = 0
        self._last_start = 0.0
        self._seconds_per_start = 0.0  # a moving average, for Retry-After

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self, requests: Sequence[Request | EmbedRequest], load: QueueStats, max_num_seqs: int) -> None:
        """All of them or none: raises QueueFull, or InvalidRequest if they could never wait together."""
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        self._refuse_hopeless(len(requests), num_tokens, max_num_seqs)
        self.check_room(len(requests), load, max_num_seqs)
        self.bounds.check_tokens(self._waiting_tokens, num_tokens)

    def check_room(self, num_requests: int, load: QueueStats, max_num_seqs: int) -> None:
        """As `check`, before the lengths of the prompts are known. `load` is the engine's own."""
        # With an empty queue the engine's free rows are filled at once.
        num_free_rows = max(0, max_num_seqs - load.num_running) if load.num_waiting == 0 else 0
        self.bounds.check_requests(self.num_waiting, num_requests, num_free_rows)

    def enter(self, requests: Sequence[Request | EmbedRequest]) -> None:
        for request in requests:
            num_tokens = self._waiting[request.request_id] = request.num_prompt_tokens
            self._waiting_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """The request left the queue."""
        num_tokens = self._waiting.pop(request_id, None)
        if num_tokens is None:
            return  # it ended meanwhile
        self._waiting_tokens -= num_tokens
        now = time.monotonic()
        if self._last_start:
            self._seconds_per_start += 0.1 * (now - self._last_start - self._seconds_per_start)
        self._last_start = now

    def leave(self, request_id: str) -> None:
        """The request ended, in the queue or not."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def retry_seconds(self) -> int:
        """When half of the queue should be gone, at the recent rate of starts."""
        expected = math.ceil(self._seconds_per_start * self.num_waiting / 2)
        return min(max(1, expected), MAX_RETRY_SECONDS)

    def _refuse_hopeless(self, num_requests: int, num_tokens: int, max_num_seqs: int) -> None:
        bounds = self.bounds
        if bounds.max_requests is not None and num_requests > bounds.max_requests + max_num_seqs:
            raise InvalidRequest(
                f"{num_requests} prompts in one request are more than can run and wait "
                f"({bounds.max_requests + max_num_seqs}): send fewer at a time, or raise max_queue_requests",
                "prompt",
            )
        if bounds.max_tokens is not None and num_requests > 1 and num_tokens > bounds.max_tokens:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens together and {bounds.max_tokens} may wait: "
                "send fewer at a time, or raise max_queue_tokens",
                "prompt",
            )
