"""GptDecoder, shared by OPT and GPT-2: layer norms, biases, learned positions. Their files own the names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraBatch
from quire.layers.norm import LayerNorm
from quire.layers.parameters import Composite, LayerStack
from quire.models.model import Layer
from quire.weights.hyperparameters import checkpoint_dtype, first_token_id, head_size, positive, token_ids


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The differences between decoders of this kind."""

    activation: str
    eps: float
    scales: tuple[float, ...]  # of attention's scores, per layer
    bias: bool = True  # of every projection
    affine: bool = True  # norms have weights
    norm_first: bool = True  # False: after each sum, as in OPT-350m
    final_norm: bool = True
    embedding_width: int | None = None  # other than the hidden size: projected in and out
    skipped_positions: int = 0  # rows of the checkpoint's position table before position 0


def describe_gpt(
    architecture: str,
    hf: Mapping[str, Any],
    *,
    hidden_size: int,
    num_heads: int,
    num_layers: int,
    intermediate_size: int,
    max_position: int,
) -> ModelConfig:
    """The ModelConfig of such a decoder, from the values that have other names in each config.json."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size({}, hidden_size, num_heads),
        intermediate_size=intermediate_size,
        max_position=max_position,
        dtype=checkpoint_dtype(hf),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        eos_token_ids=token_ids(hf, "eos_token_id"),
        bos_token_id=first_token_id(hf, "bos_token_id"),
        hf=dict(hf),
    )


class GptLayer(Composite):
    """qkv → attention → output, up → activation → down, a norm before or after each; sums are fused."""

    def __init__(self, config: ModelConfig, kind: GptConfig, factory: LayerFactory, index: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._norm_first = kind.norm_first
        self.attention_norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        self.qkv = factory.linear(3 * hidden, hidden, kind.bias)
        self.attention = factory.attention(
            index, config.num_heads, config.num_heads, config.head_dim, kind.scales[index]
        )
        self.output = factory.linear(hidden, hidden, kind.bias)
        self.mlp_norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        self.up = factory.linear(inner, hidden, kind.bias)
        # relu is part of the GEMM's epilogue
        self.activation = None if kind.activation == "relu" else factory.activation(kind.activation)
        self.down = factory.linear(hidden, inner, kind.bias)

    def attend(self, hidden: Tensor, update: Tensor | None, batch: Batch, pool: Pool) -> Tensor:
        """The output projection's input [T, hidden]. `update` is added to hidden [T, hidden] first."""
        x = _normed(self.attention_norm, hidden, update) if self._norm_first else hidden
        return self.attention(self.qkv(x, lora=batch.lora), batch, pool)

    def finish(
        self, attended: Tensor, hidden: Tensor, lora: LoraBatch | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rest of the layer, token by token: hidden states, and an update still to be added to them.

        The next norm adds the update, in one kernel.
        """
        output = self.output(attended, lora=lora)
        x = (self.mlp_norm if self._norm_first else self.attention_norm).add(output, hidden)
        inner = self.activation(self.up(x, lora=lora)) if self.activation else self.up.relu(x, lora)
        update = self.down(inner, lora=lora)
        if self._norm_first:
            return hidden, update
        return self.mlp_norm.add(update, x), None


def _normed(norm: LayerNorm, hidden: Tensor, update: Tensor | None) -> Tensor:
    """The norm of hidden, to which `update` is added in place."""
    return norm(hidden) if update is None else norm.add(update, hidden)


class GptDecoder(LayerStack):
    """Token and position embeddings, layers, a final norm, the output head."""

    recordable = False  # sums and activations between kernels are torch's

    def __init__(self, config: ModelConfig, kind: GptConfig, factory: LayerFactory) -> None:
        self.config = config
        self._select = factory.row_selection()
        hidden = config.hidden_size
        width = kind.embedding_width or hidden
        self.tokens = factory.embedding(config.vocab_size, width)
        self.positions = factory.embedding(config.max_position, hidden, kind.skipped_positions)
        self.project_in = factory.linear(hidden, width) if width != hidden else None
        self.project_out = factory.linear(width, hidden) if width != hidden else None
        self.blocks: list[GptLayer] = [GptLayer(config, kind, factory, i) for i in range(config.num_layers)]
        self.stack: list[Layer] = [*self.blocks]
        self.norm: LayerNorm | None = None
        if kind.final_norm:
            self.norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        tied_to = self.tokens if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, width, tied_to)

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        hidden = self.tokens(batch.token_ids, batch.lora)
        if self.project_in is not None:
            hidden = self.project_in(hidden, lora=batch.lora)
        hidden = hidden + self.positions(batch.positions, batch.lora)
        update: Tensor | None = None
        for layer in self.stack[:-1]:
            hidden, update = layer.finish(layer.attend(hidden, update, batch, pool), hidden, batch.lora)
        # what follows the last attention is needed only where logits are
        last, wanted = self.stack[-1], batch.logits_indices
        attended = last.attend(hidden, update, batch, pool)
        hidden, update = last.finish(
            self._select(attended, wanted), self._select(hidden, wanted), batch.wanted_lora
        )
        if self.norm is not None:
            hidden = _normed(self.norm, hidden, update)
        elif update is not None:
            hidden = hidden + update
        return hidden if self.project_out is None else self.project_out(hidden, lora=batch.wanted_lora)

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        return self.head(hidden, lora)
