"""Layers of encoders: their batch, attention within whole sequences, and pooling to one vector each."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelError
from quire.layers.lora import LoraBatch

KINDS = ("mean", "cls", "last", "max")


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """T tokens of R whole sequences, without padding. Sequence r is tokens starts[r]:starts[r + 1]."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, 0, 1, … in each sequence
    starts: Tensor  # [R + 1] int32
    lengths: Tensor  # [R] int64, none of them 0
    _: KW_ONLY
    max_length: int
    token_types: Tensor | None = None  # [T] int32, 1 in the second text of a pair; None: there are no pairs
    lora: LoraBatch | None = None  # adapters of the tokens; None: none of them has any


def assemble_encoder_batch(
    sequences: Sequence[Sequence[int]], device: torch.device, second_starts: Sequence[int] = ()
) -> EncoderBatch:
    """The batch of these sequences, in their order. `second_starts`: where each one's tokens of type 1 begin."""
    lengths = numpy.fromiter(map(len, sequences), dtype=numpy.int64, count=len(sequences))
    starts = numpy.zeros(len(sequences) + 1, dtype=numpy.int32)
    numpy.cumsum(lengths, out=starts[1:])
    token_ids = numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in sequences])
    positions = numpy.arange(len(token_ids), dtype=numpy.int32) - numpy.repeat(starts[:-1], lengths)
    types = None
    if any(second < length for second, length in zip(second_starts, lengths, strict=False)):
        is_second = positions >= numpy.repeat(second_starts, lengths)
        types = torch.from_numpy(is_second.astype(numpy.int32)).to(device)
    columns = (torch.from_numpy(column).to(device) for column in (token_ids, positions, starts, lengths))
    return EncoderBatch(*columns, max_length=int(lengths.max()), token_types=types)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Attention in which every token sees its whole sequence, or a part: no pool, no pages, no weights."""

    rotary: ModuleType
    attention: ModuleType
    num_heads: int
    head_dim: int
    scale: float
    reach: int = 0  # 0: all; else a token sees this many tokens on each side
    cos_sin: Tensor | None = None  # [positions, rotary_dim] float32; None: no rotation
    slopes: Tensor | None = None  # [heads, 2 * reach + 1] float32: scores by distance, as the kernel has it

    def __call__(self, qkv: Tensor, batch: EncoderBatch) -> Tensor:
        """qkv [T, 3 * heads * head_dim], overwritten -> [T, heads * head_dim]."""
        heads = qkv.view(qkv.shape[0], 3, self.num_heads, self.head_dim)
        if self.cos_sin is not None:
            self.rotary.rotate(heads[:, :2].flatten(1, 2), self.cos_sin, batch.positions)
        return self.attention.full_attention(
            *heads.unbind(1), batch.starts, self.scale, reach=self.reach, slopes=self.slopes
        )


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
