"""Layers of encoders: their batch, attention within whole sequences, and pooling to one vector each."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelError

KINDS = ("mean", "cls", "last", "max")


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """T tokens of R whole sequences, without padding. Sequence r is tokens starts[r]:starts[r + 1]."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, 0, 1, … in each sequence
    starts: Tensor  # [R + 1] int32
    lengths: Tensor  # [R] int64, none of them 0


def assemble_encoder_batch(sequences: Sequence[Sequence[int]], device: torch.device) -> EncoderBatch:
    """The batch of these sequences, in their order."""
    lengths = numpy.fromiter(map(len, sequences), dtype=numpy.int64, count=len(sequences))
    starts = numpy.zeros(len(sequences) + 1, dtype=numpy.int32)
    numpy.cumsum(lengths, out=starts[1:])
    token_ids = numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in sequences])
    positions = numpy.arange(len(token_ids), dtype=numpy.int32) - numpy.repeat(starts[:-1], lengths)
    return EncoderBatch(
        *(torch.from_numpy(column).to(device) for column in (token_ids, positions, starts, lengths))
    )


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Attention in which every token sees its whole sequence: no pool, no pages, no weights."""

    kernel: ModuleType
    num_heads: int
    head_dim: int
    scale: float

    def __call__(self, qkv: Tensor, starts: Tensor) -> Tensor:
        """qkv [T, 3 * heads * head_dim], sequence r in rows starts[r]:starts[r + 1] -> [T, heads * head_dim]."""
        q, k, v = qkv.view(qkv.shape[0], 3, self.num_heads, self.head_dim).unbind(1)
        return self.kernel.full_attention(q, k, v, starts, self.scale)


class Pooling:
    """Reduces the hidden states of a sequence to one vector, token by token in order: no other sequence counts."""

    def __init__(self, kind: str = "mean", normalize: bool = True) -> None:
        if kind not in KINDS:
            raise ModelError(f"pooling {kind!r} is not known: choose one of {', '.join(KINDS)}")
        self.kind = kind
        self.normalize = normalize

    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """hidden [T, width] -> vectors [R, width] float32, of length one if asked for."""
        hidden = hidden.float()
        if self.kind == "cls":
            vectors = hidden[batch.starts[:-1].long()]
        elif self.kind == "last":
            vectors = hidden[batch.starts[1:].long() - 1]
        else:
            vectors = torch.segment_reduce(hidden, self.kind, lengths=batch.lengths)
        return F.normalize(vectors, dim=1) if self.normalize else vectors
