"""Speculation in the engine: each sequence's own estimate, drafts from whoever makes them, figures."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Protocol

from quire.core.draft import DraftRoom
from quire.core.ints import Ints
from quire.core.request import Sequence
from quire.core.speculation import SpeculativeConfig
from quire.engine.structured import StructuredOutputs
from quire.scheduler.scheduler import Planned
from quire.speculate.adapt import FIRST_AGREEMENT, agreement_after, best_length
from quire.speculate.costs import StepCosts

PROBED_EVERY = 64  # positions between drafts that are tried though they did not pay


@dataclass(slots=True)
class SpeculationStats:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Proposer(Protocol):
    """Makes drafts: from the sequence's own text, or with a model."""

    guesses: bool  # a guess costs nothing, so that agreement is known without a draft

    def guess(self, sequence: Sequence) -> int | None:
        """The next token, or None where nothing is known of it or guesses are dear."""
        ...

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether a draft could be made now, the last token being known."""
        ...

    def draft(self, rooms: Listed[DraftRoom]) -> list[Ints]: ...

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Estimate:
    agreement: float = FIRST_AGREEMENT
    guess: int | None = None  # for the token that comes next, compared when it is there


class Speculation:
    """The scheduler's Drafter. Sequences draft as far as pays, by their own agreement and the steps' costs."""

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        max_num_seqs: int,
        structured: StructuredOutputs,
    ) -> None:
        self.stats = SpeculationStats()
        self._config = config
        self._proposer = proposer
        self._structured = structured
        self._limit = config.disable_by_batch_size or max_num_seqs
        self._costs = StepCosts()
        self._estimates: dict[str, dict[int, _Estimate]] = {}

    # ------------------------------------------------------------------ the scheduler asks

    def may_draft(self, sequence: Sequence, num_running: int) -> bool:
        return self._length(sequence, num_running, self._config.num_speculative_tokens) > 0

    def length(self, sequence: Sequence, num_running: int, most: int) -> int:
        length = self._length(sequence, num_running, min(most, self._config.num_speculative_tokens))
        return length if length and self._proposer.can_draft(sequence) else 0

    def draft(self, rooms: Listed[DraftRoom]) -> list[Ints]:
        drafts = self._proposer.draft(rooms)
        for i, room in enumerate(rooms):
            if drafts[i] and room.sequence.request.sampling.structured is not None:
                drafts[i] = drafts[i][: self._structured.num_allowed(room.sequence, drafts[i])]
        return drafts

    def _length(self, sequence: Sequence, num_running: int, most: int) -> int:
        """Nothing in a full batch: its rows already share what a step costs."""
        if num_running >= self._limit and self._limit > 1:
            return 0
        if not self._config.adaptive:
            return most
        length = best_length(self._estimate(sequence).agreement, num_running, most, self._costs.seconds)
        if not length and not self._proposer.guesses and sequence.num_known % PROBED_EVERY == 0:
            return min(1, most)  # the only way to learn that drafts have become better
        return length

    # ------------------------------------------------------------------ the committer tells

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_drafted
        self.stats.num_accepted_tokens += num_accepted
        estimate = self._estimate(sequence)
        estimate.guess = None
        estimate.agreement = agreement_after(estimate.agreement, num_accepted, num_accepted < num_drafted)

    def committed(self, planned: Planned, seconds: float) -> None:
        """A step is over: what it cost, and whether guesses that nobody drafted came true."""
        step = planned.step
        if step.total_tokens == len(step.sample_rows):
            self._costs.note(step.total_tokens, seconds)
        if len(planned.receivers) >= self._limit > 1:
            return
        for sequence in dict.fromkeys(planned.receivers):
            if sequence.finish_reason is None:
                self._compare(sequence)

    def _compare(self, sequence: Sequence) -> None:
        estimate = self._estimate(sequence)
        if estimate.guess is not None:
            is_right = sequence.token_ids[-1] == estimate.guess
            estimate.agreement = agreement_after(estimate.agreement, int(is_right), not is_right)
        estimate.guess = self._proposer.guess(sequence)

    def forget(self, request_id: str) -> None:
        self._estimates.pop(request_id, None)
        self._proposer.forget(request_id)

    def close(self) -> None:
        self._proposer.close()

    def _estimate(self, sequence: Sequence) -> _Estimate:
        of_request = self._estimates.setdefault(sequence.request.request_id, {})
        estimate = of_request.get(sequence.index)
        if estimate is None:
            estimate = of_request[sequence.index] = _Estimate()
        return estimate
