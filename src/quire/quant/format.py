"""The protocols of number formats: an empty matrix that is filled by slices of rows, then multiplied."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Matrix(Protocol):
    """A weight [num_rows, num_columns] in some number format. GEMMs are x @ weight.T."""

    num_rows: int
    num_columns: int

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        """Converts float rows [n, num_columns] and keeps them; the float tensor is not kept."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """x [T, num_columns] -> x @ weight.T (+ bias) (+ residual) [T, num_rows]. The residual may be overwritten."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """x [T, num_columns] -> x @ weight.T [T, num_rows] in float32."""
        ...

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Rows are gate, then up: silu(gate) * up [T, num_rows / 2]."""
        ...

    def linear_relu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """max(x @ weight.T (+ bias), 0) [T, num_rows]."""
        ...

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        """RMS norm of x and GEMM in one kernel; None where two kernels are as fast.

        With `silu_mul` as `linear_silu_mul`, without as `linear`.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors that hold the weight, by name; views, not copies."""
        ...

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, without copying; a KeyError or ValueError if it does not fit."""
        ...


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


class NumberFormat(Protocol):
    """How matrices are stored and multiplied."""

    name: str  # names the layout too: converted weights of another name are not read
    activation_dtype: torch.dtype  # of x and of every result
    native: bool  # GEMMs are native operations, which a tape can record
    compact_tables: bool  # embedding tables need no more than 16 bits and are not shared with the output head
    kept_precise: tuple[str, ...]  # what stays in higher precision, for the start's report
    gemm: Gemm
    worth_keeping: bool  # converting is slow enough to cache the result

    def matrix(self, num_rows: int, num_columns: int) -> Matrix: ...

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        """The output head's: logits are sensitive, and some formats keep it precise."""
        ...


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError for tensors of another shape or dtype than this format makes."""
    for name, like in expected.items():
        tensor = state[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} {tuple(like.shape)}"
            )
