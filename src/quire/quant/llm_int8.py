"""LLM.int8(): int8 products, and the outliers of every row of x in 16 bits (arXiv 2208.07339).

An entry of x of 6.0 or more is an outlier: the int8 product sees a zero in its place, so that the row's scale is that
of the other entries. Outliers are multiplied by the same int8 weights in 16 bits, as two int8 products (the rounded
values, then what rounding left), and added. The choice is made per row, not per batch as in bitsandbytes: with
exact integer sums, a row's bits do not depend on its neighbours. Columns whose weights are far smaller than the
others, which goes with activations that are far larger, would be lost between the steps of int8 weights: they are kept
in 16 bits and always multiplied so.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels import choose
from quire.kernels.int8_linear.reference import mix
from quire.quant.format import Matrix, NumberFormat, check_state
from quire.quant.int8 import ROWS_AT_A_TIME, Int8Matrix, layout_digest

THRESHOLD = 6.0
SMALL = 1 / 8  # of the median column: below it the weights of a column stay in 16 bits
LARGEST_SHARE = 1 / 16  # of the columns that may stay


class Int8OutlierMatrix(Matrix):
    """An int8 matrix for regular entries; `fine` columns in 16 bits; outliers in two int8 products."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        super().__init__(num_rows, num_columns, choose("activation", device))
        self._regular = Int8Matrix(num_rows, num_columns, device)
        self._kernel = choose("int8_linear", device)
        fine = self.sized_fine(num_rows, num_columns)
        self._fine = torch.zeros_like(fine["fine"], device=device)
        self._fine_columns = torch.full_like(fine["fine_columns"], -1, device=device)  # -1: none
        self._chosen = False
        self.num_outliers = 0  # entries of x that were multiplied in 16 bits, fine columns not counted
        self.num_entries = 0

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        if not self._chosen:  # parts of a fused projection have one input: the first that is loaded decides
            self._chosen = True
            self._choose_fine(rows)
        fine = self.fine_columns
        for start in range(0, rows.shape[0], ROWS_AT_A_TIME):
            piece = rows[start : start + ROWS_AT_A_TIME].float().clone()
            first = first_row + start
            for i, column in enumerate(fine):
                self._fine[i, first : first + piece.shape[0]] = piece[:, column]
            piece[:, fine] = 0
            self._regular.load_rows(first, piece)

    def _choose_fine(self, rows: Tensor) -> None:
        sizes = rows.float().square().mean(0).sqrt_()
        small = (sizes < SMALL * sizes.median()).nonzero().flatten()
        smallest = small[sizes[small].argsort(stable=True)][: len(self._fine_columns)]
        self._fine_columns[: len(smallest)] = smallest.sort().values.int()

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        outliers, fine = x.abs() >= THRESHOLD, self.fine_columns
        outliers[:, fine] = False
        regular = x.masked_fill(outliers, 0.0)
        regular[:, fine] = 0
        y = self._regular.linear(regular, bias, residual)
        # Column by column, products rounded before they are added: a sum's order does not depend on the number of rows.
        for i, column in enumerate(fine):
            y += x[:, column, None] * self._fine[i].float()
        rows = outliers.any(1).nonzero().flatten()
        if len(rows):
            large = x[rows].masked_fill_(~outliers[rows], 0.0)
            y[rows] += self._regular.linear(large, None, None)
            y[rows] += self._regular.linear(self._remainder(large), None, None)
        self.num_outliers += int(outliers.sum())
        self.num_entries += x.numel()
        return y

    @property
    def fine_columns(self) -> list[int]:
        """Read when it is used: layers that are streamed change the tensor's content."""
        return [column for column in self._fine_columns.tolist() if column >= 0]

    def _remainder(self, x: Tensor) -> Tensor:
        """What the int8 product of x does not see of it: with a product of this too, x has 16 bits."""
        quantized, scales = self._kernel.quantize_rows(x)
        return mix(mix(x) - quantized * scales[:, None])  # mixing is its own inverse

    def logits(self, x: Tensor) -> Tensor:
        return self.linear(x, None, None)

    @staticmethod
    def sized_fine(num_rows: int, num_columns: int) -> dict[str, Tensor]:
        """Shapes of what is kept beside the int8 matrix."""
        most = int(num_columns * LARGEST_SHARE)
        return {
            "fine": torch.empty(most, num_rows, dtype=torch.float16, device="meta"),
            "fine_columns": torch.empty(most, dtype=torch.int32, device="meta"),
        }

    def state(self) -> dict[str, Tensor]:
        return self._regular.state() | {"fine": self._fine, "fine_columns": self._fine_columns}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self._regular.adopt(state)
        check_state(state, self.sized_fine(self.num_rows, self.num_columns))
        self._fine, self._fine_columns = state["fine"], state["fine_columns"]


class LlmInt8(NumberFormat):
    """As int8, with outliers in 16 bits. The output head too: a float product would depend on the batch's size."""

    compact_tables = True
    worth_keeping = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.float32, device)
        self.name = f"llm_int8-{layout_digest(choose('int8_linear', device))}"

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return Int8OutlierMatrix(num_rows, num_columns, self._device)
