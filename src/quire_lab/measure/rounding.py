"""RoundedFormat: float32 matrices that are rounded as an int8 format would round them, so that each rounding can be
looked at alone, and formats that have no kernel can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.quant.format import Matrix
from quire.quant.full import FullMatrix, FullPrecision

CPU = torch.device("cpu")
LARGEST = 127
ROW = 1 << 30  # as many columns as a row has
EXACT = 0  # not rounded


@dataclass(frozen=True, slots=True)
class Rounding:
    """Of one matrix and of what it is multiplied by. A width that does not divide a row counts as the whole row."""

    mixed: int = 1  # columns that are multiplied by a Hadamard matrix
    weights: int = EXACT  # columns with one scale
    activations: int = EXACT


NONE = Rounding()
RoundingOf = Callable[[int, int], Rounding]  # of a matrix, by its numbers of rows and columns


def rounded_to_int8(rows: Tensor, width: int) -> Tensor:
    """rows [n, K] with one scale for every `width` columns, as floats again."""
    if width == EXACT:
        return rows
    groups = rows.unflatten(1, (-1, width if rows.shape[1] % width == 0 else rows.shape[1]))
    scales = groups.abs().amax(2, keepdim=True) / LARGEST
    return (torch.round(groups / scales.where(scales > 0, 1)) * scales).flatten(1)


def mixed_columns(rows: Tensor, width: int) -> Tensor:
    """rows [n, K], every `width` columns times an orthogonal Hadamard matrix; of the largest size that divides a row
    where `width` does not."""
    if width == 1:
        return rows
    columns = rows.shape[1]
    size = width if columns % width == 0 else max(n for n in _sizes(columns) if columns % n == 0)
    return (rows.unflatten(1, (-1, size)) @ hadamard(size)).flatten(1)


@cache
def hadamard(size: int) -> Tensor:
    """[size, size] orthogonal, all entries of one magnitude; for 2^a and 12^b 2^a."""
    if size == 1:
        return torch.ones(1, 1)
    if size % 12 == 0:
        return torch.kron(_PALEY, hadamard(size // 12)) / 12**0.5
    return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard(size // 2)) / 2**0.5


def _sizes(limit: int) -> list[int]:
    """Sizes that `hadamard` knows."""
    return sorted({12**b << a for b in range(4) for a in range(16) if 12**b << a <= limit})


def _paley() -> Tensor:
    """Paley's matrix of order 12, by the squares modulo 11."""
    squares = {i * i % 11 for i in range(1, 11)}
    core = torch.tensor(
        [
            [0 if row == column else 1 if (row - column) % 11 in squares else -1 for column in range(11)]
            for row in range(11)
        ]
    )
    matrix = torch.eye(12)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    matrix[1:, 1:] += core
    return matrix


_PALEY = _paley()


class RoundedMatrix(FullMatrix):
    """A float32 product of rounded weights and rounded activations."""

    fuses_norm = False

    def __init__(
        self, num_rows: int, num_columns: int, rounding: Rounding, number_format: FullPrecision
    ) -> None:
        super().__init__(num_rows, num_columns, torch.float32, CPU, number_format.gemm)
        self._rounding = rounding

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        mixed = mixed_columns(rows.float(), self._rounding.mixed)
        super().load_rows(first_row, rounded_to_int8(mixed, self._rounding.weights))

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        mixed = mixed_columns(x, self._rounding.mixed)
        return super().linear(rounded_to_int8(mixed, self._rounding.activations), bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        return self.linear(x, None, None)


class RoundedFormat(FullPrecision):
    """Each matrix is rounded as `rounding_of` says of its shape."""

    compact_tables = True  # a tied table is not the head, which is rounded

    def __init__(self, rounding_of: RoundingOf) -> None:
        super().__init__(torch.float32, CPU)
        self._rounding_of = rounding_of

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return RoundedMatrix(num_rows, num_columns, self._rounding_of(num_rows, num_columns), self)


def part_of(config: ModelConfig, num_rows: int, num_columns: int) -> str:
    """Which part of a Llama a matrix of this shape is."""
    if num_rows == config.vocab_size:
        return "head"
    if num_columns == config.intermediate_size:
        return "down"
    if num_rows == 2 * config.intermediate_size:
        return "gate, up"
    return "q, k, v" if num_rows > config.num_heads * config.head_dim else "o"
