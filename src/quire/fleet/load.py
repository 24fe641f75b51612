"""Load: the router's account of one replica."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from quire.core.stats import RoutingStats
from quire.fleet.prefixes import PrefixShadow

OPEN_TOKENS = 100  # the work of an open request's answer, in prompt tokens
MAX_ADAPTERS = 256


@dataclass(slots=True)
class Load:
    shadow: PrefixShadow
    stats: RoutingStats = field(default_factory=RoutingStats)
    # moments of the shadow: their prompts are not computed yet
    computing: set[int] = field(default_factory=set)
    last_sent: int = 0  # number of the request that it got last
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)  # that it used, the last ones

    def use_adapter(self, name: str) -> None:
        self.adapters[name] = None
        self.adapters.move_to_end(name)
        if len(self.adapters) > MAX_ADAPTERS:
            self.adapters.popitem(last=False)

    def forget_cache(self) -> None:
        """Its process ended, and its cache with it."""
        self.shadow.clear()
        self.adapters.clear()

    def described(self) -> dict[str, Any]:
        """For operators."""
        return {
            "requests_routed": self.stats.num_routed,
            "requests_open": self.stats.num_open,
            "pending_tokens": self.stats.pending_tokens,
            "handed_over_tokens": self.stats.handed_over,
            "cached_tokens_known": self.shadow.num_tokens,
        }
