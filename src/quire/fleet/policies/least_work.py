"""Least work: the replica with the fewest prompt tokens still to compute, its answers counted as some more."""

from collections.abc import Sequence

from quire.fleet.load import OPEN_TOKENS, Load


def costs(loads: Sequence[Load], _num_tokens: int, _cached: Sequence[int]) -> Sequence[float]:
    return [load.stats.pending_tokens + OPEN_TOKENS * load.stats.num_open for load in loads]
