"""Requests to models on groups of GPUs, in order of arrival: how many are answered in time, and how soon.

A group is a pipeline of stages, each with a clock that says when it is free for the next prompt. A request goes to the
group of its model where it would end soonest, and is refused on arrival where that is after its deadline. For models
with one pass this is AlpaServe's simulator. For models that generate, decoding with continuous batching is added:
between prompts, the requests that are open in a group advance together, one token each in a round of its models' steps.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.bench.workload import arrival_times

Trace = Sequence[tuple[float, int]]  # arrival and model, by arrival


class ParallelShape(NamedTuple):
    """Ranks that divide each layer, and stages that divide the layers."""

    tp: int
    pp: int

    @property
    def size(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"-tp {self.tp} -pp {self.pp}"


@dataclass(frozen=True, slots=True)
class ModelOnShape:
    """One model on one shape."""

    num_bytes: int  # of each GPU
    prompt: float  # seconds of each stage for a prompt
    further: int = 0  # tokens after the first
    # of one step with 1, 2, … requests: seconds until all have their token, and seconds of each stage that it takes
    steps: tuple[tuple[float, float], ...] = ()
    lone: float = 0.0  # seconds of a request that is alone


class Group(NamedTuple):
    """GPUs of one kind that serve some models together."""

    gpu: str
    shape: ParallelShape
    models: tuple[int, ...] = ()  # ascending


# by model; None: it cannot be served so
Table = Mapping[tuple[str, ParallelShape], Sequence[ModelOnShape | None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    num_requests: tuple[int, ...]  # by model
    num_served: tuple[int, ...]  # of these, in time
    seconds: float  # latencies of the served, together
    work: tuple[float, ...]  # by group: seconds that its first stage was busy

    @property
    def attainment(self) -> float:
        return sum(self.num_served) / sum(self.num_requests)

    @property
    def mean_latency(self) -> float:
        return self.seconds / max(1, sum(self.num_served))

    @property
    def score(self) -> tuple[int, float]:
        """More is better: requests in time, and among equals the shorter latency."""
        return sum(self.num_served), -self.seconds


def gamma_trace(
    rates: Sequence[float], cvs: Sequence[float], num_requests: int, seed: int
) -> list[tuple[float, int]]:
    """About `num_requests` in all. Gaps of a model are gamma distributed; cv 1: Poisson, more: bursts and pauses."""
    end = num_requests / sum(rates)
    trace = []
    for model, (rate, cv) in enumerate(zip(rates, cvs, strict=True)):
        chance = random.Random(f"{seed} {model}")
        first = chance.random() / rate  # models do not all begin at once
        count = int(rate * end * 1.5 + 20 * (1 + cv))
        times = (first + at for at in arrival_times(count, rate, cv**-2, chance))
        trace += [(at, model) for at in times if at < end]
    return sorted(trace)


class _State:
    """One group at one moment."""

    def __init__(self, group: Group, row: Sequence[ModelOnShape | None]) -> None:
        self.row = row
        self.clock = [0.0] * group.shape.pp  # when each stage is free for the next prompt
        self.now = 0.0  # until when rounds are counted
        self.rounds = 0.0  # of decoding, since the start
        self.round = 0.0  # seconds of one
        self.open: list[
            tuple[float, int, float, float]
        ] = []  # last round, model, arrival and what the stages add
        self.counts: dict[int, int] = {}  # of them, by model
        self.work = 0.0

    def advance(self, at: float, answered: list[tuple[int, float]]) -> None:
        """Decodes until `at`, between the prompts. `answered`: models and latencies of requests that end."""
        now = max(self.now, self.clock[0])
        while self.open and now < at:
            ends = now + (self.open[0][0] - self.rounds) * self.round
            if ends > at:
                self.rounds += (at - now) / self.round
                break
            self.rounds, model, arrived, added = heapq.heappop(self.open)
            now = ends
            answered.append((model, ends + added - arrived))
            self.counts[model] -= 1
            self.round = self.round_seconds()
        self.now = max(self.now, at)

    def round_seconds(self, more: int | None = None) -> float:
        """A token for each open request, and one of model `more`: the slowest model, or all that a stage computes."""
        longest = total = 0.0
        for model, count in self.counts.items():
            if model == more:
                count, more = count + 1, None
            if count:
                passed, taken = self._step(model, count)
                longest, total = max(longest, passed), total + taken
        if more is not None:
            passed, taken = self._step(more, 1)
            longest, total = max(longest, passed), total + taken
        return max(longest, total)

    def _step(self, model: int, count: int) -> tuple[float, float]:
        served = self.row[model]
        assert served is not None, "a group has models that fit it"
        most = len(served.steps)
        if count <= most:
            return served.steps[count - 1]
        passed, taken = served.steps[-1]  # more than fit at once take turns
        return passed * count / most, taken * count / most

    def prompt_end(self, at: float, seconds: float) -> float:
        now = max(at, self.clock[0]) + seconds
        for free in self.clock[1:]:
            now = max(now, free) + seconds
        return now

    def add(self, at: float, model: int, served: ModelOnShape, answered: list[tuple[int, float]]) -> None:
        now = at
        for stage, free in enumerate(self.clock):
            self.clock[stage] = now = max(now, free) + served.prompt
        self.work += served.prompt
        if not served.further:
            answered.append((model, now - at))
            return
        self.counts[model] = self.counts.get(model, 0) + 1
        self.round = self.round_seconds()
        self.work += served.further * served.steps[0][1]
        heapq.heappush(self.open, (self.rounds + served.further, model, at, now - self.clock[0]))


def simulate(trace: Trace, groups: Sequence[Group], table: Table, deadlines: Sequence[float]) -> Outcome:
    """Models that no group has are served nothing."""
    states = [_State(group, table[group.gpu, group.shape]) for group in groups]
    hosts: list[list[tuple[_State, ModelOnShape]]] = [[] for _ in deadlines]
    for state, group in zip(states, groups, strict=True):
        for model in group.models:
            served = state.row[model]
            assert served is not None, "a group has models that fit it"
            hosts[model].append((state, served))
    num_requests, num_served, seconds = [0] * len(deadlines), [0] * len(deadlines), 0.0
    answered: list[tuple[int, float]] = []
    for at, model in trace:
        num_requests[model] += 1
        chosen, soonest = None, at + deadlines[model]
        for state, served in hosts[model]:
            if state.open:
                state.advance(at, answered)
            end = state.prompt_end(at, served.prompt)
            if served.further:
                end += served.further * state.round_seconds(model)
            if end <= soonest:
                chosen, soonest = (state, served), end
        if chosen is not None:
            if not chosen[0].open:
                chosen[0].now = max(chosen[0].now, at)
            chosen[0].add(at, model, chosen[1], answered)
    for state in states:
        state.advance(math.inf, answered)
    for model, took in answered:
        if took <= deadlines[model]:
            num_served[model] += 1
            seconds += took
    return Outcome(tuple(num_requests), tuple(num_served), seconds, tuple(state.work for state in states))
