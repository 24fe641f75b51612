"""EncoderRunner: one step of an encoder, from token ids to vectors."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from quire.layers.encoder import Pooling, assemble_encoder_batch
from quire.models.model import Encoder


@dataclass(frozen=True, slots=True)
class Vectors:
    """What came back of a step."""

    values: numpy.ndarray  # [R, width] float32
    seconds: float


class EncoderRunner:
    """Holds no state between steps: an encoder's sequence is closed in one."""

    def __init__(self, encoder: Encoder, pooling: Pooling, device: torch.device) -> None:
        self._encoder = encoder
        self._pooling = pooling
        self._device = device

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]]) -> Vectors:
        """One vector for each sequence, none of which may be empty."""
        started = time.perf_counter()
        texts = assemble_encoder_batch(sequences, self._device)
        values = self._pooling(self._encoder(texts), texts).cpu().numpy()
        return Vectors(values, time.perf_counter() - started)
