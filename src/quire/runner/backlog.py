"""Backlog: what must be done before a pass, in order. What did not fit the device's memory waits for the next."""

from collections import deque
from collections.abc import Callable


class PendingWork:
    """Work that is never lost: whoever raises is done again before anything that was added later."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        """It may be called again where it raised, so it must not mind having come halfway."""
        self._work.append(work)

    def do(self) -> None:
        """All of it, or up to the first that raises."""
        while self._work:
            self._work[0]()
            self._work.popleft()
