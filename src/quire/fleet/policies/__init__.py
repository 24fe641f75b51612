"""Routing policies by name. Each is a file with one function: the cost of sending a request to each replica."""

from collections.abc import Callable, Sequence

from quire.core.errors import ConfigError
from quire.fleet.load import Load
from quire.fleet.policies import least_requests, least_work, prefix_work, round_robin

Costs = Callable[[Sequence[Load], int, Sequence[int]], Sequence[float]]
"""(loads, tokens of the prompt, how many of them each replica is thought to have cached) → a cost for each replica.

The lowest cost wins; of equal ones the replica whose last request lies back furthest.
"""

POLICIES: dict[str, Costs] = {
    "prefix-work": prefix_work.costs,
    "least-work": least_work.costs,
    "least-requests": least_requests.costs,
    "round-robin": round_robin.costs,
}
DEFAULT = "prefix-work"
_OTHERS = {"cache_aware": "prefix-work", "round_robin": "round-robin", "least_requests": "least-requests"}


def find_policy(name: str) -> Costs:
    """ConfigError for a name that is not known. SGLang's and vLLM's names are understood."""
    name = _OTHERS.get(name, name)
    if name not in POLICIES:
        raise ConfigError(f"the routing policy {name!r} is not known: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
