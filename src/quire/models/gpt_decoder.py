"""GptDecoder: layer norms, and a feed-forward of two matrices. gpt_variants.py has its architectures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraBatch
from quire.layers.norm import LayerNorm
from quire.layers.parameters import Composite, LayerStack, Loader
from quire.models.model import Layer


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
    attention_bias: bool | None = None  # of attention's projections, where they differ from the others
    positions: bool = True  # learned ones are added to embeddings
    rope: Mapping[str, Any] | None = None  # settings of the rotation of q and k
    slopes: tuple[float, ...] = ()  # per head, of ALiBi
    window: int = 0
    embedding_norm: bool = False
    parallel: bool = False  # attention and feed-forward take the same hidden states
    shared_norm: bool = False  # and the same norm of them
    # The fused projection has the queries of a KV head, its key, its value, then the next.
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Of a checkpoint's modules. Those of a layer follow `layer` and its number."""

    tokens: str
    norm: str
    layer: str
    qkv: tuple[str, ...]  # one fused module, or q, k and v
    output: str
    up: str
    down: str
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    head: str = "lm_head"
    positions: str = ""
    embedding_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    transposed: bool = False  # matrices are [inputs, outputs]


class GptLayer(Composite):
    """qkv → attention → output, up → activation → down, a norm before or after each; sums are fused."""

    def __init__(
        self,
        config: ModelConfig,
        kind: GptConfig,
        factory: LayerFactory,
        index: int,
        cos_sin: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        attention_bias = kind.bias if kind.attention_bias is None else kind.attention_bias
        self._norm_first, self._parallel = kind.norm_first, kind.parallel
        # with one KV head that order is the usual one
        self._groups = (kv_heads, heads // kv_heads) if kind.grouped and kv_heads > 1 else None
        self.attention_norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        self.qkv = factory.linear((heads + 2 * kv_heads) * head_dim, hidden, attention_bias)
        scale, window = kind.scales[index], kind.window
        self.attention = factory.attention(
            index, heads, kv_heads, head_dim, scale, window, cos_sin, slopes=slopes
        )
        self.output = factory.linear(hidden, heads * head_dim, attention_bias)
        self.mlp_norm: LayerNorm | None = None  # attention's is taken
        if not kind.shared_norm:
            self.mlp_norm = factory.layer_norm(hidden, kind.eps, kind.affine)
        self.up = factory.linear(inner, hidden, kind.bias)
        # relu is part of the GEMM's epilogue
        self.activation = None if kind.activation == "relu" else factory.activation(kind.activation)
        self.down = factory.linear(hidden, inner, kind.bias)

    def attend(self, hidden: Tensor, update: Tensor | None, batch: Batch, pool: Pool) -> Tensor:
        """The output projection's input [T, hidden]. `update` is added to hidden [T, hidden] first."""
        x = _normed(self.attention_norm, hidden, update) if self._norm_first else hidden
        qkv = self.qkv(x, lora=batch.lora)
        return self.attention(qkv if self._groups is None else _apart(qkv, *self._groups), batch, pool)

    def finish(
        self, attended: Tensor, hidden: Tensor, lora: LoraBatch | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rest of the layer, token by token: hidden states, and an update still to be added to them.

        The next norm adds the update, in one kernel.
        """
        mlp_norm = self.mlp_norm or self.attention_norm
        if self._parallel:
            inner = self._inner(mlp_norm(hidden), lora)
            return self.down(inner, self.output(attended, hidden, lora), lora), None
        output = self.output(attended, lora=lora)
        x = (mlp_norm if self._norm_first else self.attention_norm).add(output, hidden)
        update = self.down(self._inner(x, lora), lora=lora)
        if self._norm_first:
            return hidden, update
        return mlp_norm.add(update, x), None

    def _inner(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.activation(self.up(x, lora=lora)) if self.activation else self.up.relu(x, lora)


def _apart(qkv: Tensor, num_kv_heads: int, group: int) -> Tensor:
    """[T, rows] of groups (queries, key, value) -> all queries, all keys, all values. Weights stay in the checkpoint's
    order, which adapters share."""
    heads = qkv.unflatten(1, (num_kv_heads, group + 2, -1))
    return torch.cat(
        (heads[:, :, :group].flatten(1), heads[:, :, group].flatten(1), heads[:, :, -1].flatten(1)), 1
    )


def _normed(norm: LayerNorm, hidden: Tensor, update: Tensor | None) -> Tensor:
    """The norm of hidden, to which `update` is added in place."""
    return norm(hidden) if update is None else norm.add(update, hidden)


class GptDecoder(LayerStack):
    """Token and position embeddings, layers, a final norm, the output head."""

    recordable = False  # sums and activations between kernels are torch's

    def __init__(self, config: ModelConfig, kind: GptConfig, names: Names, factory: LayerFactory) -> None:
        self.config = config
        self._names = names
        self._select = factory.row_selection()
        hidden = config.hidden_size
        width = kind.embedding_width or hidden
        self.tokens = factory.embedding(config.vocab_size, width)
        self.positions = None
        if kind.positions:
            self.positions = factory.embedding(config.max_position, hidden, kind.skipped_positions)
        self.project_in = factory.linear(hidden, width) if width != hidden else None
        self.project_out = factory.linear(width, hidden) if width != hidden else None
        self.embedding_norm: LayerNorm | None = None
        if kind.embedding_norm:
            self.embedding_norm = factory.layer_norm(hidden, kind.eps)
        cos_sin, slopes = None, None
        if kind.rope is not None:
            cos_sin = factory.rotary(kind.rope, config.head_dim, config.max_position)
        if kind.slopes:
            slopes = torch.tensor(kind.slopes, dtype=torch.float32, device=factory.device)
        self.blocks: list[GptLayer] = [
            GptLayer(config, kind, factory, i, cos_sin, slopes) for i in range(config.num_layers)
        ]
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
        if self.positions is not None:
            hidden = hidden + self.positions(batch.positions, batch.lora)
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
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

    def loaders(self) -> dict[str, Loader]:
        names = self._names
        loaders = self.head.loaders(self.tokens, f"{names.tokens}.weight", f"{names.head}.weight")
        if self.positions is not None:
            loaders[f"{names.positions}.weight"] = self.positions.loader()
        if self.norm is not None:
            loaders |= self.norm.loaders(names.norm)
        if self.embedding_norm is not None:
            loaders |= self.embedding_norm.loaders(names.embedding_norm)
        if self.project_in is not None and self.project_out is not None:
            loaders |= self.project_in.loaders(names.project_in)
            loaders |= self.project_out.loaders(names.project_out)
        for i, block in enumerate(self.blocks):
            loaders |= self._layer_loaders(f"{names.layer}{i}.", block)
        return loaders

    def _layer_loaders(self, prefix: str, block: GptLayer) -> dict[str, Loader]:
        names, config = self._names, self.config
        loaders = block.attention_norm.loaders(f"{prefix}{names.attention_norm}")
        if block.mlp_norm is not None:
            loaders |= block.mlp_norm.loaders(f"{prefix}{names.mlp_norm}")
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [f"{prefix}{name}" for name in names.qkv]
        if len(qkv) == 3:
            loaders |= block.qkv.part_loaders(dict(zip(qkv, (query, key, key), strict=True)))
        else:
            loaders |= block.qkv.loaders(qkv[0], transposed=names.transposed)
        for name, linear in ((names.output, block.output), (names.up, block.up), (names.down, block.down)):
            loaders |= linear.loaders(f"{prefix}{name}", transposed=names.transposed)
        return loaders
