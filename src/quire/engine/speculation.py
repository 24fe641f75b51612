"""Speculation in the engine: each sequence's own estimate, drafts from whoever makes them, figures."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Protocol

from quire.core.draft import Draft, DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.core.sampling import SamplingParams
from quire.core.speculation import SpeculativeConfig
from quire.engine.structured import StructuredOutputs
from quire.scheduler.plan import ScheduledStep
from quire.speculate.adapt import (
    FIRST_AGREEMENT,
    FIRST_RESCUE,
    FIRST_STRONG,
    FORGETTING,
    Shape,
    agreement_after,
    best_shape,
    expected_of_tree,
    rescue_after,
)
from quire.speculate.costs import StepCosts

WAITING_GAIN = 0.1  # of the batch's tokens: what is lost when a step is planned only after the last one
AGREEMENT_STEPS = 32  # shapes are worked out for so many values of it, and kept for so many steps
SHAPES_KEPT = 16
BATCH_GAIN = 0.3  # where several wait, and each new size of a step is recorded before it is quick
FIRST_COVERED_ON = 0.8  # how often a guess follows a guess, of a sequence that nothing is known of
FIRST_COVERED_ANEW = 0.1  # and how often one follows a token that was not guessed
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

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]: ...

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Estimate:
    of_strong: float = FIRST_STRONG  # how often drafts are right: of the better kind
    of_weak: float = FIRST_AGREEMENT
    is_strong: bool = True  # which kind is next
    covered_on: float = FIRST_COVERED_ON  # how often there is a draft: where the last token was guessed
    covered_anew: float = FIRST_COVERED_ANEW  # where it was not
    rescue: float = FIRST_RESCUE  # how often another branch of a tree is right where the first is not
    guess: int | None = None  # for the token that comes next, compared when it is there

    @property
    def agreement(self) -> float:
        return self.of_strong if self.is_strong else self.of_weak

    @property
    def coverage(self) -> float:
        return self.covered_anew if self.guess is None else self.covered_on

    def note_guess(self, guess: int | None) -> None:
        """For the next token, after the one that the last guess was for. After a draft it counts as one that comes
        anew: text that repeated what was there soon does so again.
        """
        found = FORGETTING * (float(guess is not None) - self.coverage)
        if self.guess is None:
            self.covered_anew += found
        else:
            self.covered_on += found
        self.guess = guess

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
        self._most = Shape(config.num_speculative_tokens, config.tree_width)
        self._shapes: dict[tuple[int, int, int, int, int], Shape] = {}  # by what they depend on
        self._estimates: dict[str, dict[int, _Estimate]] = {}

    # ------------------------------------------------------------------ the scheduler asks

    def pays(self, running: Listed[Sequence]) -> bool:
        """What all would gain, since all wait. A draft that does not come about gains nothing."""
        num_running, most = len(running), self._most.num_tokens
        if num_running >= self._limit > 1 or not self._most.length:
            return False
        gained, drafted = 0.0, 0.0
        for sequence in running:
            if self._config.adaptive and self._is_probed(sequence):
                return True
            shape = self._shape(sequence, num_running, most)
            if shape.length:
                estimate = self._estimate(sequence)
                coverage = estimate.coverage if self._proposer.guesses else 1.0  # a model always has a draft
                expected = expected_of_tree(estimate.agreement, estimate.rescue, shape)
                gained += coverage * (expected - 1.0)
                drafted += coverage * shape.num_tokens
        if not self._config.adaptive or not gained:
            return gained > 0.0
        seconds = self._costs.seconds
        dearer = seconds(num_running + round(drafted)) / seconds(num_running)
        margin = WAITING_GAIN if num_running == 1 else BATCH_GAIN
        return 1.0 + gained / num_running > dearer + margin

    def room(self, sequence: Sequence, num_running: int, most: int) -> DraftRoom | None:
        shape = self._shape(sequence, num_running, most)
        if not shape.length or not self._proposer.can_draft(sequence):
            return None
        return DraftRoom(sequence, shape.length, shape.width)

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]:
        drafts = self._proposer.draft(rooms)
        for i, room in enumerate(rooms):
            if len(drafts[i]) and room.sequence.request.sampling.structured is not None:
                drafts[i] = self._structured.allowed(room.sequence, drafts[i])
        return drafts

    def propose_with(self, proposer: Proposer, most: Shape | None = None) -> None:
        """Another proposer from now on, and other limits of its drafts, a length of 0 for none: for experiments."""
        self._proposer.close()
        self._proposer = proposer
        self._most = most or self._most
        self._shapes.clear()

    def _shape(self, sequence: Sequence, num_running: int, most_tokens: int) -> Shape:
        most = self._most
        if most.width > 1 and reads_history(sequence.request.sampling):
            most = Shape(most.length)
        if not self._config.adaptive:
            length = min(most.length, most_tokens)
            return Shape(length, min(most.width, most_tokens // max(1, length)))
        if self._is_probed(sequence):
            return Shape(min(1, most_tokens))
        estimate = self._estimate(sequence)
        agreement, rescue = (round(of * AGREEMENT_STEPS) for of in (estimate.agreement, estimate.rescue))
        key = (agreement, rescue if most.width > 1 else 0, num_running, most_tokens, most.width)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = best_shape(
                agreement / AGREEMENT_STEPS, rescue / AGREEMENT_STEPS, num_running, most, most_tokens,
                self._seconds,
            )  # fmt: skip
        return shape

    def _seconds(self, num_running: int, shape: Shape) -> float:
        return self._costs.seconds(num_running * (1 + shape.num_tokens)) + self._proposer.seconds(
            shape.length
        )

    def _is_probed(self, sequence: Sequence) -> bool:
        """Where guesses are dear, a token drafted now and then shows whether drafts have become better."""
        return not self._proposer.guesses and sequence.num_known % PROBED_EVERY == 0

    # ------------------------------------------------------------------ the committer tells

    def verified(self, sequence: Sequence, draft: Draft, accepted: list[int]) -> None:
        """The nodes of a draft that stay. Agreement is of the first branch: the others say what they add to it."""
        tree = TokenTree(draft.token_ids, draft.parents)
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(tree)
        self.stats.num_accepted_tokens += len(accepted)
        estimate = self._estimate(sequence)
        estimate.guess = None
        main = tree.main
        num_right = sum(1 for node in accepted if node < main)
        estimate.note(num_right, num_right < main)
        others = [n for n in range(main, len(tree)) if draft.parents[n] == num_right - 1]
        if others and num_right < main:
            estimate.rescue = rescue_after(estimate.rescue, len(others), len(accepted) > num_right)

    def committed(self, planned: ScheduledStep, seconds: float) -> None:
        """A step is over: what it cost, and whether guesses that nobody drafted came true."""
        step = planned.step
        if step.total_tokens == len(step.sample_rows):
            self._costs.note(step.total_tokens, seconds)
            if self._costs.num_steps % SHAPES_KEPT == 0:
                self._shapes.clear()
        if len(planned.sequences) >= self._limit > 1:
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
            estimate.note_guess(self._proposer.guess(sequence))
            estimate.is_strong = self._proposer.is_strong(sequence)

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
            if not self._proposer.guesses:  # all drafts are of one kind
                estimate.of_strong = FIRST_AGREEMENT
        return estimate


def reads_history(sampling: SamplingParams) -> bool:
    """Whether what is chosen depends on the tokens before: a row has one line of these, so its drafts are chains."""
    return sampling.penalised or any(len(word) > 1 for word in sampling.bad_words_token_ids)
