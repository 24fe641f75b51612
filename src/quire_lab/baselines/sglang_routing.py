"""SGLang's cache-aware routing rule, for comparison: thresholds on hit rate and on open requests.

As in the head of `cache_aware.rs` with the defaults of sglang-router 0.3.2, over pieces of tokens instead of
characters. Its trees are a history of what was sent: they do not know what a replica evicted.
"""

from collections.abc import Sequence

from quire.fleet.load import Load

MIN_HIT_RATE = 0.3
BALANCE_DIFFERENCE, BALANCE_RATIO = 64, 1.5  # of open requests: beyond both, the fewest count
TREE_TOKENS = 1 << 24  # of the 2**26 characters that a tree may hold


def costs(loads: Sequence[Load], num_tokens: int, cached: Sequence[int]) -> Sequence[float]:
    """Busy replicas: the fewest open requests. A good match: the best one. Else the smallest tree."""
    num_open = [load.stats.num_open for load in loads]
    most, fewest = max(num_open), min(num_open)
    if most - fewest > BALANCE_DIFFERENCE and most > BALANCE_RATIO * fewest:
        return num_open
    if max(cached) > MIN_HIT_RATE * num_tokens:
        return [-known for known in cached]
    return [load.shadow.num_tokens for load in loads]
