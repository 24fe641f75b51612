"""Clocks: what the engine and its drivers ask for the time. Wall time, or time that only a simulation passes."""

from collections.abc import Callable

Clock = Callable[[], float]  # seconds since any fixed moment


class VirtualClock:
    """Stands still until somebody moves it on; reading it costs nothing and moves nothing."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance_to(self, moment: float) -> None:
        """A moment that has passed already changes nothing."""
        if moment > self._now:
            self._now = moment
