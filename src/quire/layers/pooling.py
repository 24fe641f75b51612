"""Pooling: the hidden states of a sequence's tokens become one vector."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelError
from quire.layers.encoder_batch import EncoderBatch

KINDS = ("mean", "cls", "last", "max")


class Pooling:
    """A sequence's vector depends on its own tokens alone: reductions run token by token, in order."""

    def __init__(self, kind: str = "mean", normalize: bool = True) -> None:
        if kind not in KINDS:
            raise ModelError(f"pooling {kind!r} is not known: choose one of {', '.join(KINDS)}")
        self.kind = kind
        self.normalize = normalize

    def __call__(self, hidden: Tensor, texts: EncoderBatch) -> Tensor:
        """hidden [T, width] -> vectors [R, width] float32, of length one if asked for."""
        hidden = hidden.float()
        if self.kind == "cls":
            vectors = hidden[texts.starts[:-1].long()]
        elif self.kind == "last":
            vectors = hidden[texts.starts[1:].long() - 1]
        else:
            vectors = torch.segment_reduce(hidden, self.kind, lengths=texts.lengths)
        return F.normalize(vectors, dim=1) if self.normalize else vectors
