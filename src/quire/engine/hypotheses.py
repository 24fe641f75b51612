"""Hypotheses: which candidates of a beam search continue, which end, and when it is over, as in `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.request import FinishReason, Request
from quire.core.request import Sequence as Beam
from quire.core.step import TokenLogprobs
from quire.grammar.matcher import Matcher


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
    """The best `width` outputs that have ended, best first."""

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
