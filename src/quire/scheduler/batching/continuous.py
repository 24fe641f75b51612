"""Continuous batching (Orca's iteration-level scheduling): whoever waits joins at the next step."""

from quire.scheduler.queue import WaitingQueue


class ContinuousBatching:
    """A row is free for the next request as soon as its sequence is known to have ended."""

    keeps_ended = False

    def room(self, waiting: WaitingQueue, idle: bool) -> int:
        return len(waiting)

    def admitted(self) -> None:
        """There is no batch to count."""

    def close(self) -> None:
        """There is no batch to close: the next step asks again."""

    def is_open(self, waiting: WaitingQueue) -> bool:
        return True

    def starts_at(self, waiting: WaitingQueue) -> float | None:
        return None
