"""QueueBounds: how much may wait for an engine. The in-process queue and the HTTP side's client share it."""

from dataclasses import dataclass

from quire.core.errors import QueueFull


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Limits on waiting requests and on their prompt tokens; None means no limit. Running requests do not count."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def check_requests(self, num_waiting: int, num_new: int, num_free_rows: int = 0) -> None:
        """Raises QueueFull; `num_free_rows` requests pass through the queue at once and need no place in it."""
        if self.max_requests is not None and num_waiting + num_new > self.max_requests + num_free_rows:
            raise QueueFull(
                f"{num_waiting} requests are waiting already: try again later, or raise max_queue_requests"
            )

    def check_tokens(self, num_waiting_tokens: int, num_new: int) -> None:
        """Raises QueueFull. An empty queue takes a prompt of any length."""
        if (
            self.max_tokens is not None
            and num_waiting_tokens
            and num_waiting_tokens + num_new > self.max_tokens
        ):
            raise QueueFull(
                f"{num_waiting_tokens} prompt tokens are waiting and {num_new} more would pass {self.max_tokens}: "
                "try again later, or raise max_queue_tokens"
            )
