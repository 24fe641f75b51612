"""Draft: tokens that someone proposes for a sequence, and how many there is room for."""

from dataclasses import dataclass

from quire.core.ints import Ints
from quire.core.request import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of a row. The step computes and samples at each, so that they are verified."""

    row: int
    position: int  # of the first of them: the row's known tokens end before it
    token_ids: Ints  # [K] int32


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """A sequence that may draft so many tokens: blocks for them are its own already."""

    sequence: Sequence
    num_tokens: int
