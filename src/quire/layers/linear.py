"""Layers with a matrix: token and position embeddings, linear projections, the output head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.layers.lora import LoraBatch
from quire.layers.norm import RMSNorm
from quire.layers.parameters import Adaptable, LayerPart, Loader, Vector, check_finite, check_shape
from quire.parallel.group import Group
from quire.quant.encoded import Encoded, Weight, floats
from quire.quant.format import Matrix, NumberFormat
from quire.quant.schemes import from_parameters, parameter_names


class TokenEmbedding(Adaptable):
    """A table [num_rows, width]; results are in the model's activation type.

    With compact tables a 16-bit one stays as it is and a 32-bit one becomes float16: it is only read row by row.
    """

    def __init__(
        self,
        kernel: ModuleType,
        num_rows: int,
        width: int,
        number_format: NumberFormat,
        device: torch.device,
        first_row: int = 0,
        scale: float = 1.0,
    ) -> None:
        """`scale`: of the rows with their adapters, when they are read."""
        super().__init__()
        self._kernel = kernel
        self._format = number_format
        self._scale = scale
        self._encoded: Encoded | None = None  # in place of a table
        self._shape = (num_rows, width)
        self._dtype = number_format.activation_dtype
        self._device = device
        self._first_row = first_row  # rows of the checkpoint's table before the first that is kept
        self._table: Tensor | None = None  # [num_rows, width]

    @property
    def table(self) -> Tensor:
        assert self._table is not None, "an embedding must be loaded before it is used"
        return self._table

    @property
    def recordable(self) -> bool:
        """Whether reading rows is one native operation: the scale of an encoded table is torch's."""
        return self._encoded is None or self._scale == 1.0

    def __call__(self, ids: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """ids [T] int32 or int64 -> [T, width], plus the rows' adapters."""
        group = None if lora is None else self._adapted(lora)
        scale = self._scale if group is None else 1.0
        if self._encoded is None:
            rows = self._kernel.gather(self._table, ids, dtype=self._dtype, scale=scale)
        else:
            rows = self._encoded.gather(ids).to(self._dtype)
            rows = rows if scale == 1.0 else rows.mul_(scale)
        if group is None or lora is None:
            return rows
        num_ids = self._first_row + self._shape[0]
        rows = group.add_embedded(ids, rows, lora, num_ids, self._first_row)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def loader(self) -> Loader:
        num_rows, width = self._first_row + self._shape[0], self._shape[1]
        return Loader((num_rows, width), self.load, (LayerPart(self, 0, width, num_rows, is_embedding=True),))

    def load(self, weight: Weight) -> None:
        """weight [first_row + num_rows, width]."""
        if isinstance(weight, Encoded) and not self._first_row:
            self._encoded = self._format.table(weight)
            if self._encoded is not None:
                return
        tensor = floats(weight)
        scheme = self._format.table_scheme(self._shape[1])
        if scheme is not None and not self._first_row:
            if tensor.device.type == "meta":
                self._encoded = Encoded.empty(scheme, self._shape)
            else:
                self._encoded = Encoded.of(scheme, tensor.to(self._device))
            return
        if self._format.compact_tables:  # the formats that round; 16-bit models show NaN in every answer
            check_finite(tensor)
        kept = self._kept_dtype(tensor)
        self._table = tensor[self._first_row :].to(device=self._device, dtype=kept, copy=True)

    def _kept_dtype(self, tensor: Tensor) -> torch.dtype:
        if not self._format.compact_tables:
            return self._dtype
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.dtype
        return torch.float16

    def state(self) -> dict[str, Tensor]:
        return {"table": self.table} if self._encoded is None else parameter_names({0: self._encoded})

    def head_state(self, rows: slice | None = None) -> dict[str, Tensor]:
        """As a matrix adopts it: of all rows, or of some."""
        if self._encoded is None:
            return {"weight": self.table if rows is None else self.table[rows]}
        return (
            self.state() if rows is None else parameter_names({0: self._encoded.rows(rows.start, rows.stop)})
        )

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        if "table" not in state:
            self._encoded = from_parameters(state, self._shape)[0].to(self._device)
            return
        check_shape(state["table"], self._shape)
        self._table = state["table"].to(self._device)


HEAD = "lm_head"  # a tied head's module, whose tensor is the embedding's


class RowSelection:
    """Some rows of a tensor, by a native kernel where there is one, so that a tape can record it."""

    def __init__(self, kernel: ModuleType, dtype: torch.dtype) -> None:
        self._gather = kernel.gather
        self._dtype = dtype

    def __call__(self, rows: Tensor, indices: Tensor | None) -> Tensor:
        """rows [T, width], indices [L] -> [L, width]; without indices the rows as they are."""
        return rows if indices is None else self._gather(rows, indices, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """Ranks that have some of a linear's columns each."""

    group: Group
    widths: tuple[int, ...]  # columns of each rank
    tag: str  # what the bytes that they exchange are counted as


class Linear(Adaptable):
    """y = x @ weight.T (+ bias) (+ residual) (+ the rows' adapters, `lora`). Fused ones are loaded part by part."""

    def __init__(
        self,
        matrix: Matrix,
        bias: Vector | None,
        silu_mul: Callable[[Tensor], Tensor],
        ranks: JoinedRanks | None = None,
    ) -> None:
        """`ranks`: x is some of the columns, and the result the sum over these ranks."""
        super().__init__()
        self._ranks = ranks
        self._matrix = matrix
        self._bias = bias
        self._silu_mul = silu_mul  # for GEMMs that adapters add to before the activation

    def __call__(self, x: Tensor, residual: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        """x [T, columns], residual [T, rows] -> [T, rows]. The residual may be overwritten."""
        bias, ranks = self._bias.value if self._bias else None, self._ranks
        if ranks is None:
            y = self._matrix.linear(x, bias, residual)
        else:
            y = self._matrix.joined(x, bias, residual, ranks.group, ranks.tag)
        group = None if lora is None else self._adapted(lora)
        if group is None or lora is None:
            return y
        if ranks is not None and group.takes_whole_rows:  # every rank has the whole adapter
            x = ranks.group.all_gather(x, ranks.widths, "adapters")
        return group.add(x, y, lora)

    def silu_mul(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """For a fused gate | up projection: silu(gate) * up [T, rows / 2]."""
        if lora is not None and self._adapted(lora) is not None:
            return self._silu_mul(self(x, lora=lora))
        return self._matrix.linear_silu_mul(x, self._bias.value if self._bias else None)

    def relu(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """max(self(x), 0)."""
        if lora is not None and self._adapted(lora) is not None:
            return self(x, lora=lora).relu_()
        return self._matrix.linear_relu(x, self._bias.value if self._bias else None)

    def normed(self, x: Tensor, norm: RMSNorm | None, lora: LoraBatch | None = None) -> Tensor:
        """self(norm(x))."""
        if norm is None:
            return self(x, lora=lora)
        fused = self._fused(x, norm, lora, silu_mul=False)
        return self(norm(x), lora=lora) if fused is None else fused

    def normed_silu_mul(self, x: Tensor, norm: RMSNorm | None, lora: LoraBatch | None = None) -> Tensor:
        """self.silu_mul(norm(x))."""
        if norm is None:
            return self.silu_mul(x, lora)
        fused = self._fused(x, norm, lora, silu_mul=True)
        return self.silu_mul(norm(x), lora) if fused is None else fused

    def _fused(self, x: Tensor, norm: RMSNorm, lora: LoraBatch | None, silu_mul: bool) -> Tensor | None:
        """Norm and GEMM in one kernel, if there is one; an adapter needs the norm's result."""
        if (
            not self._matrix.fuses_norm
            or self._bias
            or (lora is not None and self._adapted(lora) is not None)
        ):
            return None
        return self._matrix.normed(x, norm.weight, norm.eps, silu_mul=silu_mul)

    def loaders(
        self, name: str, first_row: int = 0, num_rows: int | None = None, transposed: bool = False
    ) -> dict[str, Loader]:
        """For the checkpoint tensors `name`.weight and, with a bias, `name`.bias.

        They fill `num_rows` rows (default: all) from `first_row` on. `transposed`: the weight is [columns, rows] there.
        """
        count = self._matrix.num_rows if num_rows is None else num_rows
        shape = (count, self._matrix.num_columns)

        def take(weight: Weight) -> None:
            self._matrix.load(first_row, floats(weight).t() if transposed else weight)

        num_inputs = shape[1] if self._ranks is None else sum(self._ranks.widths)
        part = LayerPart(self, first_row, count, num_inputs)
        loaders = {f"{name}.weight": Loader(shape[::-1] if transposed else shape, take, (part,))}
        if self._bias is not None:
            loaders[f"{name}.bias"] = self._bias.loader(first_row, count)
        return loaders

    def part_loaders(self, parts: Mapping[str, int]) -> dict[str, Loader]:
        """As `loaders`, of a fused projection: the names of its parts in their order, and how many rows each has."""
        loaders: dict[str, Loader] = {}
        first_row = 0
        for name, num_rows in parts.items():
            loaders |= self.loaders(name, first_row, num_rows)
            first_row += num_rows
        return loaders

    def state(self) -> dict[str, Tensor]:
        kept = self._matrix.state()
        if self._bias is not None:
            kept["bias"] = self._bias.value
        return kept

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self._matrix.adopt(state)
        if self._bias is not None:
            self._bias.adopt(state["bias"])


class OutputHead(Adaptable):
    """Hidden states to logits. A tied head has the embedding's weights, in one memory where `share` is true."""

    def __init__(
        self,
        matrix: Matrix,
        tied_to: TokenEmbedding | None = None,
        share: bool = False,
        ranks: JoinedRanks | None = None,
    ) -> None:
        """`ranks`: the matrix has some of the rows, and rank 0 gets the logits of all."""
        super().__init__()
        self._matrix = matrix
        self._tied_to = tied_to
        self._share = share and tied_to is not None
        self._ranks = ranks
        self._num_rows = matrix.num_rows if ranks is None else sum(ranks.widths)
        first = 0 if ranks is None else sum(ranks.widths[: ranks.group.rank])
        self._rows = slice(first, first + matrix.num_rows)

    def __call__(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """hidden [L, width] -> logits [L, vocab] float32."""
        logits, ranks = self._matrix.logits(hidden), self._ranks
        if ranks is not None:
            logits = ranks.group.gather(logits, ranks.widths, ranks.tag)
            lora = lora if ranks.group.rank == 0 else None
        group = None if lora is None else self._adapted(lora)
        return logits if group is None or lora is None else group.add(hidden, logits, lora)

    def loaders(self, table: TokenEmbedding, table_name: str, name: str) -> dict[str, Loader]:
        """For the checkpoint's token table and the head's matrix; a tied head's is the table, which loads both."""
        if self._tied_to is not None:
            return {table_name: self._loader()}
        return {table_name: table.loader(), name: self._loader()}

    def _loader(self) -> Loader:
        shape = (self._num_rows, self._matrix.num_columns)
        parts: tuple[LayerPart, ...] = (LayerPart(self, 0, *shape, module=HEAD),)
        if self._tied_to is not None:
            parts += self._tied_to.loader().parts
        return Loader(shape, self._take, parts)

    def _take(self, weight: Weight) -> None:
        if self._tied_to is not None:
            self._tied_to.load(weight)
        if self._share:
            self.adopt({})
        else:
            self._matrix.load(0, self._cut(weight))

    def _cut(self, weight: Weight) -> Weight:
        """The rows of this rank."""
        if self._ranks is None:
            return weight
        if isinstance(weight, Encoded):
            return weight.rows(self._rows.start, self._rows.stop)
        return floats(weight)[self._rows]

    def state(self) -> dict[str, Tensor]:
        return {} if self._share else self._matrix.state()

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """A head that shares takes the table that its embedding has by now."""
        if self._share and self._tied_to is not None:
            state = self._tied_to.head_state(self._rows if self._ranks is not None else None)
        self._matrix.adopt(state)
