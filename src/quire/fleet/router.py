"""Router: which replica gets a request, and the account of what each of them has to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.fleet.load import Load
from quire.fleet.policies import Costs
from quire.fleet.prefixes import PIECE, Prefix, PrefixShadow

HAND_OVER_TOKENS = 64  # a prompt with fewer uncached tokens is not worth two requests
MISSING_ADAPTER = 256  # tokens that loading an adapter counts as


@dataclass(slots=True)
class _Routed:
    """An open request."""

    replica: int
    prefix: Prefix
    num_known: int  # pieces that were thought to be cached
    num_uncached: int  # tokens; 0 once its first token came
    used: Sequence[int]  # when each known piece was last used before this request; 0: not computed then
    moment: int  # of this request in the shadow


class Router:
    """For one event loop: no call waits. Replicas have numbers from 0 on."""

    def __init__(self, costs: Costs, max_tokens: Sequence[int], is_guess: bool = False) -> None:
        """`max_tokens` is the size of each replica's prefix cache; `is_guess`: it is not known."""
        self.loads = [Load(PrefixShadow(size, is_guess)) for size in max_tokens]
        self._costs = costs
        self._routed: dict[str, _Routed] = {}
        self._num_sent = 0

    def order(self, prefix: Prefix, candidates: Sequence[int]) -> list[int]:
        """The candidates, the best first."""
        if len(candidates) < 2:
            return list(candidates)
        loads = [self.loads[replica] for replica in candidates]
        cached = [self._cached(load, prefix) for load in loads]
        costs = self._costs(loads, prefix.num_tokens, cached)
        ranked = sorted(zip(costs, [load.last_sent for load in loads], candidates, strict=True))
        return [replica for _cost, _last, replica in ranked]

    def _cached(self, load: Load, prefix: Prefix) -> int:
        """Tokens that need no work there. A missing adapter is work too, so the number may be negative."""
        missing = prefix.adapter is not None and prefix.adapter not in load.adapters
        return prefix.tokens_of(load.shadow.match(prefix.hashes)) - MISSING_ADAPTER * missing

    def sent(self, request_id: str, prefix: Prefix, replica: int) -> None:
        load = self.loads[replica]
        used = load.shadow.add(prefix.hashes)
        known, moment = len(used), load.shadow.now
        used = [0 if before in load.computing else before for before in used]
        uncached = max(0, prefix.num_tokens - prefix.tokens_of(known))
        self._routed[request_id] = _Routed(replica, prefix, known, uncached, used, moment)
        self._num_sent += 1
        load.last_sent = self._num_sent
        load.stats.num_routed += 1
        load.stats.num_open += 1
        load.stats.pending_tokens += uncached
        load.computing.add(moment)
        if prefix.adapter is not None:
            load.use_adapter(prefix.adapter)

    def first_token(self, request_id: str, num_cached: int | None = None) -> None:
        """The prompt is computed. `num_cached` is what the replica had of it, where it says so: less than the shadow
        has means that it evicted those pieces, and all that it used before them.
        """
        routed = self._routed.get(request_id)
        if routed is None:
            return
        load = self.loads[routed.replica]
        load.stats.pending_tokens -= routed.num_uncached
        routed.num_uncached = 0
        load.computing.discard(routed.moment)
        if num_cached is None or not routed.num_known:
            return
        # a replica computes the last block of a prompt although it has it
        num_found = next(
            (n for n in range(routed.num_known) if routed.prefix.tokens_of(n + 1) > num_cached + PIECE),
            routed.num_known,
        )
        if num_found < routed.num_known:
            load.shadow.drop_until(routed.used[num_found])

    def prefills_elsewhere(self, prefix: Prefix, replica: int) -> bool:
        """Whether so little of the prompt is cached there that a prefill replica should compute it first."""
        known = prefix.tokens_of(self.loads[replica].shadow.match(prefix.hashes))
        return prefix.num_tokens - known > HAND_OVER_TOKENS

    def known_tokens(self, request_id: str) -> int:
        """Tokens of an open request that its replica was thought to have."""
        routed = self._routed.get(request_id)
        return 0 if routed is None else routed.prefix.tokens_of(routed.num_known)

    def ended(self, request_id: str) -> None:
        """Whether it was answered, refused or aborted."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            load = self.loads[routed.replica]
            load.stats.num_open -= 1
            load.stats.pending_tokens -= routed.num_uncached
            load.computing.discard(routed.moment)

    def replica_of(self, request_id: str) -> int | None:
        """Where an open request is."""
        routed = self._routed.get(request_id)
        return None if routed is None else routed.replica
