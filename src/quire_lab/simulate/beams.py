"""Beam candidates without a model: probabilities that are drawn, so that beams branch as real ones do."""

from collections.abc import Sequence

import numpy as np

from quire.core.request import ints
from quire.core.step import BeamCandidates, BeamSet

FIRST_TOKEN = 2  # 0 and 1 are kept free, so that nothing ends by chance
# of the best token, of the rest: chosen so that beams branch about as often as the built-in model's do on prose
SHARES = (2.0, 1.0)


def draw_candidates(
    beams: BeamSet, shares: Sequence[float], random: np.random.Generator, first_token: int = FIRST_TOKEN
) -> BeamCandidates:
    """A broken stick: the best token takes a share of all that is drawn from Beta(a, b), the next one such a share of
    the rest, and so on, each beam for itself. `shares` are a and b.
    """
    num_beams, count = len(beams.samples), beams.num_candidates
    taken = random.beta(shares[0], shares[1], (num_beams, count))
    left = np.cumprod(1.0 - taken, axis=1)
    probabilities = taken * np.concatenate((np.ones((num_beams, 1)), left[:, :-1]), axis=1)
    scores = np.log(np.maximum(probabilities, 1e-30)) + np.asarray(beams.scores)[:, None]
    best = np.argsort(-scores, axis=None, kind="stable")[:count]
    # places, not words: different candidates of one beam are different tokens, and that is all that matters
    token_ids = first_token + best % count
    samples = np.asarray(beams.samples)[best // count]
    return BeamCandidates(
        ints(samples.tolist()), ints(token_ids.tolist()), tuple(scores.reshape(-1)[best].tolist())
    )
