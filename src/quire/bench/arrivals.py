"""When requests arrive: all at once, at random with a given rate, or as a trace has them."""

import math
import random
from collections.abc import Sequence

from quire.core.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, source: random.Random) -> list[float]:
    """Seconds from the start. Gaps are gamma distributed with mean 1 / rate; at an infinite rate there are none.

    `burstiness` is the shape: 1 makes it a Poisson process, less makes bursts and pauses, more evens it out.
    """
    if not rate > 0:
        raise ConfigError(
            f"--request-rate {rate:g} is no rate: give requests per second, or inf for all at once"
        )
    if not burstiness > 0:
        raise ConfigError(f"--burstiness {burstiness:g} must be more than 0 (1: Poisson)")
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def replayed(timestamps: Sequence[float], speed: float) -> list[float]:
    """A trace's own times, from 0, `speed` times as fast."""
    if not speed > 0:
        raise ConfigError(f"--trace-speed {speed:g} must be more than 0 (2: twice as fast)")
    first = min(timestamps, default=0.0)
    return [(one - first) / speed for one in timestamps]
