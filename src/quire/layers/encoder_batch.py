"""Texts: an encoder's batch. Whole sequences side by side, no padding; each is closed in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """T tokens of R sequences. Sequence r is tokens starts[r]:starts[r + 1], at positions 0, 1, …"""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    starts: Tensor  # [R + 1] int32
    lengths: Tensor  # [R] int64, none of them 0


def assemble_encoder_batch(sequences: Sequence[Sequence[int]], device: torch.device) -> EncoderBatch:
    """The batch of these sequences, in their order."""
    lengths = numpy.fromiter(map(len, sequences), dtype=numpy.int64, count=len(sequences))
    starts = numpy.zeros(len(sequences) + 1, dtype=numpy.int32)
    numpy.cumsum(lengths, out=starts[1:])
    token_ids = numpy.concatenate([numpy.asarray(one, dtype=numpy.int32) for one in sequences])
    positions = numpy.arange(len(token_ids), dtype=numpy.int32) - numpy.repeat(starts[:-1], lengths)
    return EncoderBatch(
        *(torch.from_numpy(column).to(device) for column in (token_ids, positions, starts, lengths))
    )
