"""A decoder as an encoder: causal attention over whole texts, hidden states of all tokens, no output head."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.layout import BlockLayout
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import LayerFactory
from quire.layers.linear import OutputHead, TokenEmbedding
from quire.layers.parameters import Loader
from quire.models.model import DecoderModel

BLOCK_SIZE = 16


class NoHead(OutputHead):
    """Takes the place of an output head and has no weights: the checkpoint's table is the embedding's alone."""

    def loaders(self, table: TokenEmbedding, table_name: str, name: str) -> dict[str, Loader]:
        return {table_name: table.loader()}

    def state(self) -> dict[str, Tensor]:
        return {}

    def adopt(self, state: Mapping[str, Tensor]) -> None: ...


class HeadlessFactory(LayerFactory):
    """As the factory whose settings it takes, for models whose logits are never asked for."""

    def __init__(self, factory: LayerFactory) -> None:
        super().__init__(factory.number_format, factory.device, factory.max_position)

    def output_head(self, vocab_size: int, width: int, tied_to: TokenEmbedding | None = None) -> OutputHead:
        return NoHead(self.number_format.head(vocab_size, width))


class LayerPool(Pool):
    """Pages for one layer at a time: nothing is kept from step to step, so all layers write to the same ones."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return super().layer(0)

    def scales(self, index: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return super().scales(0)


class CausalEncoder:
    """An Encoder. Its pages hold one batch, and grow with the largest one."""

    head = None

    def __init__(self, config: ModelConfig, factory: LayerFactory, build: Callable[..., Any]) -> None:
        """`build` makes the decoder."""
        self.config = config
        self._decoder: DecoderModel = build(factory=HeadlessFactory(factory))
        self.loaders, self.parameters = self._decoder.loaders, self._decoder.parameters
        self.adopt = self._decoder.adopt
        dtype = str(factory.dtype).removeprefix("torch.")
        self._layout = BlockLayout(1, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
        self._pool: LayerPool | None = None
        self._device = factory.device

    def __call__(self, batch: EncoderBatch) -> Tensor:
        """Hidden states of all tokens after the final norm: [T, width]."""
        # with block 0, at most
        num_blocks = 1 + batch.token_ids.shape[0] // BLOCK_SIZE + batch.lengths.shape[0]
        if self._pool is None or self._pool.num_blocks < num_blocks:
            self._pool = LayerPool(self._layout, num_blocks, self._device)
        return self._decoder(_paged(batch), self._pool)


def _paged(batch: EncoderBatch) -> Batch:
    """Every sequence in blocks of its own, one after another from block 1 on."""
    counts = (batch.lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    first = 1 + counts.cumsum(0) - counts  # [R]
    offsets = torch.arange(-(-batch.max_length // BLOCK_SIZE), device=first.device)
    tables = torch.where(offsets < counts[:, None], first[:, None] + offsets, 0)
    num_tokens = batch.token_ids.shape[0]
    rows = torch.repeat_interleave(first, batch.lengths, output_size=num_tokens)
    return Batch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=rows * BLOCK_SIZE + batch.positions,
        query_starts=batch.starts,
        context_lens=batch.lengths.int(),
        block_tables=tables.int(),
        logits_indices=None,
    )
