"""Least requests: the replica with the fewest open requests."""

from collections.abc import Sequence

from quire.fleet.load import Load


def costs(loads: Sequence[Load], _num_tokens: int, _cached: Sequence[int]) -> Sequence[float]:
    return [load.stats.num_open for load in loads]
