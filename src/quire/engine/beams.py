"""Beam search at commit: candidates become the next beams, hypotheses and, at the end, updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quire.core.request import FinishReason, Phase, Request
from quire.core.request import Sequence as Beam
from quire.core.step import SequenceUpdate, StepResult, TokenLogprobs
from quire.engine.hypotheses import Candidate, Hypotheses, Hypothesis, Token
from quire.engine.structured import StructuredOutputs
from quire.grammar.errors import GrammarError
from quire.scheduler.planned import ScheduledStep
from quire.scheduler.scheduler import Scheduler


class _Search:
    """One request's: what ended so far, and what is known of the position that is being decided."""

    def __init__(self, request: Request) -> None:
        self.hypotheses = Hypotheses(request)
        self.tokens: dict[int, Token | None] = {}  # by a live beam's id(): the last token of its output
        self.heard: dict[int, list[Candidate]] = {}  # by the same: how each beam could go on


class BeamSearches:
    """Beams of a request may be computed in several steps: the next ones are chosen when all were heard.

    Each step brings the best candidates over those of the beams that it computed. Whatever is among the best over all
    beams is among the best of its step, so joining the steps' candidates loses nothing.
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
        self._searches: dict[str, _Search] = {}

    def forget(self, request_id: str) -> None:
        self._searches.pop(request_id, None)

    def commit(
        self,
        planned: ScheduledStep,
        result: StepResult,
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]],
    ) -> list[SequenceUpdate]:
        """Updates of the requests whose search ended: partial hypotheses are not told."""
        updates: list[SequenceUpdate] = []
        for beam_set, candidates in zip(planned.step.beams, result.beams, strict=True):
            beams = {index: planned.receivers[index] for index in beam_set.samples}
            beams = {index: beam for index, beam in beams.items() if _is_current(planned, index)}
            if not beams:
                continue
            request = next(iter(beams.values())).request
            search = self._searches.get(request.request_id)
            if search is None:
                search = self._searches[request.request_id] = _Search(request)
            for beam in beams.values():
                search.heard[id(beam)] = []
            triples = zip(candidates.samples, candidates.token_ids, candidates.scores, strict=True)
            for index, token_id, score in triples:
                if index in beams and score > float("-inf"):
                    beam, logprobs = beams[index], result.logprobs[index] if result.logprobs else None
                    heard = search.heard[id(beam)]
                    heard.append(Candidate(beam, token_id, score, len(heard) + 1, logprobs))
            try:
                updates += self._go_on(request, search, prompt_logprobs.get(request.request_id, ()))
            except GrammarError as error:
                updates += self._fail(next(iter(beams.values())), str(error))
        return updates

    def _go_on(
        self, request: Request, search: _Search, prompt_logprobs: Sequence[TokenLogprobs]
    ) -> list[SequenceUpdate]:
        beams = self._scheduler.beams(request.request_id)
        if any(id(beam) not in search.heard for beam in beams):
            return []
        joined = [one for beam in beams for one in search.heard[id(beam)]]
        joined.sort(key=lambda one: -one.score)  # stable: ties stay with the better beam, then the lower id
        if request.sampling.structured is not None:
            joined = [self._placed(one) for one in joined]
        branches = search.hypotheses.choose(joined, search.tokens)
        if not branches:
            self._scheduler.abort(request.request_id, FinishReason.STOP)
            self._searches.pop(request.request_id, None)
            return _final(request, search.hypotheses.best, beams[0].num_cached, prompt_logprobs)
        followed = [one.token(search.tokens) for one in branches]
        beams = self._scheduler.branch([(one.beam, one.token_id, one.score) for one in branches])
        places = [one.place for one in branches if one.place is not None]
        if places:
            self._structured.branched(beams, places)
        search.tokens = {id(beam): token for beam, token in zip(beams, followed, strict=True)}
        search.heard = {}
        return []

    def _placed(self, candidate: Candidate) -> Candidate:
        """With its place in the grammar. An end token has none: it is behind the text."""
        if candidate.token_id in candidate.beam.request.stop_token_ids:
            return candidate
        return replace(candidate, place=self._structured.continued(candidate.beam, candidate.token_id))


def _is_current(planned: ScheduledStep, index: int) -> bool:
    """Whether the sample continues its beam as it is now: a beam that died, or went on meanwhile, is not meant."""
    beam, step = planned.receivers[index], planned.step
    source = step.sample_sources[index]
    length = step.num_computed[source] + step.num_tokens[source]
    return beam.phase is not Phase.FINISHED and length == len(beam.token_ids)


def _final(
    request: Request, found: list[Hypothesis], num_cached: int, prompt_logprobs: Sequence[TokenLogprobs]
) -> list[SequenceUpdate]:
    """Best first. Where bans left fewer hypotheses than were asked for, the others are empty."""
    updates = []
    for index in range(request.sampling.num_answers):
        one = found[index] if index < len(found) else Hypothesis(0.0, None, FinishReason.LENGTH, None)
        entries = one.entries()
        updates.append(
            SequenceUpdate(
                request.request_id,
                index,
                tuple(entry.token_id for entry in entries),
                tuple(entries) if request.sampling.logprobs is not None else (),
                tuple(prompt_logprobs)
                if request.sampling.prompt_logprobs is not None and index == 0
                else None,
                one.finish_reason,
                one.stop_reason,
                num_cached,
            )
        )
    return updates
