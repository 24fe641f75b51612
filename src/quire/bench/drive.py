"""Drives an engine with requests of given lengths and records every step."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.bench.workload import Lengths
from quire.core.errors import QuireError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import Built
from quire.engine.engine import Engine
from quire.text.answer import Answer
from quire.text.load import load_tokenizer
from quire.text.tokenizer import Tokenizer

SAMPLINGS = ("greedy", "random", "mixed")
_MARGIN = 10  # without a tokenizer, special tokens are most likely at either end of the vocabulary


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds since the request's arrival."""

    first_token: float
    last_token: float
    num_output_tokens: int

    @property
    def per_token(self) -> float | None:
        """TPOT, (end to end − first token) / (outputs − 1), as everywhere; one token has none."""
        if self.num_output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class Watched:
    """The record of one run; all times in seconds."""

    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    step_seconds: list[float] = field(default_factory=list)  # wall time from one step to the next
    schedule_seconds: list[float] = field(default_factory=list)  # of each step
    commit_seconds: list[float] = field(default_factory=list)  # of each step
    num_running: list[int] = field(default_factory=list)  # sequences, after each step
    requests: list[RequestTimes] = field(default_factory=list)  # in the order of finishing
    gap_seconds: list[float] = field(default_factory=list)  # between a sequence's tokens


class Bench:
    """A built engine and what is needed to make requests for it."""

    def __init__(self, built: Built, seed: int = 0) -> None:
        self.engine: Engine = built.engine
        self.built = built
        self.tokenizer: Tokenizer | None = load_tokenizer(built.source)
        self._random = random.Random(seed)
        self._token_ids = plain_token_ids(built, self.tokenizer)
        self._num_sent = 0

    def requests(self, lengths: Sequence[Lengths], sampling: str = "greedy") -> list[BenchRequest]:
        """Prompts of random ordinary tokens; `ignore_eos` gives every answer its exact length."""
        return [
            BenchRequest(
                self._random.choices(self._token_ids, k=length.num_prompt_tokens),
                _sampling(sampling, index, length.num_output_tokens),
            )
            for index, length in enumerate(lengths)
        ]

    def serve(
        self, requests: Sequence[BenchRequest], on_finish: Callable[[], None] = lambda: None
    ) -> Watched:
        """All at once, to the last token; text is made as `LLM.generate` would make it."""
        watched = Watched(num_requests=len(requests))
        preemptions = self.engine.scheduler.stats.num_preemptions
        started = self.engine.clock()
        answers = self._submit(requests)
        last_token: dict[str, float] = {}
        while self.engine.has_work:
            self._step(watched, answers, last_token, on_finish)
        watched.seconds = self.engine.clock() - started
        watched.num_preemptions = self.engine.scheduler.stats.num_preemptions - preemptions
        watched.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return watched

    def _submit(self, requests: Sequence[BenchRequest]) -> dict[str, Answer]:
        answers = {}
        for request in requests:
            request_id = f"bench-{self._num_sent}"
            self._num_sent += 1
            self.engine.add(Request(request_id, request.prompt_token_ids, request.sampling))
            answers[request_id] = Answer(
                request_id, request.sampling, self.tokenizer, clock=self.engine.clock
            )
        return answers

    def _step(
        self,
        watched: Watched,
        answers: dict[str, Answer],
        last_token: dict[str, float],
        on_finish: Callable[[], None],
    ) -> None:
        stats = self.engine.stats
        schedule, commit, started = stats.schedule_seconds, stats.commit_seconds, self.engine.clock()
        updates = self.engine.step()
        watched.schedule_seconds.append(stats.schedule_seconds - schedule)
        watched.commit_seconds.append(stats.commit_seconds - commit)
        watched.num_running.append(len(self.engine.scheduler.running))
        now = self.engine.clock()
        for update in updates:
            answer = answers[update.request_id]
            answer.take(update)
            watched.num_output_tokens += len(update.token_ids)
            if update.request_id in last_token:
                watched.gap_seconds.append(now - last_token[update.request_id])
            last_token[update.request_id] = now
            if answer.finished:
                watched.requests.append(_times(answer))
                on_finish()
        watched.step_seconds.append(self.engine.clock() - started)


def _times(answer: Answer) -> RequestTimes:
    if answer.fault is not None:
        raise answer.fault
    if answer.first_token is None or answer.last_token is None:
        raise QuireError(f"request {answer.request_id} ended without a token")
    num_tokens = len(answer.sequences[0].token_ids)
    return RequestTimes(answer.first_token - answer.arrival, answer.last_token - answer.arrival, num_tokens)


def plain_token_ids(built: Built, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of ordinary tokens: none that is special, ends a sequence, or that the tokenizer does not know."""
    size = built.model.vocab_size
    unwanted = set(built.engine.limits.eos_token_ids) | set(built.model.eos_token_ids)
    if built.model.bos_token_id is not None:
        unwanted.add(built.model.bos_token_id)
    if tokenizer is None:
        return [i for i in range(min(_MARGIN, size - 1), max(size - _MARGIN, 1)) if i not in unwanted]
    unwanted |= tokenizer.special_ids
    return [i for i in range(min(size, tokenizer.vocab_size)) if i not in unwanted]


def _sampling(kind: str, index: int, num_tokens: int) -> SamplingParams:
    """`mixed` is half greedy, half sampled, as in the comparisons with other engines."""
    sampled = kind == "random" or (kind == "mixed" and index % 2 == 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=index)
    return greedy.changed(temperature=0.8, top_p=0.95) if sampled else greedy
