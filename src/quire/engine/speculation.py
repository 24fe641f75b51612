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
from quire.speculate.adapt import FIRST_AGREEMENT, FORGETTING, agreement_after, best_length, expected_tokens
from quire.speculate.costs import StepCosts

WAITING_GAIN = 0.1  # of the batch's tokens: what is lost when a step is planned only after the last one
AGREEMENT_STEPS = 32  # lengths are worked out for so many values of it, and kept for so many steps
LENGTHS_KEPT = 16
BATCH_GAIN = 0.3  # where several wait, and each new size of a step is recorded before it is quick
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

    def is_strong(self, sequence: Sequence) -> bool:
        """Whether the last guess or draft was one of the better kind: the kinds are judged apart."""
        ...

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether a draft could be made now, the last token being known."""
        ...

    def seconds(self, length: int) -> float:
        """What a draft of so many tokens costs, for all that draft together."""
        ...

    def draft(self, rooms: Listed[DraftRoom]) -> list[Ints]: ...

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Estimate:
    of_strong: float = FIRST_AGREEMENT  # how often drafts are right: of the better kind
    of_weak: float = FIRST_AGREEMENT
    is_strong: bool = True  # which kind is next
    coverage: float = 1.0  # how often there is a draft at all
    guess: int | None = None  # for the token that comes next, compared when it is there

    @property
    def agreement(self) -> float:
        return self.of_strong if self.is_strong else self.of_weak

    def note(self, num_right: int, is_wrong: bool) -> None:
        after = agreement_after(self.agreement, num_right, is_wrong)
        if self.is_strong:
            self.of_strong = after
        else:
            self.of_weak = after


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
        self._lengths: dict[tuple[int, int, int], int] = {}  # by agreement, sequences that run, and the most
        self._estimates: dict[str, dict[int, _Estimate]] = {}

    # ------------------------------------------------------------------ the scheduler asks

    def pays(self, running: Listed[Sequence]) -> bool:
        """What all would gain, since all wait. A draft that does not come about gains nothing."""
        num_running, most = len(running), self._config.num_speculative_tokens
        if num_running >= self._limit > 1:
            return False
        gained, drafted = 0.0, 0.0
        for sequence in running:
            if self._config.adaptive and self._is_probed(sequence):
                return True
            length = self._length(sequence, num_running, most)
            if length:
                estimate = self._estimate(sequence)
                gained += estimate.coverage * (expected_tokens(estimate.agreement, length) - 1.0)
                drafted += estimate.coverage * length
        if not self._config.adaptive or not gained:
            return gained > 0.0
        seconds = self._costs.seconds
        dearer = seconds(num_running + round(drafted)) / seconds(num_running)
        margin = WAITING_GAIN if num_running == 1 else BATCH_GAIN
        return 1.0 + gained / num_running > dearer + margin

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
        if not self._config.adaptive:
            return most
        if self._is_probed(sequence):
            return min(1, most)
        steps = round(self._estimate(sequence).agreement * AGREEMENT_STEPS)
        length = self._lengths.get((steps, num_running, most))
        if length is None:
            length = best_length(steps / AGREEMENT_STEPS, num_running, most, self._seconds)
            self._lengths[steps, num_running, most] = length
        return length

    def _seconds(self, num_running: int, length: int) -> float:
        return self._costs.seconds(num_running * (1 + length)) + self._proposer.seconds(length)

    def _is_probed(self, sequence: Sequence) -> bool:
        """Where guesses are dear, a token drafted now and then shows whether drafts have become better."""
        return not self._proposer.guesses and sequence.num_known % PROBED_EVERY == 0

    # ------------------------------------------------------------------ the committer tells

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_drafted
        self.stats.num_accepted_tokens += num_accepted
        estimate = self._estimate(sequence)
        estimate.guess = None
        estimate.note(num_accepted, num_accepted < num_drafted)

    def committed(self, planned: Planned, seconds: float) -> None:
        """A step is over: what it cost, and whether guesses that nobody drafted came true."""
        step = planned.step
        if step.total_tokens == len(step.sample_rows):
            self._costs.note(step.total_tokens, seconds)
            if self._costs.num_steps % LENGTHS_KEPT == 0:
                self._lengths.clear()
        if len(planned.receivers) >= self._limit > 1:
            return
        for sequence in dict.fromkeys(planned.receivers):
            if sequence.finish_reason is None:
                self._compare(sequence)

    def _compare(self, sequence: Sequence) -> None:
        estimate = self._estimate(sequence)
        if estimate.guess is not None:
            is_right = sequence.token_ids[-1] == estimate.guess
            estimate.note(int(is_right), not is_right)
        if self._proposer.guesses:
            estimate.guess = self._proposer.guess(sequence)
            has_guess = float(estimate.guess is not None)
            estimate.is_strong = self._proposer.is_strong(sequence)
            estimate.coverage += FORGETTING * (has_guess - estimate.coverage)

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
