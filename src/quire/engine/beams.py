"""Beam search at commit: turns candidates into the next beams and hypotheses, and finished searches into updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quire.core.request import FinishReason, Phase, Request
from quire.core.request import Sequence as Beam
from quire.core.step import SequenceUpdate, StepResult, TokenLogprobs
from quire.engine.hypotheses import Candidate, Hypotheses, Hypothesis, Token
from quire.engine.structured import StructuredOutputs
from quire.grammar.errors import GrammarError
from quire.scheduler.plan import ScheduledStep
from quire.scheduler.running import Branch
from quire.scheduler.scheduler import Scheduler


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

    def __init__(
        self,
        scheduler: Scheduler,
        structured: StructuredOutputs,
        fail: Callable[[Beam, str], list[SequenceUpdate]],  # ends a beam's request
    ) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self._fail = fail
        self.searches: dict[str, _Search] = {}  # by request id

    def forget(self, request_id: str) -> None:
        self.searches.pop(request_id, None)

    def commit(
        self,
        scheduled: ScheduledStep,
        result: StepResult,
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]],
    ) -> list[SequenceUpdate]:
        """Updates of the searches that ended; unfinished ones give none."""
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
                updates += self._fail(next(iter(beams.values())), str(error))
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
