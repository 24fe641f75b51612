"""Which hidden states a step needs: the last of every sampled sequence, and those that score prompt tokens."""

from dataclasses import dataclass

import numpy as np

from quire.runner.rows import RowSettings


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Positions first … first + count - 1 of a row predict the prompt tokens after them."""

    row: int
    first: int
    count: int
    num_top: int


def scored_rows(
    settings: RowSettings,
    rows: np.ndarray,  # [R] int64, rows that advance
    computed: np.ndarray,  # [R] int64, position of each one's first token
    counts: np.ndarray,  # [R] int64
) -> tuple[ScoredRow, ...]:
    """Rows that want logprobs of prompt tokens from this step."""
    wanted = settings.prompt_logprobs[rows]
    if (wanted < 0).all():
        return ()
    found = []
    for i in np.flatnonzero(wanted >= 0):
        last = int(settings.num_prompt_tokens[rows[i]]) - 1  # the position that predicts an output
        count = min(int(counts[i]), last - int(computed[i]))
        if count > 0:
            found.append(ScoredRow(int(rows[i]), int(computed[i]), count, int(wanted[i])))
    return tuple(found)


def wanted_tokens(
    ends: np.ndarray,  # [R] int64, where each row's tokens end in the batch
    sources: np.ndarray,  # [S] int64, whose token is sampled
    offsets: np.ndarray,  # [S] int64, or [] for all 0: how far before its last
    scored: tuple[ScoredRow, ...],
    rows: np.ndarray,  # [R] int64
    counts: np.ndarray,  # [R] int64
) -> np.ndarray:
    """Token indices whose hidden states are needed: one per sample, then those of scored rows."""
    pieces = [ends[sources] - 1 - offsets if len(offsets) else ends[sources] - 1]
    for score in scored:
        position = int(np.flatnonzero(rows == score.row)[0])
        begin = int(ends[position] - counts[position])
        pieces.append(np.arange(begin, begin + score.count))
    return np.concatenate(pieces)
