"""Beam search at commit: turns candidates into the next beams and hypotheses, and finished searches into updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.core.request import FinishReason, Phase, Request
from quire.core.request import Sequence as Beam
from quire.core.step import SequenceUpdate, StepResult, TokenLogprobs
from quire.engine.structured import StructuredOutputs
from quire.grammar.matcher import GrammarError, Matcher
from quire.scheduler.plan import ScheduledStep
from quire.scheduler.running import Branch
from quire.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Token:
    """A linked list of an output's tokens: outputs with a common beginning share it."""

    before: "Token | None"
    entry: TokenLogprobs
    count: int  # tokens of the output so far


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam with one more token."""

    beam: Beam
    token_id: int
    score: float  # log probability of the whole output
    rank: int  # of the token among this beam's candidates
    logprobs: TokenLogprobs | None  # the best tokens at this position, if asked for
    matcher: Matcher | None = None  # after this token; None without a grammar, or for an end token

    @property
    def is_whole(self) -> bool:
        """Whether the grammar allows nothing to follow."""
        return self.matcher is not None and self.matcher.is_terminated

    def token(self, tokens: Mapping[int, Token | None]) -> Token:
        before = tokens.get(id(self.beam))
        top_ids = self.logprobs.top_ids if self.logprobs is not None else ()
        top_logprobs = self.logprobs.top_logprobs if self.logprobs is not None else ()
        logprob = self.score - self.beam.score
        entry = TokenLogprobs(self.token_id, logprob, self.rank, top_ids, top_logprobs)
        return Token(before, entry, before.count + 1 if before is not None else 1)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output that has ended."""

    value: float  # its score under the length penalty: what hypotheses are compared by
    last: Token | None
    finish_reason: FinishReason
    stop_reason: int | None

    def entries(self) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        token = self.last
        while token is not None:
            entries.append(token.entry)
            token = token.before
        return entries[::-1]


class Hypotheses:
    """The best `width` outputs that have ended, best first. Decides which candidates continue, which end, and when the
    search is over, as `transformers` does.
    """

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._request = request
        self._width = sampling.num_sequences
        self._penalty = sampling.length_penalty
        # one beam is greedy search, which ends at the first end
        self._ends_when_full = sampling.early_stopping is True or self._width == 1
        self._waits_for_the_best = sampling.early_stopping == "never"
        self.best: list[Hypothesis] = []

    def choose(self, candidates: list[Candidate], tokens: Mapping[int, Token | None]) -> list[Candidate]:
        """The candidates that continue, best first; none when the search is over. `candidates` are best first.

        Only the first `width` may end; the others are there to replace the ones that did.
        """
        request = self._request
        length = len(candidates[0].beam.token_ids) + 1 if candidates else request.max_len
        is_last = length >= request.max_len
        going_on = []
        for position, candidate in enumerate(candidates):
            stops = candidate.token_id in request.stop_token_ids or candidate.is_whole
            if (stops or is_last) and position < self._width:
                self._add(candidate, candidate.token(tokens), stops)
            elif not (stops or is_last):
                going_on.append(candidate)
        going_on = going_on[: self._width]
        return [] if self._is_over(going_on, length - request.num_prompt_tokens) else going_on

    def _add(self, candidate: Candidate, token: Token, stops: bool) -> None:
        named = stops and candidate.token_id in self._request.sampling.stop_token_ids
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        value = self._value(candidate.score, token.count)
        self.best.append(Hypothesis(value, token, reason, candidate.token_id if named else None))
        self.best.sort(key=lambda hypothesis: -hypothesis.value)  # stable: ties stay with the earlier one
        del self.best[self._width :]

    def _is_over(self, going_on: list[Candidate], num_outputs: int) -> bool:
        if not going_on:
            return True
        if len(self.best) < self._width:
            return False
        if self._ends_when_full:
            return True
        if self._waits_for_the_best and self._penalty > 0.0:
            num_outputs = self._request.max_len - self._request.num_prompt_tokens
        return self._value(going_on[0].score, num_outputs) <= self.best[-1].value

    def _value(self, score: float, num_outputs: int) -> float:
        return float(score / num_outputs**self._penalty)


class _Search:
    """One request's search: finished hypotheses, and candidates for the next position."""

    def __init__(self, request: Request) -> None:
        self.hypotheses = Hypotheses(request)
        self.tokens: dict[int, Token | None] = {}  # by a live beam's id(): the last token of its output
        self.candidates: dict[int, list[Candidate]] = {}  # by the same: continuations of each beam


class BeamSearches:
    """Beams of a request may be computed in several steps: the next beams are chosen when all have candidates.

    Each step returns the best candidates over the beams that it computed. A candidate among the best over all beams is
    among the best of its step, so joining the steps' candidates loses nothing.
    """

    def __init__(self, scheduler: Scheduler, structured: StructuredOutputs) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self.searches: dict[str, _Search] = {}  # by request id

    def forget(self, request_id: str) -> None:
        self.searches.pop(request_id, None)

    def commit(
        self,
        scheduled: ScheduledStep,
        result: StepResult,
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]],
        fail: Callable[[Beam, str], list[SequenceUpdate]],
    ) -> list[SequenceUpdate]:
        """Updates of the searches that ended; unfinished ones give none. `fail` ends a beam's request."""
        updates: list[SequenceUpdate] = []
        for beam_set, candidates in zip(scheduled.step.beams, result.beams, strict=True):
            beams = {index: scheduled.receivers[index] for index in beam_set.samples}
            beams = {index: beam for index, beam in beams.items() if _is_current(scheduled, index)}
            if not beams:
                continue
            request = next(iter(beams.values())).request
            search = self.searches.get(request.request_id)
            if search is None:
                search = self.searches[request.request_id] = _Search(request)
            for beam in beams.values():
                search.candidates[id(beam)] = []
            triples = zip(candidates.samples, candidates.token_ids, candidates.scores, strict=True)
            for index, token_id, score in triples:
                if index in beams and score > float("-inf"):
                    beam, logprobs = beams[index], result.logprobs[index] if result.logprobs else None
                    following = search.candidates[id(beam)]
                    following.append(Candidate(beam, token_id, score, len(following) + 1, logprobs))
            try:
                updates += self._go_on(request, search, prompt_logprobs.get(request.request_id, ()))
            except GrammarError as error:
                updates += fail(next(iter(beams.values())), str(error))
        return updates

    def _go_on(
        self, request: Request, search: _Search, prompt_logprobs: Sequence[TokenLogprobs]
    ) -> list[SequenceUpdate]:
        beams = self._scheduler.beams(request.request_id)
        if any(id(beam) not in search.candidates for beam in beams):
            return []
        joined = [candidate for beam in beams for candidate in search.candidates[id(beam)]]
        joined.sort(key=lambda c: -c.score)  # stable: ties stay with the better beam, then the lower id
        if request.sampling.structured is not None:
            joined = [self._matched(candidate) for candidate in joined]
        chosen = search.hypotheses.choose(joined, search.tokens)
        if not chosen:
            self._scheduler.abort(request.request_id, FinishReason.STOP)
            self.searches.pop(request.request_id, None)
            return _final(request, search.hypotheses.best, beams[0].num_cached, prompt_logprobs)
        tokens = [candidate.token(search.tokens) for candidate in chosen]
        beams = self._scheduler.branch([Branch(c.beam, c.token_id, c.score) for c in chosen])
        matchers = [candidate.matcher for candidate in chosen if candidate.matcher is not None]
        if matchers:
            self._structured.branched(beams, matchers)
        search.tokens = {id(beam): token for beam, token in zip(beams, tokens, strict=True)}
        search.candidates = {}
        return []

    def _matched(self, candidate: Candidate) -> Candidate:
        """With its state of the grammar. An end token has none: it is not part of the text."""
        if candidate.token_id in candidate.beam.request.stop_token_ids:
            return candidate
        return replace(candidate, matcher=self._structured.continued(candidate.beam, candidate.token_id))


def _is_current(scheduled: ScheduledStep, index: int) -> bool:
    """Whether the sample continues its beam as it is now: not if the beam has ended or advanced meanwhile."""
    beam, step = scheduled.receivers[index], scheduled.step
    source = step.sample_sources[index]
    length = step.num_computed[source] + step.num_tokens[source]
    return beam.phase is not Phase.FINISHED and length == len(beam.token_ids)


def _final(
    request: Request, best: list[Hypothesis], num_cached: int, prompt_logprobs: Sequence[TokenLogprobs]
) -> list[SequenceUpdate]:
    """Best first. If bans left fewer hypotheses than were asked for, the others are empty."""
    updates = []
    for index in range(request.sampling.num_answers):
        empty = Hypothesis(0.0, None, FinishReason.LENGTH, None)
        hypothesis = best[index] if index < len(best) else empty
        entries = hypothesis.entries()
        updates.append(
            SequenceUpdate(
                request.request_id,
                index,
                tuple(entry.token_id for entry in entries),
                tuple(entries) if request.sampling.logprobs is not None else (),
                tuple(prompt_logprobs)
                if request.sampling.prompt_logprobs is not None and index == 0
                else None,
                hypothesis.finish_reason,
                hypothesis.stop_reason,
                num_cached,
            )
        )
    return updates
