"""Simulated replicas behind a router: engines on clocks of their own, of which the earliest always goes on."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from quire.bench.report import percentile
from quire.core.request import Request
from quire.core.step import SequenceUpdate
from quire.engine.build import Built
from quire.fleet.prefixes import Prefix, prefix_of
from quire.fleet.router import Router
from quire_lab.measure.replay import plain
from quire_lab.simulate.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, and what its client asks next."""

    at: float  # seconds from the start
    token_ids: Callable[[], Sequence[int]]  # made when it arrives: long traces have too many
    num_output_tokens: int
    follow: Callable[[float, Sequence[int]], "Turn | None"] = lambda _now, _answer: None
    """Given when the answer was complete and its tokens."""


@dataclass(slots=True)
class FleetResult:
    """What a run showed; times in seconds."""

    first_tokens: list[float] = field(default_factory=list)  # TTFT
    whole: list[float] = field(default_factory=list)  # end to end
    seconds: float = 0.0  # to the last token: the makespan
    hit_rate: float = 0.0  # of all prompt tokens
    num_output_tokens: int = 0
    max_share: float = 0.0  # of the busiest replica, over the mean: computed tokens

    @property
    def first_mean(self) -> float:
        return sum(self.first_tokens) / max(1, len(self.first_tokens))

    @property
    def first_p90(self) -> float:
        return percentile(sorted(self.first_tokens), 90)

    @property
    def whole_mean(self) -> float:
        return sum(self.whole) / max(1, len(self.whole))


@dataclass(slots=True)
class _Open:
    turn: Turn
    replica: int
    answer: list[int] = field(default_factory=list)


class Fleet:
    """Requests enter at their moments, through the router, as they do in a server; nothing waits for real."""

    def __init__(self, replicas: Sequence[Built], router: Router, corrects: bool = True) -> None:
        """`corrects`: whether the router hears how much of a prompt was cached."""
        self._engines = [built.engine for built in replicas]
        self._clocks: list[VirtualClock] = [built.engine.clock for built in replicas]  # type: ignore[misc]
        self._router = router
        self._corrects = corrects
        self._arrivals: list[tuple[float, int, Turn]] = []
        self._ids = count()
        self._open: dict[str, _Open] = {}
        self.result = FleetResult()

    def run(self, turns: Iterable[Turn], on_finish: Callable[[], None] = lambda: None) -> FleetResult:
        self._on_finish = on_finish
        for turn in turns:
            self._expect(turn)
        while True:
            busy = [index for index, engine in enumerate(self._engines) if engine.has_work]
            earliest = min(busy, key=lambda index: self._clocks[index](), default=None)
            if self._arrivals and (earliest is None or self._arrivals[0][0] <= self._clocks[earliest]()):
                at, _number, turn = heapq.heappop(self._arrivals)
                self._enter(at, turn)
            elif earliest is None:
                break
            else:
                self._take(self._engines[earliest].step(), self._clocks[earliest]())
        return self._finished()

    def _expect(self, turn: Turn) -> None:
        heapq.heappush(self._arrivals, (turn.at, next(self._ids), turn))

    def _enter(self, at: float, turn: Turn) -> None:
        request_id = str(next(self._ids))
        token_ids = array("i", turn.token_ids())
        prefix: Prefix = prefix_of(token_ids.tobytes())
        replica = self._router.order(prefix, range(len(self._engines)))[0]
        self._router.sent(request_id, prefix, replica)
        if not self._engines[replica].has_work:
            self._clocks[replica].advance_to(at)
        self._engines[replica].add(Request(request_id, token_ids, plain(turn.num_output_tokens)))
        self._open[request_id] = _Open(turn, replica)

    def _take(self, updates: Iterable[SequenceUpdate], now: float) -> None:
        result = self.result
        for update in updates:
            request = self._open[update.request_id]
            if update.token_ids and not request.answer:
                result.first_tokens.append(now - request.turn.at)
                cached = update.num_cached if self._corrects else None
                self._router.first_token(update.request_id, cached)
            request.answer += update.token_ids
            if update.finish_reason is None:
                continue
            del self._open[update.request_id]
            self._router.ended(update.request_id)
            result.whole.append(now - request.turn.at)
            result.num_output_tokens += len(request.answer)
            next_turn = request.turn.follow(now, request.answer)
            if next_turn is not None:
                self._expect(next_turn)
            self._on_finish()

    def _finished(self) -> FleetResult:
        result = self.result
        memories = [engine.memory.stats for engine in self._engines]
        queries = sum(stats.prefix_queries for stats in memories)
        result.hit_rate = sum(stats.prefix_hits for stats in memories) / max(1, queries)
        result.seconds = max(clock() for clock in self._clocks)
        computed = [engine.stats.num_computed_tokens for engine in self._engines]
        result.max_share = max(computed) * len(computed) / max(1, sum(computed))
        for engine in self._engines:
            engine.check_integrity()
        return result
