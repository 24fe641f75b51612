"""EncoderDecoder: an encoder whose output becomes the K and V of cross-attention once, and a decoder over pages."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.attention import Pool
from quire.layers.cross import CrossBatch
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import LayerFactory
from quire.layers.linear import OutputHead
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, LayerStack, Loader


class EncoderDecoder(LayerStack):
    """A DecoderModel with `encode`. In `blocks` the encoder's layers come first.

    Layers take hidden [T, hidden], which they may overwrite, and a batch. A decoder's also take the pool, where they
    store K and V of the batch's tokens, and have `cross`, a CrossAttention, and `cross_kv`, a Linear from the encoder's
    output to its K and V.
    """

    head: OutputHead
    # How a checkpoint names the encoder, and K and V of cross-attention.
    encoder_names: ClassVar[tuple[str, ...]]
    encoder_blocks: Sequence[Any]
    decoder_blocks: Sequence[Any]

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self.config = config
        self._select = factory.row_selection()

    @property
    def recordable(self) -> bool:
        """Whether a decode runs native operations only."""
        return False

    @property
    def blocks(self) -> Sequence[Composite]:  # type: ignore[override]
        return [*self.encoder_blocks, *self.decoder_blocks]

    @property
    def stack(self) -> Sequence[Any]:
        """The decoder's layers. They do not stream."""
        return self.decoder_blocks

    @abstractmethod
    def loaders(self) -> dict[str, Loader]: ...

    @abstractmethod
    def _embed_prompt(self, batch: EncoderBatch) -> Tensor:
        """[T, hidden], the encoder's first hidden states."""

    @abstractmethod
    def _embed(self, batch: CrossBatch) -> Tensor:
        """[T, hidden], the decoder's first hidden states."""

    def _encoded(self, hidden: Tensor) -> Tensor:
        """What follows the encoder's last layer."""
        return hidden

    def _decoded(self, hidden: Tensor) -> Tensor:
        """What follows the decoder's last layer."""
        return hidden

    def encode(self, batch: EncoderBatch, slots: Tensor, pool: Pool) -> None:
        """Runs whole prompts through the encoder, and stores K and V of every decoder layer's cross-attention.

        slots [T] int64: where those of each token go.
        """
        hidden = self._embed_prompt(batch)
        for block in self.encoder_blocks:
            hidden = block(hidden, batch)
        hidden = self._encoded(hidden)
        for block in self.decoder_blocks:
            block.cross.store(block.cross_kv(hidden, lora=batch.lora), batch.positions, slots, pool)

    def __call__(self, batch: CrossBatch, pool: Pool) -> Tensor:
        """Hidden states of batch.logits_indices: [L, hidden]."""
        hidden = self._embed(batch)
        for block in self.decoder_blocks:
            hidden = block(hidden, batch, pool)
        return self._decoded(self._select(hidden, batch.logits_indices))

    def encoder_parameters(self) -> list[str]:
        """Names of parameters that prompts go through and the decoder's tokens do not."""
        layers = tuple(f"layers.{i}." for i in range(len(self.encoder_blocks)))
        own = (*layers, "encoder_")
        return [name for name in self.parameters() if name.startswith(own) or ".cross_kv/" in name]

    def encoder_loaders(self) -> list[str]:
        """The same as a checkpoint names them, but for tables that are read row by row."""
        prefix, *parts = self.encoder_names
        return [
            name
            for name in self.loaders()
            if (name.startswith(prefix) and "embed_positions" not in name)
            or any(part in name for part in parts)
        ]

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        return self.head(hidden, lora)
