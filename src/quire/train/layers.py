"""The layers of a model in training, made by the factory calls of model files, which do not know the difference."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.kernels.registry import REFERENCE, choose, load
from quire.layers.attention import Attention, Pool
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.linear import OutputHead, TokenEmbedding
from quire.layers.lora import LoraBatch
from quire.layers.norm import RMSNorm
from quire.models.model import Layer
from quire.quant.encoded import Weight
from quire.train import differentiable
from quire.train.frozen import FrozenFormat, FrozenMatrix, Store, StoredWeight, keep


class StoredEmbedding(TokenEmbedding):
    """A table that is stored as `store` gives it, and restored to read rows of it."""

    def __init__(self, store: Store, *args: Any) -> None:
        super().__init__(*args)
        self._store = store
        self.stored: StoredWeight | None = None

    def load(self, weight: Weight) -> None:
        super().load(weight)
        self.stored = self._store(self.table)
        if self.stored is not None:
            self._table = None

    def __call__(self, ids: Tensor, lora: LoraBatch | None = None) -> Tensor:
        if self.stored is None:
            return super().__call__(ids, lora)
        self._table = self.stored.restore()
        rows = super().__call__(ids, lora)
        self._table = None
        return rows


class StoredHead(OutputHead):
    """An output head that is tied to a StoredEmbedding."""

    def _take(self, weight: Weight) -> None:
        table, matrix = self._tied_to, self._matrix
        assert isinstance(table, StoredEmbedding)
        assert isinstance(matrix, FrozenMatrix)
        table.load(weight)
        if table.stored is not None:
            matrix.share(table.stored)
        else:
            matrix.adopt(table.head_state())


class TrainFactory(LayerFactory):
    """Layers of plain torch, with gradients."""

    def __init__(self, number_format: FrozenFormat, device: torch.device, max_position: int) -> None:
        super().__init__(number_format, device, max_position)
        self._frozen = number_format
        self.tables: list[StoredEmbedding] = []

    def embedding(self, num_rows: int, width: int, first_row: int = 0, scale: float = 1.0) -> TokenEmbedding:
        kernel, store = self.kernel("embedding"), self._frozen.store_table
        made = StoredEmbedding(store, kernel, num_rows, width, self._frozen, self.device, first_row, scale)
        self.tables.append(made)
        return made

    def output_head(self, vocab_size: int, width: int, tied_to: TokenEmbedding | None = None) -> OutputHead:
        if tied_to is None:
            return super().output_head(vocab_size, width)
        matrix = FrozenMatrix(vocab_size, width, self.dtype, self.device, keep)
        return StoredHead(matrix, tied_to, share=True)

    def kernel(self, operation: str) -> ModuleType:
        own = operation in ("norm", "activation")
        return sys.modules[differentiable.__name__] if own else load(operation, REFERENCE)

    def attention(self, *args: Any, **settings: Any) -> Attention:
        made = super().attention(*args, **settings)
        fused = None
        if self.device.type == "cuda" and fuses(made.head_dim, self.dtype, self.device):
            fused = Fused(choose("rotary", self.device), choose("packed_attention", self.device))
        settings = {name: getattr(made, name) for name in Attention.__slots__}
        return PackedAttention(**settings, fused=fused)


def fuses(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the tiles fit in registers and shared memory: others have torch's attention."""
    return head_dim <= 128 and dtype.itemsize == 2 and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True, slots=True)
class Fused:
    """A GPU's kernels of attention, which have backward passes of their own."""

    rotary: ModuleType
    attention: ModuleType


class _Rotated(torch.autograd.Function):
    """Of q and k in qkv [T, (heads + 2 * kv_heads) * head_dim], in place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, kernel: ModuleType, layer: Attention, positions: Tensor) -> Tensor:
        ctx.kernel, ctx.layer = kernel, layer
        ctx.save_for_backward(positions)
        ctx.mark_dirty(qkv)
        assert layer.cos_sin is not None
        _rotate(kernel, qkv, layer, layer.cos_sin, positions)
        return qkv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        cosine, sine = ctx.layer.cos_sin.chunk(2, dim=1)
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        _rotate(ctx.kernel, grad, ctx.layer, torch.cat((cosine, -sine), dim=1), positions)
        return grad, None, None, None


def _rotate(kernel: ModuleType, qkv: Tensor, layer: Attention, table: Tensor, positions: Tensor) -> None:
    """By the kernel that serving has, which stores nothing here."""
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    no_slots = torch.full_like(positions, -1, dtype=torch.int64)
    page = qkv.new_empty(1, 1, *heads[1:])
    kernel.rotate_and_store(qkv, *heads, table, positions.int(), no_slots, page, page)


class _Packed(torch.autograd.Function):
    """All sequences of a batch in one kernel, and its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        max_len: int,
        scale: float,
        kernel: ModuleType,
    ) -> Tensor:
        out, sums = kernel.forward(q, k, v, starts, max_len, scale)
        ctx.save_for_backward(q, k, v, out, sums, starts)
        ctx.rest = (max_len, scale)
        ctx.kernel = kernel
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.kernel.backward(grads[0], *ctx.saved_tensors, *ctx.rest), None, None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttention(Attention):
    """Causal attention within each of the batch's sequences (`batch.fresh`): there are no pages, and no pool."""

    fused: Fused | None = None  # None: torch's own operations, one sequence after the other

    def __call__(
        self,
        qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
        batch: Batch,
        pool: Pool,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, heads * head_dim]
        assert sinks is None, "no architecture that is trained has attention sinks"
        rotates = self.cos_sin is not None
        if self.fused is not None and self.cos_sin is not None and q_norm is None:
            qkv, rotates = _Rotated.apply(qkv, self.fused.rotary, self, batch.positions), False
        q, k, v = qkv.split([n * self.head_dim for n in (self.num_heads, *[self.num_kv_heads] * 2)], dim=1)
        if q_norm is not None and k_norm is not None:  # as wide as a head, or as all of them
            q = q_norm(q.unflatten(1, (-1, q_norm.weight.shape[0]))).flatten(1)
            k = k_norm(k.unflatten(1, (-1, k_norm.weight.shape[0]))).flatten(1)
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        if rotates and self.cos_sin is not None:
            table = self.cos_sin[batch.positions.long()]
            q, k = _rotated(q, table), _rotated(k, table)
        lengths = [span.last - span.first for span in batch.fresh]
        if self.fused is not None and not self.window and not self.soft_cap and self.slopes is None:
            given = (batch.query_starts, max(lengths), self.scale, self.fused.attention)
            attended: Tensor = _Packed.apply(q, k, v, *given)
            return attended.flatten(1)
        group = self.num_heads // self.num_kv_heads
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self._attend_one(*part) for part in parts])

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One sequence: [T, heads, head_dim] each -> [T, heads * head_dim]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        windowed = 0 < self.window < q.shape[2]
        if not windowed and not self.soft_cap and self.slopes is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            out = self._scores(q @ k.transpose(2, 3) * self.scale, windowed).softmax(-1) @ v
        return out[0].transpose(0, 1).flatten(1)

    def _scores(self, scores: Tensor, windowed: bool) -> Tensor:
        """Soft cap, ALiBi and window: [1, heads, T, T]."""
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        at = torch.arange(scores.shape[-1], device=scores.device)
        distance = at[None, :] - at[:, None]
        if self.slopes is not None:
            scores = scores + (self.slopes[:, None, None] * distance).to(scores.dtype)
        hidden = distance > 0
        if windowed:
            hidden |= distance <= -self.window
        return scores.masked_fill(hidden, float("-inf"))


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, head_dim], cos_sin [T, rotary_dim]: the first rotary_dim of each head are rotated."""
    half = cos_sin.shape[1] // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class RecomputedLayer:
    """Activation checkpointing: of a layer only its inputs are kept, and the backward pass computes it again.

    Both parts of the layer are one unit, since the first one may change its inputs in place: `attend` keeps its
    arguments, and `finish` computes. Not for the last layer, whose rows are selected between the parts.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._inputs: tuple[Any, ...] = ()
        self.layers = layer.layers

    def attend(self, *inputs: Any) -> Tensor:
        self._inputs = inputs
        kept: Tensor = inputs[0]
        return kept

    def finish(self, _attended: Tensor, _hidden: Tensor, lora: LoraBatch | None) -> Any:
        inputs, self._inputs = self._inputs, ()
        return checkpoint(self._whole, lora, *inputs, use_reentrant=False)

    def _whole(self, lora: LoraBatch | None, *inputs: Any) -> Any:
        own = tuple(item.clone() if isinstance(item, Tensor) else item for item in inputs)
        return self._layer.finish(self._layer.attend(*own), own[0], lora)
