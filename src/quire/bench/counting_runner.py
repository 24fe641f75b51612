"""CountingRunner: steps without a model. Tokens are random; what is real is who holds which block."""

from collections import deque

import numpy as np

from quire.core.ints import ints
from quire.core.step import BeamCandidates, BeamSet, Step, StepResult
from quire.sampling.records import TokenMask

FIRST_TOKEN = 2  # 0 and 1 are kept free, so that nothing ends by chance


class CountingRunner:
    """Seeded: the same steps give the same tokens.

    A beam's candidates have the probabilities of a broken stick: the best token takes a share of all that is drawn from
    Beta(a, b), the next one such a share of the rest, and so on, each beam for itself. `shares` are a and b.
    """

    def __init__(self, vocab_size: int, shares: tuple[float, float], seed: int) -> None:
        self._vocab_size = vocab_size
        self._shares = shares
        self._random = np.random.default_rng(seed)
        self._launched: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        self._launched.append(step)

    def mask(self, mask: TokenMask) -> None:
        raise NotImplementedError("nothing here has a grammar")

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        token_ids = self._random.integers(FIRST_TOKEN, self._vocab_size, len(step.sample_rows))
        beams = tuple(self._candidates(one) for one in step.beams)
        return StepResult(step.step_id, ints(token_ids.tolist()), beams=beams)

    def close(self) -> None:
        self._launched.clear()

    def _candidates(self, beams: BeamSet) -> BeamCandidates:
        num_beams, count = len(beams.samples), beams.num_candidates
        taken = self._random.beta(*self._shares, (num_beams, count))
        left = np.cumprod(1.0 - taken, axis=1)
        probabilities = taken * np.concatenate((np.ones((num_beams, 1)), left[:, :-1]), axis=1)
        scores = np.log(np.maximum(probabilities, 1e-30)) + np.asarray(beams.scores)[:, None]
        best = np.argsort(-scores, axis=None, kind="stable")[:count]
        # places, not words: different candidates of one beam are different tokens, and that is all that matters
        token_ids = FIRST_TOKEN + best % count
        samples = np.asarray(beams.samples)[best // count]
        return BeamCandidates(
            ints(samples.tolist()), ints(token_ids.tolist()), tuple(scores.reshape(-1)[best].tolist())
        )
