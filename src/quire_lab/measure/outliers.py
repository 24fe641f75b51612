"""Activations with outliers, as models from 6.7 billion parameters on have them, in a model of any size.

The gain of a norm is multiplied in six channels and the columns of the matrices behind it are divided by the same
number: the function stays what it was, and the activations between them have outliers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader
from quire.models.loading import feed
from quire.models.model import DecoderModel
from quire.models.registry import build, describe
from quire.quant.encoded import Weight, floats
from quire.quant.format import Matrix
from quire.quant.llm_int8 import Int8OutlierMatrix, LlmInt8
from quire.weights.source import Source

NUM_CHANNELS = 6
FACTOR = 64.0
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
BEHIND = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))


def can_inject(loaders: Mapping[str, Loader]) -> bool:
    """Whether the model has its norms where Llama has them."""
    return all(any(name.endswith(end) for name in loaders) for end in (*NORMS, *BEHIND))


def loaded(source: Source, factory: LayerFactory, seed: int, with_outliers: bool) -> DecoderModel:
    """The source's model in a number format, from its floats; nothing is cached."""
    model: DecoderModel = build(describe(source.config), factory)
    loaders = model.loaders()
    if with_outliers:
        loaders = {name: _changed(name, loader) for name, loader in loaders.items()}
    feed(source, loaders, factory.device, None, seed)
    return model


def channels(width: int) -> list[int]:
    """Six, spread over the row."""
    return [width * (2 * i + 1) // (2 * NUM_CHANNELS) for i in range(NUM_CHANNELS)]


def _changed(name: str, loader: Loader) -> Loader:
    if name.endswith(NORMS):
        return replace(loader, take=partial(_take_scaled, loader, FACTOR))
    if name.endswith(BEHIND):
        return replace(loader, take=partial(_take_scaled, loader, 1 / FACTOR))
    return loader


def _take_scaled(loader: Loader, factor: float, weight: Weight) -> None:
    changed = floats(weight).clone()
    changed[..., channels(changed.shape[-1])] *= factor
    loader.take(changed)


@dataclass(frozen=True, slots=True)
class OutlierShare:
    """What one matrix multiplied in 16 bits."""

    outliers: float  # share of the entries of x that were 6.0 or more, outside of the columns below
    num_fine: int  # columns whose weights are kept in 16 bits, and whose entries are always multiplied so

    def __str__(self) -> str:
        return f"{100 * self.outliers:.3f} %" + (f" + {self.num_fine} columns" if self.num_fine else "")


class WatchedLlmInt8(LlmInt8):
    """Keeps the matrices, which count their outliers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._matrices: list[Int8OutlierMatrix] = []

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        made = Int8OutlierMatrix(num_rows, num_columns, self._device)
        self._matrices.append(made)
        return made

    def shares(self, num_layers: int) -> list[list[OutlierShare]]:
        """Of every layer's matrices in the order they were made; the head comes last and is left out."""
        each = (len(self._matrices) - 1) // num_layers
        shares = [
            OutlierShare(matrix.num_outliers / max(1, matrix.num_entries), len(matrix.fine_columns))
            for matrix in self._matrices
        ]
        return [shares[i * each : (i + 1) * each] for i in range(num_layers)]
