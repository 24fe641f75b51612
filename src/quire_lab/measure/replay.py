"""Replays arrivals on a simulated device, in virtual time: hours of requests in seconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from quire.bench.report import percentile
from quire.bench.workload import Lengths
from quire.core.errors import ConfigError, InvalidRequest
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.build import Built
from quire_lab.simulate.clock import VirtualClock

TOKEN = 7  # prompts say nothing: no prefix is looked for, and only their length costs


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds from the start
    lengths: Lengths
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request that was answered; moments are on the virtual clock. Beams are told at their end only."""

    arrival: float
    first_token: float
    last_token: float
    num_output_tokens: int  # of one sequence

    @property
    def normalised(self) -> float:
        """Seconds per output token, from arrival to the last one: the papers' normalised latency."""
        return (self.last_token - self.arrival) / self.num_output_tokens

    @property
    def time_to_first(self) -> float:
        return self.first_token - self.arrival

    @property
    def per_token(self) -> float:
        """TPOT; an answer of one token has none and waits for nothing."""
        return (self.last_token - self.first_token) / max(1, self.num_output_tokens - 1)


@dataclass(slots=True)
class Average:
    """Over virtual time."""

    total: float = 0.0
    seconds: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        self.total += value * seconds
        self.seconds += seconds

    @property
    def mean(self) -> float:
        return self.total / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Drained:
    """When the queue became empty after the last arrival, and what had been done until then."""

    seconds: float
    num_tokens: int  # of one sequence of each request, ended or not


@dataclass(slots=True)
class Replayed:
    served: list[ReplayedRequest] = field(default_factory=list)  # in the order of finishing
    num_refused: int = 0  # can never run: longer than the context or the pool
    seconds: float = 0.0  # virtual, to the last token
    num_steps: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0  # of all sequences
    arriving: Average = field(default_factory=Average)  # running requests, until the last one came
    waiting: Average = field(default_factory=Average)  # the same, while the queue was not empty
    drained: Drained | None = None  # None: the queue was never empty to the end, or always

    @property
    def normalised(self) -> float:
        """Mean, as the papers have it."""
        return sum(one.normalised for one in self.served) / max(1, len(self.served))

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def capacity(self) -> float:
        """Requests per second that are served while a queue is never empty: at a higher rate it grows without end."""
        if self.drained is None:
            return len(self.served) / self.seconds if self.seconds else 0.0
        mean = sum(one.num_output_tokens for one in self.served) / max(1, len(self.served))
        return self.drained.num_tokens / mean / self.drained.seconds

    def percentile(self, of: Callable[[ReplayedRequest], float], percent: float) -> float:
        return percentile(sorted(map(of, self.served)), percent) if self.served else 0.0


@cache
def plain(num_tokens: int) -> SamplingParams:
    """One sequence that runs to its length."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


class Replay:
    """One run: requests enter at their moments, the engine steps, nothing waits for real."""

    def __init__(
        self,
        built: Built,
        arrivals: Sequence[Arrival],
        sampling: Callable[[int], SamplingParams] = plain,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """`sampling` makes the parameters for an answer's length. Arrivals are in the order of their moments."""
        if not isinstance(built.engine.clock, VirtualClock):
            raise ConfigError(
                "arrivals are replayed in virtual time: build the engine with device='simulated'"
            )
        self._engine, self._clock = built.engine, built.engine.clock
        self._arrivals, self._sampling, self._on_finish = arrivals, sampling, on_finish
        self._next = 0
        self._open: dict[str, _Open] = {}
        self._several = sampling(1 << 10).num_sequences > 1
        self.result = Replayed()

    def run(self) -> Replayed:
        engine, clock, result = self._engine, self._clock, self.result
        preemptions, steps, started = engine.scheduler.stats.num_preemptions, engine.stats.num_steps, clock()
        self._start = started
        while self._next < len(self._arrivals) or engine.has_work:
            if not engine.has_work:
                clock.advance_to(started + self._arrivals[self._next].at)
            self._admit(clock() - started)
            before = clock()
            updates = engine.step()
            self._average(clock() - before)
            self._take(updates, clock())
        result.seconds = clock() - started
        result.num_steps = engine.stats.num_steps - steps
        result.num_preemptions = engine.scheduler.stats.num_preemptions - preemptions
        return result

    def _admit(self, now: float) -> None:
        """Everyone who has come by now. One who arrived during a step waited from his own moment on."""
        arrivals = self._arrivals
        while self._next < len(arrivals) and arrivals[self._next].at <= now:
            arrival = arrivals[self._next]
            request_id = str(self._next)
            self._next += 1
            sampling = self._sampling(arrival.lengths.num_output_tokens)
            try:
                prompt = [TOKEN] * arrival.lengths.num_prompt_tokens
                self._engine.add(Request(request_id, prompt, sampling, adapter=arrival.adapter))
            except InvalidRequest:
                self.result.num_refused += 1
                self._on_finish()
                continue
            self._open[request_id] = _Open(self._start + arrival.at, sampling.num_answers)

    def _average(self, seconds: float) -> None:
        scheduler = self._engine.scheduler
        running = scheduler.running
        count = len({id(s.request) for s in running}) if self._several else len(running)
        if self._next < len(self._arrivals):
            self.result.arriving.add(count, seconds)
        if len(scheduler.waiting):
            self.result.waiting.add(count, seconds)
        elif (
            self._next == len(self._arrivals) and self.result.drained is None and self.result.waiting.seconds
        ):
            begun = {s.request.request_id: s.num_outputs for s in running}
            done = sum(request.num_output_tokens for request in self.result.served) + sum(begun.values())
            self.result.drained = Drained(self._clock() - self._start, done)

    def _take(self, updates: Iterable[SequenceUpdate], now: float) -> None:
        result = self.result
        for update in updates:
            request = self._open[update.request_id]
            count = len(update.token_ids)
            result.num_output_tokens += count
            if count and request.first_token is None:
                request.first_token = now
            if update.index == 0:
                request.num_tokens += count
            if update.finish_reason is None:
                continue
            request.num_left -= 1
            if not request.num_left:
                del self._open[update.request_id]
                first = request.first_token if request.first_token is not None else now
                result.served.append(ReplayedRequest(request.arrival, first, now, max(1, request.num_tokens)))
                self._on_finish()


@dataclass(slots=True)
class _Open:
    arrival: float
    num_left: int  # sequences
    first_token: float | None = None
    num_tokens: int = 0
