"""Routing policies by name: functions that give the cost of sending a request to each replica."""

from collections.abc import Callable, Sequence

from quire.core.errors import ConfigError
from quire.fleet.load import OPEN_TOKENS, Load

Costs = Callable[[Sequence[Load], int, Sequence[int]], Sequence[float]]
"""(loads, tokens of the prompt, how many of them each replica is thought to have cached) → a cost for each replica.

The lowest cost wins; of equal ones the replica whose last request lies back furthest.
"""


def prefix_work(loads: Sequence[Load], num_tokens: int, cached: Sequence[int]) -> Sequence[float]:
    """What a replica has to compute, and what this request adds there.

    A miss costs its prefill now. In a full cache it also evicts as many tokens, which another request has to compute
    again, so it counts twice there; in a cache with room it counts less, which spreads prefixes while there is room.
    There is no threshold on the hit rate: a cached prefix is worth the tokens that it saves and no more.
    """
    return [
        work + (1.0 + load.shadow.share_filled(num_tokens - known)) * (num_tokens - known)
        for work, load, known in zip(least_work(loads, num_tokens, cached), loads, cached, strict=True)
    ]


def least_work(loads: Sequence[Load], _num_tokens: int, _cached: Sequence[int]) -> Sequence[float]:
    """The fewest prompt tokens still to compute; answers count as some more."""
    return [load.stats.pending_tokens + OPEN_TOKENS * load.stats.num_open for load in loads]


def least_requests(loads: Sequence[Load], _num_tokens: int, _cached: Sequence[int]) -> Sequence[float]:
    """The fewest open requests."""
    return [load.stats.num_open for load in loads]


def round_robin(loads: Sequence[Load], _num_tokens: int, _cached: Sequence[int]) -> Sequence[float]:
    """Replicas in turn."""
    return [load.last_sent for load in loads]


POLICIES: dict[str, Costs] = {
    "prefix-work": prefix_work,
    "least-work": least_work,
    "least-requests": least_requests,
    "round-robin": round_robin,
}
DEFAULT = "prefix-work"
_OTHERS = {"cache_aware": "prefix-work", "round_robin": "round-robin", "least_requests": "least-requests"}


def find_policy(name: str) -> Costs:
    """ConfigError for a name that is not known. SGLang's and vLLM's names are understood."""
    name = _OTHERS.get(name, name)
    if name not in POLICIES:
        raise ConfigError(f"the routing policy {name!r} is not known: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
