"""VirtualClock: the time of a simulated device."""


class VirtualClock:
    """Stands still until `advance_to` is called."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance_to(self, moment: float) -> None:
        """A moment in the past changes nothing."""
        if moment > self._now:
            self._now = moment
