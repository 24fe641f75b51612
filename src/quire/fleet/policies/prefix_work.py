"""Prefix-aware work: what a replica has to compute, and twice what this request adds there.

Twice, since a miss costs its prefill now and evicts as many tokens, which another request has to compute again. A
threshold on the hit rate is not needed: a cached prefix is worth the tokens that it saves and no more.
"""

from collections.abc import Sequence

from quire.fleet.load import OPEN_TOKENS, Load

MISS = 2.0


def costs(loads: Sequence[Load], num_tokens: int, cached: Sequence[int]) -> Sequence[float]:
    return [
        load.pending_tokens + OPEN_TOKENS * load.num_open + MISS * (num_tokens - known)
        for load, known in zip(loads, cached, strict=True)
    ]
