"""LayerFactory: builds layers for one device and number format, so that model files know neither."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.core.layout import LayerGroups
from quire.kernels import choose
from quire.kernels.registry import REFERENCE, load
from quire.layers.attention import Attention
from quire.layers.cross import CrossAttention, DistanceTable
from quire.layers.encoder import FullAttention
from quire.layers.linear import JoinedRanks, Linear, OutputHead, RowSelection, TokenEmbedding
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.parameters import Vector
from quire.layers.rope import rotary_table
from quire.parallel.cut import Cut
from quire.parallel.group import Group
from quire.quant.choice import choose_format
from quire.quant.format import NumberFormat
from quire.quant.full import FullPrecision

# Activations of feed-forward layers, by the names that config.json uses.
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
KNOWN = ("relu", "gelu", *_TANH)
GATES = ("silu", "gelu", *_TANH)

ATTENTION, MLP, LOGITS = "attention", "mlp", "logits"  # what ranks have parts of


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that this process computes, and the group that computes the whole."""

    cut: Cut
    group: Group  # that computes each layer
    # Ranks that pass hidden states on; the first embeds and has the output head.
    stages: Group = field(default_factory=Group)
    layers: tuple[int, int] | None = None  # of this stage; None: all
    world: Group = field(default_factory=Group)  # all ranks of all stages
    # [ranks, bytes] uint8 that all of them map; None: no rank needs the others' bytes
    shared: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.stages.rank == 0

    def close(self) -> None:
        self.world.close()

    def __str__(self) -> str:
        if self.layers is None:
            return str(self.cut)
        return f"{self.cut}; stage 0 of {self.stages.size} has layers 0 to {self.layers[1] - 1}"

    def joined(self, what: str) -> JoinedRanks | None:
        """None: a rank has all of it."""
        cut = self.cut
        if cut.size == 1:
            return None
        spans = {ATTENTION: cut.heads, MLP: cut.inner, LOGITS: cut.vocab}[what]
        unit = cut.model.head_dim if what == ATTENTION else 1
        return JoinedRanks(self.group, tuple((last - first) * unit for first, last in spans), what)


class LayerFactory:
    """`max_position` caps the tables that grow with the context; None takes the model's own limit. `groups`: which
    layers share a block; None: all.
    """

    def __init__(
        self,
        number_format: NumberFormat,
        device: str | torch.device = "cpu",
        max_position: int | None = None,
        part: RankPart | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """`part`: of a model that several ranks hold."""
        self.part = part
        self._groups = groups
        self.device = torch.device(device)
        self.number_format = number_format
        self.dtype = number_format.activation_dtype
        self.max_position = max_position

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        quantization: str = "auto",
        max_position: int | None = None,
    ) -> "LayerFactory":
        """As the user's settings ask for it."""
        chosen = choose_format(device, dtype, quantization, config.dtype, quantized=config.quantized)
        return cls(chosen, device, max_position)

    @property
    def recordable(self) -> bool:
        """Whether layers are made of native operations only, so that a tape can replay them."""
        names = ("norm", "rotary", "attention", "activation", "embedding")
        native = all(not self.kernel(name).__name__.endswith(REFERENCE) for name in names)
        return native and self.device.type == "cpu" and self.number_format.native

    def kernel(self, operation: str) -> ModuleType:
        """The best alternative for this factory's device and type; native CPU code takes float32 only."""
        if self.device.type == "cpu" and self.dtype is not torch.float32:
            return load(operation, REFERENCE)
        return choose(operation, self.device)

    def linear(self, num_rows: int, num_columns: int, bias: bool = False, joined: str = "") -> Linear:
        """A projection from num_columns to num_rows; fused ones are the sum of their rows.

        `joined` is ATTENTION or MLP where its input is what ranks have of that part: results are summed over them.
        """
        matrix = self.number_format.matrix(num_rows, num_columns)
        vector = self._vector(num_rows) if bias else None
        ranks = self.part.joined(joined) if joined and self.part is not None else None
        return Linear(matrix, vector, self.kernel("activation").silu_mul, ranks)

    def precise_linear(self, num_rows: int, num_columns: int, bias: bool = False) -> Linear:
        """A small projection that is not quantized, such as a classifier's."""
        matrix = FullPrecision(self.dtype, self.device).matrix(num_rows, num_columns)
        return Linear(matrix, self._vector(num_rows) if bias else None, self.kernel("activation").silu_mul)

    def rms_norm(self, width: int, eps: float, scale: float = 1.0, offset: float = 0.0) -> RMSNorm:
        """Weights are those of the checkpoint times `scale` plus `offset`: then in float32, for small weights."""
        dtype = self.dtype if offset == 0.0 else torch.float32
        weight = Vector(width, dtype, self.device, 1.0, scale, offset)
        return RMSNorm(self.kernel("norm"), weight, eps)

    def layer_norm(self, width: int, eps: float, affine: bool = True) -> LayerNorm:
        return LayerNorm(self.kernel("norm"), self._vector(width, 1.0), self._vector(width), eps, affine)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """x [T, width] -> [T, width], by its name in config.json; an unknown one is refused."""
        kernel = self.kernel("activation")
        if name == "relu":
            return kernel.relu
        if name not in KNOWN:
            raise ModelError(
                f"activation {name!r} in config.json is not known: choose one of {', '.join(KNOWN)}"
            )
        return partial(kernel.gelu, approximate="tanh" if name in _TANH else "none")

    def gelu_gate(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """x [T, 2F] (gate | up) -> gelu(gate) * up [T, F]; None for silu, which GEMMs fuse."""
        if name not in GATES:
            raise ModelError(
                f"hidden_act={name!r} in config.json is not known: choose one of {', '.join(GATES)}"
            )
        if name == "silu":
            return None
        return partial(self.kernel("activation").gelu_mul, approximate="tanh" if name in _TANH else "none")

    def embedding(self, num_rows: int, width: int, first_row: int = 0, scale: float = 1.0) -> TokenEmbedding:
        """A table read by row; `first_row` rows of the checkpoint's table come before it and are left out.

        Rows are multiplied by `scale` when read: a tied head has the table as it is.
        """
        kernel = self.kernel("embedding")
        return TokenEmbedding(kernel, num_rows, width, self.number_format, self.device, first_row, scale)

    def output_head(self, vocab_size: int, width: int, tied_to: TokenEmbedding | None = None) -> OutputHead:
        """Logits; `tied_to` gives the same weights, shared in memory where the format allows it."""
        ranks = None if self.part is None else self.part.joined(LOGITS)
        num_rows = vocab_size if ranks is None else ranks.widths[ranks.group.rank]
        matrix = self.number_format.head(num_rows, width)
        return OutputHead(matrix, tied_to, not self.number_format.compact_tables, ranks)

    def row_selection(self) -> RowSelection:
        """Takes the rows of hidden states whose logits are wanted."""
        return RowSelection(self.kernel("embedding"), self.dtype)

    def rotary(self, hf: Mapping[str, Any], head_dim: int, max_position: int) -> Tensor:
        """[positions, rotary_dim] float32, one table for all layers."""
        positions = min(max_position, self.max_position or max_position)
        return rotary_table(hf, head_dim, positions).to(self.device)

    def attention(
        self,
        index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int = 0,
        cos_sin: Tensor | None = None,
        soft_cap: float = 0.0,
        slopes: Tensor | None = None,
    ) -> Attention:
        """Attention of layer `index`; the scale is 1 / sqrt(head_dim) by default. The rest as Attention has it."""
        group, in_group = 0, index
        if self.part is not None and self.part.layers is not None:
            in_group -= self.part.layers[0]  # the pool has the layers of this stage
        elif self._groups is not None:
            group, in_group = self._groups.places[index]
        return Attention(
            self.kernel("rotary"),
            self.kernel("attention"),
            in_group,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            window,
            cos_sin,
            soft_cap,
            slopes,
            group,
        )

    def full_attention(
        self,
        num_heads: int,
        head_dim: int,
        reach: int = 0,
        cos_sin: Tensor | None = None,
        scale: float | None = None,
        slopes: Tensor | None = None,
    ) -> FullAttention:
        """An encoder's attention: every token sees its whole sequence, or `reach` tokens on each side."""
        kernels = self.kernel("rotary"), self.kernel("attention")
        scale = head_dim**-0.5 if scale is None else scale
        return FullAttention(*kernels, num_heads, head_dim, scale, reach, cos_sin, slopes)

    def cross_attention(
        self, index: int, num_heads: int, head_dim: int, scale: float | None = None
    ) -> CrossAttention:
        """A decoder layer's attention over what the encoder made of the prompt."""
        scale = head_dim**-0.5 if scale is None else scale
        kernels = self.kernel("rotary"), self.kernel("attention")
        return CrossAttention(*kernels, index, num_heads, head_dim, scale)

    def distance_table(
        self, num_heads: int, num_buckets: int, max_distance: int, both_sides: bool
    ) -> DistanceTable:
        """Learned scores by distance, one table for all layers that share it."""
        return DistanceTable(num_heads, num_buckets, max_distance, both_sides, self.device)

    def bias(self, size: int) -> Vector:
        """A bias on its own, loaded apart from its matrix."""
        return self._vector(size)

    def _vector(self, size: int, fill: float = 0.0) -> Vector:
        return Vector(size, self.dtype, self.device, fill)
