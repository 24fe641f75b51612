"""SimulatedRunner: runs no model and holds no tensors. It charges each step the time that a cost model gives it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.core.request import Ints, ints
from quire.core.step import BeamCandidates, BeamSet, Step, StepResult, TokenLogprobs
from quire.sampling.records import TokenMask
from quire_lab.simulate.beams import FIRST_TOKEN, SHARES, draw_candidates
from quire_lab.simulate.clock import VirtualClock
from quire_lab.simulate.cost_model import CostModel, count_step
from quire_lab.simulate.lora_cost import LoraCost

STRIDE = 7919  # prime: neighbouring positions of one sequence get tokens far apart


@dataclass(slots=True)
class _Launched:
    step: Step
    seconds: float
    ends: float  # on the virtual clock
    mask: TokenMask | None = None


class SimulatedRunner:
    """Steps take their turn on the device, one after the other, in virtual time; `collect` moves the clock to the end.

    A token follows from its request's seed, its sample's index and its position, so that equal requests get equal
    tokens, however they were batched, and no two sequences share text by chance. None of them ends a sequence. Beams
    are drawn, in the order of steps.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        vocab_size: int,
        end_token_ids: Iterable[int] = (),
        adapters: LoraCost | None = None,
    ) -> None:
        self.clock = clock
        self._cost = cost
        self._adapters = adapters  # None: no request has one
        self._ends = frozenset(end_token_ids)
        self._num_words = max(1, vocab_size - FIRST_TOKEN - len(self._ends))
        self._bases: dict[int, int] = {}  # by row: where its sequence's tokens start
        self._num_logprobs: dict[int, int] = {}  # by row, where they were asked for
        self._random = np.random.default_rng(0)
        self._launched: deque[_Launched] = deque()
        self._free_at = 0.0

    def launch(self, step: Step) -> None:
        for start in step.starts:
            self._bases[start.row] = start.seed % 1_000_003 + start.sample_index * 104_729
            if start.sampling.logprobs is not None:
                self._num_logprobs[start.row] = start.sampling.logprobs
            elif self._num_logprobs:
                self._num_logprobs.pop(start.row, None)
        seconds = self._seconds(step)
        self._free_at = max(self.clock(), self._free_at) + seconds
        self._launched.append(_Launched(step, seconds, self._free_at))

    def mask(self, mask: TokenMask) -> None:
        """Of the oldest step that waits for one."""
        next(one for one in self._launched if one.step.masked and one.mask is None).mask = mask

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        step = launched.step
        self.clock.advance_to(launched.ends)
        token_ids = self._token_ids(step)
        failed: tuple[int, ...] = ()
        if launched.mask is not None:
            failed = _obey(launched.mask, token_ids)
        return StepResult(
            step_id=step.step_id,
            token_ids=token_ids,
            logprobs=self._logprobs(step, token_ids) if self._num_logprobs else (),
            failed=failed,
            seconds=launched.seconds,
            beams=tuple(self._candidates(beams, launched.mask) for beams in step.beams),
        )

    def _candidates(self, beams: BeamSet, mask: TokenMask | None) -> BeamCandidates:
        drawn = draw_candidates(beams, SHARES, self._random)
        return drawn if mask is None else _obeying(drawn, mask)

    def close(self) -> None:
        self._launched.clear()

    def _seconds(self, step: Step) -> float:
        counts = count_step(step)
        if self._adapters is None:
            return self._cost.seconds(counts)
        adapters = self._adapters.charge(step)
        return adapters.before + self._cost.seconds(counts, adapters.products, adapters.link)

    def _token_ids(self, step: Step) -> Ints:
        bases, num_words, ends = self._bases, self._num_words, self._ends
        computed, counts, offsets = step.num_computed, step.num_tokens, step.sample_offsets
        positions = [computed[source] + counts[source] for source in step.sample_sources]
        if offsets:
            positions = [position - back for position, back in zip(positions, offsets, strict=True)]
        token_ids = ints(
            [
                FIRST_TOKEN + (bases[row] + position * STRIDE) % num_words
                for row, position in zip(step.sample_rows, positions, strict=True)
            ]
        )
        if not ends.isdisjoint(token_ids):
            for i, token_id in enumerate(token_ids):
                while token_id in ends:
                    token_id += 1
                token_ids[i] = token_id
        return token_ids

    def _logprobs(self, step: Step, token_ids: Ints) -> tuple[TokenLogprobs | None, ...]:
        """As if every chosen token had been certain: the form is right, the numbers mean nothing."""
        return tuple(
            TokenLogprobs(
                token_id,
                0.0,
                1,
                (token_id,) * min(1, self._num_logprobs[row]),
                (0.0,) * min(1, self._num_logprobs[row]),
            )
            if row in self._num_logprobs
            else None
            for row, token_id in zip(step.sample_rows, token_ids, strict=True)
        )


def _obey(mask: TokenMask, token_ids: Ints) -> tuple[int, ...]:
    """Masked samples take the lowest token that their grammar allows; where it allows none they fail."""
    failed = []
    for index, words in zip(mask.indices.tolist(), mask.bits, strict=True):
        allowed = np.flatnonzero(words)
        if not len(allowed):
            failed.append(index)
            continue
        word = int(words[allowed[0]])
        token_ids[index] = int(allowed[0]) * 32 + (word & -word).bit_length() - 1
    return tuple(failed)


def _obeying(drawn: BeamCandidates, mask: TokenMask) -> BeamCandidates:
    """A masked beam's j-th candidate takes the j-th token that its grammar allows; there are no more than those."""
    allowed = {
        index: np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        for index, words in zip(mask.indices.tolist(), mask.bits, strict=True)
    }
    samples, token_ids, scores = ints(), ints(), []
    for sample, token_id, score in zip(drawn.samples, drawn.token_ids, drawn.scores, strict=True):
        rank, tokens = token_id - FIRST_TOKEN, allowed.get(sample)
        if tokens is None:
            chosen = token_id
        elif rank < len(tokens):
            chosen = int(tokens[rank])
        else:
            continue
        samples.append(sample)
        token_ids.append(chosen)
        scores.append(score)
    return BeamCandidates(samples, token_ids, tuple(scores))
