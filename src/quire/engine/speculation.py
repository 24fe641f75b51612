"""Speculation: decides how far each sequence drafts, by its acceptance rate and the cost of steps."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Protocol

from quire.core.config import SpeculativeConfig
from quire.core.draft import Draft, DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.core.sampling import SamplingParams
from quire.core.stats import SpeculationStats
from quire.engine.structured import StructuredOutputs
from quire.scheduler.plan import ScheduledStep
from quire.speculate.adapt import (
    FIRST_ACCEPTANCE_RATE,
    FIRST_BRANCH_ACCEPTANCE,
    FIRST_LONG_MATCH_RATE,
    FORGETTING,
    Shape,
    best_shape,
    expected_tree_tokens,
    update_acceptance_rate,
    update_branch_acceptance,
)
from quire.speculate.costs import StepCosts

WAITING_GAIN = 0.1  # share of the batch's tokens that is lost when a step is scheduled after the last commit
RATE_STEPS = 32  # acceptance rates are rounded to 1 / RATE_STEPS, so that shapes can be cached
SHAPES_KEPT = 16  # steps
BATCH_GAIN = 0.3  # the same with several rows, where each new step size is recorded before it is fast
FIRST_RATE_AFTER_GUESS = 0.8  # how often there is a guess after a guessed token, before any was seen
FIRST_RATE_AFTER_MISS = 0.1  # and after a token that was not guessed
FIRST_PROBE, PROBED_EVERY = 4, 64  # steps without drafts before all draft although it does not seem to pay
MAX_PROBE_TRIES = 4  # steps in which no sequence could draft, after which a probe is given up
PROBE_LENGTH = 2  # a second token shows what a pass of the draft model takes


class Proposer(Protocol):
    """Makes drafts: from the sequence's own text, or with a model."""

    guesses: bool  # a guess costs nothing, so that the acceptance rate is known without drafts

    def guess(self, sequence: Sequence) -> int | None:
        """The next token, or None if there is no guess, or guesses are expensive."""
        ...

    def is_long_match(self, sequence: Sequence) -> bool:
        """Whether the last guess or draft came from a long match: long and short matches are judged apart."""
        ...

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether a draft could be made now, the last token being known."""
        ...

    def seconds(self, length: int) -> float:
        """Time of a draft of `length` tokens, for all drafting sequences together."""
        ...

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]: ...

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Estimate:
    long_match_rate: float = FIRST_LONG_MATCH_RATE  # acceptance rate of drafts from long matches
    short_match_rate: float = FIRST_ACCEPTANCE_RATE
    is_long_match: bool = True  # of the next draft
    rate_after_guess: float = FIRST_RATE_AFTER_GUESS  # how often there is a draft after a guessed token
    rate_after_miss: float = FIRST_RATE_AFTER_MISS
    # how often another branch of a tree is right if the first is not
    branch_rate: float = FIRST_BRANCH_ACCEPTANCE
    guess: int | None = None  # of the next token, compared when it is known

    @property
    def acceptance_rate(self) -> float:
        return self.long_match_rate if self.is_long_match else self.short_match_rate

    @property
    def draft_rate(self) -> float:
        return self.rate_after_miss if self.guess is None else self.rate_after_guess

    def note_guess(self, guess: int | None) -> None:
        """Takes the guess of the next token. After a draft it counts as one after a miss: text that has repeated
        itself soon does so again.
        """
        change = FORGETTING * (float(guess is not None) - self.draft_rate)
        if self.guess is None:
            self.rate_after_miss += change
        else:
            self.rate_after_guess += change
        self.guess = guess

    def note(self, num_right: int, is_wrong: bool) -> None:
        rate = update_acceptance_rate(self.acceptance_rate, num_right, is_wrong)
        if self.is_long_match:
            self.long_match_rate = rate
        else:
            self.short_match_rate = rate


class Speculation:
    """The scheduler's Drafter. Sequences draft as far as pays, by their acceptance rate and the steps' costs."""

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
        self._shapes: dict[tuple[int, int, int, int, int], Shape] = {}  # by all that they depend on
        self._estimates: dict[str, dict[int, _Estimate]] = {}
        self._typical_rate = FIRST_ACCEPTANCE_RATE  # of all sequences' drafts
        self._num_plain = 0  # steps since the last one with a draft
        self._probe_after = FIRST_PROBE

    # ------------------------------------------------------------------ called by the scheduler

    def pays(self, running: Listed[Sequence]) -> bool:
        """The gain over the whole batch, since all of it waits."""
        num_running, most = len(running), self._most.num_tokens
        if num_running >= self._limit > 1 or not self._most.length:
            return False
        gained, drafted = 0.0, 0.0
        for sequence in running:
            if not self._proposer.guesses and not self._proposer.can_draft(sequence):
                continue
            if self._is_probing:
                return True
            shape = self._shape(sequence, num_running, most)
            if shape.length:
                estimate = self._estimate(sequence)
                # a model always has a draft
                draft_rate = estimate.draft_rate if self._proposer.guesses else 1.0
                expected = expected_tree_tokens(estimate.acceptance_rate, estimate.branch_rate, shape)
                gained += draft_rate * (expected - 1.0)
                drafted += draft_rate * shape.num_tokens
        if not self._config.adaptive or not gained:
            return gained > 0.0
        seconds = self._costs.seconds
        cost = seconds(num_running + round(drafted)) / seconds(num_running)
        margin = WAITING_GAIN if num_running == 1 else BATCH_GAIN
        return 1.0 + gained / num_running > cost + margin

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
        """For experiments: replaces the proposer and the limits of its drafts; a length of 0 turns drafting off."""
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
        estimate = self._estimate(sequence)
        rate = round(estimate.acceptance_rate * RATE_STEPS)
        branch_rate = round(estimate.branch_rate * RATE_STEPS)
        key = (rate, branch_rate if most.width > 1 else 0, num_running, most_tokens, most.width)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = best_shape(
                rate / RATE_STEPS, branch_rate / RATE_STEPS, num_running, most, most_tokens,
                self._seconds,
            )  # fmt: skip
        if not shape.length and self._is_probing:
            return Shape(min(PROBE_LENGTH, most.length, most_tokens))
        return shape

    def _seconds(self, num_running: int, shape: Shape) -> float:
        return self._costs.seconds(num_running * (1 + shape.num_tokens)) + self._proposer.seconds(
            shape.length
        )

    @property
    def _is_probing(self) -> bool:
        """Where guesses are expensive, a draft now and then shows whether acceptance rates and costs have changed."""
        return self._config.adaptive and not self._proposer.guesses and self._num_plain >= self._probe_after

    # ------------------------------------------------------------------ called by commit

    def verified(self, sequence: Sequence, draft: Draft, accepted: list[int]) -> None:
        """Takes the accepted nodes of a draft. The acceptance rate is that of the first branch."""
        tree = TokenTree(draft.token_ids, draft.parents)
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(tree)
        self.stats.num_accepted_tokens += len(accepted)
        estimate = self._estimate(sequence)
        estimate.guess = None
        main = tree.main
        num_right = sum(1 for node in accepted if node < main)
        estimate.note(num_right, num_right < main)
        self._typical_rate = update_acceptance_rate(self._typical_rate, num_right, num_right < main)
        others = [n for n in range(main, len(tree)) if draft.parents[n] == num_right - 1]
        if others and num_right < main:
            estimate.branch_rate = update_branch_acceptance(
                estimate.branch_rate, len(others), len(accepted) > num_right
            )

    def committed(self, scheduled: ScheduledStep, seconds: float) -> None:
        """Takes the time of a finished step, and compares its tokens with guesses that were not drafted."""
        step = scheduled.step
        if step.drafts or self._num_plain >= self._probe_after + MAX_PROBE_TRIES:
            if self._is_probing:
                self._probe_after = min(2 * self._probe_after, PROBED_EVERY)
            self._num_plain = 0
        else:
            self._num_plain += 1
        if step.total_tokens == len(step.sample_rows):
            self._costs.note(step.total_tokens, seconds)
            if self._costs.num_steps % SHAPES_KEPT == 0:
                self._shapes.clear()
        if len(scheduled.sequences) >= self._limit > 1:
            return
        for sequence in dict.fromkeys(scheduled.receivers):
            if sequence.finish_reason is None:
                self._compare(sequence)

    def _compare(self, sequence: Sequence) -> None:
        estimate = self._estimate(sequence)
        if estimate.guess is not None:
            is_right = sequence.token_ids[-1] == estimate.guess
            estimate.note(int(is_right), not is_right)
        if self._proposer.guesses:
            estimate.note_guess(self._proposer.guess(sequence))
            estimate.is_long_match = self._proposer.is_long_match(sequence)

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
                estimate.long_match_rate = (FIRST_ACCEPTANCE_RATE + self._typical_rate) / 2
        return estimate


def reads_history(sampling: SamplingParams) -> bool:
    """Whether sampling depends on earlier tokens: a row has one history, so its drafts must be chains."""
    return sampling.penalised or any(len(word) > 1 for word in sampling.bad_words_token_ids)
