"""CountingRunner: steps without a model. Tokens are random; what is real is who holds which block."""

from collections import deque

import numpy as np

from quire.core.request import ints
from quire.core.step import Step, StepResult
from quire.sampling.records import TokenMask
from quire_lab.simulate.beams import FIRST_TOKEN, draw_candidates


class CountingRunner:
    """Seeded: the same steps give the same tokens. Beams branch by `shares`: see draw_candidates."""

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
        beams = tuple(draw_candidates(one, self._shares, self._random) for one in step.beams)
        return StepResult(step.step_id, ints(token_ids.tolist()), beams=beams)

    def close(self) -> None:
        self._launched.clear()
