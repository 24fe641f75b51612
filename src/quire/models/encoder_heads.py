"""Heads of encoders: class scores of a whole text, and predictions of masked tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.encoder import EncoderBatch, Pooling
from quire.layers.factory import LayerFactory
from quire.layers.linear import TokenEmbedding
from quire.layers.parameters import Composite, Loader


@dataclass(frozen=True, slots=True)
class HeadNames:
    """A head, dense → activation (→ norm) → output, as the checkpoint names it."""

    dense: str
    activation: str  # tanh, or one of config.json's names
    output: str  # of masked tokens: an untied output matrix
    norm: str | None = None
    bias: str = ""  # of masked tokens: the output's bias
    dense_bias: bool = True
    norm_bias: bool = True


class EncoderHead(Composite):
    """What both heads begin with. Its small matrices stay in full precision."""

    def __init__(self, config: ModelConfig, names: HeadNames, eps: float, factory: LayerFactory) -> None:
        width = config.hidden_size
        self._names = names
        self.dense = factory.precise_linear(width, width, names.dense_bias)
        self._activation: Callable[[Tensor], Tensor] = (
            torch.tanh if names.activation == "tanh" else factory.activation(names.activation)
        )
        self.norm = factory.layer_norm(width, eps) if names.norm is not None else None

    def transformed(self, hidden: Tensor) -> Tensor:
        """hidden [L, width] -> [L, width]."""
        hidden = self._activation(self.dense(hidden))
        return hidden if self.norm is None else self.norm(hidden)

    def loaders(self) -> dict[str, Loader]:
        loaders = self.dense.loaders(self._names.dense)
        if self.norm is not None and self._names.norm is not None:
            loaders |= self.norm.loaders(self._names.norm, self._names.norm_bias)
        return loaders

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, layer in self.layers().items()
            for key, tensor in layer.state().items()
        }

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        for name, layer in self.layers().items():
            prefix = f"{name}."
            layer.adopt({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})


class ClassificationHead(EncoderHead):
    """Scores of a text's classes, from its pooled hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        names: HeadNames,
        eps: float,
        factory: LayerFactory,
        num_labels: int,
        pooling: str = "cls",
    ) -> None:
        super().__init__(config, names, eps, factory)
        self._pooling = Pooling(pooling, normalize=False)
        self.output = factory.precise_linear(num_labels, config.hidden_size, bias=True)

    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """hidden [T, width] -> logits [R, labels] float32."""
        pooled = self._pooling(hidden, batch).to(hidden.dtype)
        return self.output(self.transformed(pooled)).float()

    def loaders(self) -> dict[str, Loader]:
        return super().loaders() | self.output.loaders(self._names.output)


class MaskHead(EncoderHead):
    """Scores of the whole vocabulary for a token; the output matrix is the embedding's, unless config.json says not."""

    def __init__(
        self,
        config: ModelConfig,
        names: HeadNames,
        eps: float,
        factory: LayerFactory,
        table: TokenEmbedding,
        table_name: str,
    ) -> None:
        super().__init__(config, names, eps, factory)
        self._table, self._table_name = table, table_name
        tied_to = table if config.hf.get("tie_word_embeddings", True) else None
        self.output = factory.output_head(config.vocab_size, config.hidden_size, tied_to)
        self._bias = factory.bias(config.vocab_size) if names.bias else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [L, width] -> logits [L, vocab] float32."""
        logits = self.output(self.transformed(hidden))
        return logits if self._bias is None else logits + self._bias.value.float()

    def loaders(self) -> dict[str, Loader]:
        loaders = super().loaders()
        loaders |= self.output.loaders(self._table, self._table_name, self._names.output)
        if self._bias is not None:
            loaders[self._names.bias] = self._bias.loader()
        return loaders

    def state(self) -> dict[str, Tensor]:
        bias = {} if self._bias is None else {"bias": self._bias.value}
        return super().state() | bias

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        super().adopt(state)
        if self._bias is not None:
            self._bias.adopt(state["bias"])
