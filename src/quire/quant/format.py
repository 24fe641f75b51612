"""Number formats: an empty matrix that is filled by slices of rows, then multiplied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels import choose
from quire.parallel.group import Group
from quire.quant.encoded import Columns, Encoded, Scheme, Weight


class Matrix(ABC):
    """A weight [num_rows, num_columns] in some number format. GEMMs are x @ weight.T."""

    fuses_norm = False  # whether `normed` may have a kernel

    def __init__(self, num_rows: int, num_columns: int, activation: ModuleType) -> None:
        """`activation`: the kernel for activations that no GEMM fuses."""
        self.num_rows = num_rows
        self.num_columns = num_columns
        self._activation = activation

    def load(self, first_row: int, rows: Weight) -> None:
        """Fills the weight from `first_row` on."""
        if isinstance(rows, Columns):
            self.load_columns(first_row, rows)
        elif isinstance(rows, Encoded):
            self.load_encoded(first_row, rows)
        else:
            self.load_rows(first_row, rows)

    @abstractmethod
    def load_rows(self, first_row: int, rows: Tensor) -> None:
        """Converts float rows [n, num_columns] and keeps them; the float tensor is not kept."""

    def load_encoded(self, first_row: int, rows: Encoded) -> None:
        """Takes encoded rows: as they are if this matrix keeps their scheme, otherwise converted from floats."""
        self.load_rows(first_row, rows.decode())

    def load_columns(self, first_row: int, rows: Columns) -> None:
        """Takes the columns that are this rank's."""
        self.load(first_row, rows.cut())

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x [T, num_columns] -> x @ weight.T (+ bias) (+ residual) [T, num_rows]. The residual may be overwritten."""

    def joined(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, group: Group, tag: str
    ) -> Tensor:
        """As `linear`, where each rank of `group` has some of the columns, of x and of the weight."""
        if group.rank > 0:  # added once
            bias = residual = None
        return group.all_reduce(self.linear(x, bias, residual), tag)

    def logits(self, x: Tensor) -> Tensor:
        """x [T, num_columns] -> x @ weight.T [T, num_rows] in float32."""
        return self.linear(x, None, None).float()

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Rows are gate, then up: silu(gate) * up [T, num_rows / 2]."""
        return self._activation.silu_mul(self.linear(x, bias, None))

    def linear_relu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """max(x @ weight.T (+ bias), 0) [T, num_rows]."""
        return self._activation.relu(self.linear(x, bias, None))

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        """RMS norm of x and GEMM in one kernel; None where two kernels are as fast.

        With `silu_mul` as `linear_silu_mul`, without as `linear`. Called only if `fuses_norm`.
        """
        raise NotImplementedError

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that hold the weight, by name; views, not copies."""

    @abstractmethod
    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, without copying; a KeyError or ValueError if it does not fit."""


class Gemm(Protocol):
    """Multiplies a model's matrices that are not quantized (`kernels/linear`)."""

    summary: str  # a report of the algorithms chosen; empty: none was

    def gemm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
        widened: bool = False,
    ) -> Tensor: ...

    def tuning(self, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Collects the GEMMs of a forward pass inside it, then measures them for these numbers of tokens."""
        ...


class NumberFormat(ABC):
    """How matrices are stored and multiplied."""

    name: str  # names the layout too: converted weights of another name are not read
    native: bool = False  # GEMMs are native operations, which a tape can record
    # Embedding tables need no more than 16 bits and are not shared with the output head.
    compact_tables: bool = False
    worth_keeping: bool = False  # converting is slow enough to cache the result

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.activation_dtype = dtype  # of x and of every result
        self.gemm: Gemm = choose("linear", device).make_gemm(device)  # of the matrices that are not quantized
        self._device = device

    @abstractmethod
    def matrix(self, num_rows: int, num_columns: int) -> Matrix: ...

    def keeps(self, scheme: Scheme) -> bool:
        """Whether encoded rows of a checkpoint stay as they are."""
        return False

    def table(self, encoded: Encoded) -> Encoded | None:
        """An embedding table, which the output head may share, as it stays encoded; None: it is decoded."""
        return None

    def table_scheme(self, num_columns: int) -> Scheme | None:
        """Of an embedding table that comes as floats; None: it stays floats."""
        return None

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        """The output head's: logits are sensitive, and some formats keep it precise."""
        return self.matrix(num_rows, num_columns)


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError for tensors of another shape or dtype than this format makes."""
    for name, like in expected.items():
        tensor = state[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} {tuple(like.shape)}"
            )
