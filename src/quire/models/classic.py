"""The decoder that OPT and GPT-2 share: layer norms, biases, learned positions. Their files own the names."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.loader import Loader
from quire.layers.norm import LayerNorm
from quire.layers.pool import Pool
from quire.layers.state import Stateful, collect, distribute
from quire.models.model import Layer


@dataclass(frozen=True, slots=True)
class Classic:
    """What sets one decoder of this kind apart."""

    activation: str
    eps: float
    scales: tuple[float, ...]  # of attention's scores, per layer
    bias: bool = True  # of every projection
    affine: bool = True  # norms have weights
    norm_first: bool = True  # False: after each sum, as in OPT-350m
    final_norm: bool = True
    embedding_width: int | None = None  # other than the hidden size: projected in and out
    skipped_positions: int = 0  # rows of the checkpoint's position table before position 0


class ClassicLayer:
    """qkv → attention → output, up → activation → down, a norm before or after each; sums are fused."""

    def __init__(self, config: ModelConfig, kind: Classic, factory: LayerFactory, index: int) -> None:
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
        self.activation = factory.activation(kind.activation)
        self.down = factory.linear(hidden, inner, kind.bias)

    def attend(self, hidden: Tensor, batch: Batch, pool: Pool) -> Tensor:
        """hidden [T, hidden] -> attention's result before its output projection [T, hidden]."""
        x = self.attention_norm(hidden) if self._norm_first else hidden
        return self.attention(self.qkv(x), batch, pool)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The rest of the layer, token by token."""
        hidden = self.output(attended, residual=hidden)
        if self._norm_first:
            return self.down(self.activation(self.up(self.mlp_norm(hidden))), residual=hidden)
        hidden = self.attention_norm(hidden)
        return self.mlp_norm(self.down(self.activation(self.up(hidden)), residual=hidden))

    def layers(self) -> dict[str, Stateful]:
        return {
            "attention_norm": self.attention_norm,
            "qkv": self.qkv,
            "output": self.output,
            "mlp_norm": self.mlp_norm,
            "up": self.up,
            "down": self.down,
        }


class ClassicDecoder:
    """Token and position embeddings, layers, a final norm, the output head."""

    recordable = False  # sums and activations between kernels are torch's

    def __init__(self, config: ModelConfig, kind: Classic, factory: LayerFactory) -> None:
        self.config = config
        self._select = factory.select
        hidden = config.hidden_size
        width = kind.embedding_width or hidden
        self.tokens = factory.embedding(config.vocab_size, width)
        self.positions = factory.embedding(config.max_position, hidden, kind.skipped_positions)
        self.project_in = factory.linear(hidden, width) if width != hidden else None
        self.project_out = factory.linear(width, hidden) if width != hidden else None
        self.blocks = [ClassicLayer(config, kind, factory, i) for i in range(config.num_layers)]
        self.stack: list[Layer] = [*self.blocks]
        self.norm: LayerNorm | None = None
        if kind.final_norm:
            self.norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        tied_to = self.tokens if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, width, tied_to)

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        hidden = self.tokens(batch.token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.positions(batch.positions)
        for layer in self.stack[:-1]:
            hidden = layer.finish(layer.attend(hidden, batch, pool), hidden)
        # what follows the last attention is needed only where logits are
        last, wanted = self.stack[-1], batch.logits_indices
        attended = last.attend(hidden, batch, pool)
        hidden = last.finish(self._select(attended, wanted), self._select(hidden, wanted))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def embedding_loaders(self, tokens: str, head: str) -> dict[str, Loader]:
        """For the token table and, where it has weights of its own, the output head."""
        if self.config.tie_word_embeddings:
            return {tokens: self.head.loader()}
        return {tokens: self.tokens.loader(), head: self.head.loader()}

    def parameters(self) -> dict[str, Tensor]:
        return collect(self._layers())

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        distribute(self._layers(), parameters)

    def _layers(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {
            "tokens": self.tokens,
            "positions": self.positions,
            "head": self.head,
        }
        if self.norm is not None:
            found["norm"] = self.norm
        if self.project_in is not None and self.project_out is not None:
            found |= {"project_in": self.project_in, "project_out": self.project_out}
        for i, block in enumerate(self.blocks):
            found |= {f"layers.{i}.{name}": layer for name, layer in block.layers().items()}
        return found
