"""Prefix-aware work: what a replica has to compute, and what this request adds there.

A miss costs its prefill now. In a full cache it also evicts as many tokens, which another request has to compute again,
so it counts twice there; in a cache with room it counts less, which spreads prefixes while there is room. There is no
threshold on the hit rate: a cached prefix is worth the tokens that it saves and no more.
"""

from collections.abc import Sequence

from quire.fleet.load import OPEN_TOKENS, Load


def costs(loads: Sequence[Load], num_tokens: int, cached: Sequence[int]) -> Sequence[float]:
    return [
        load.stats.pending_tokens
        + OPEN_TOKENS * load.stats.num_open
        + (1.0 + load.shadow.share_filled(num_tokens - known)) * (num_tokens - known)
        for load, known in zip(loads, cached, strict=True)
    ]
