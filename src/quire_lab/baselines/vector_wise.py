"""Vector-wise int8, as the LLM.int8 paper has it: one scale per row of x and per output channel, and nothing else.

The engine's own int8 mixes every 64 columns by a Hadamard matrix first, which spreads an outlier over its block; here
an outlier takes the precision of its whole row. That is what LLM.int8's decomposition is compared with.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels import choose
from quire.quant.format import Matrix, NumberFormat, check_state

LARGEST = 127


class VectorWiseMatrix(Matrix):
    """int8 weights; products are exact integers in float64."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__(num_rows, num_columns, choose("activation", "cpu"))
        self._weight = torch.zeros(num_rows, num_columns, dtype=torch.int8)
        self._scales = torch.zeros(num_rows)

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        last_row = first_row + rows.shape[0]
        q, self._scales[first_row:last_row] = _quantized(rows.float())
        self._weight[first_row:last_row] = q.to(torch.int8)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        q, scales = _quantized(x)
        # float32 adds integers exactly up to 2^24, fewer than a row's 127 × 127 × columns: pieces of 1,024 columns
        pieces = zip(q.split(1024, 1), self._weight.split(1024, 1), strict=True)
        total = sum((a @ b.float().T).double() for a, b in pieces)
        y = (total * scales[:, None] * self._scales).float()
        if bias is not None:
            y += bias
        return y if residual is None else y.add_(residual)

    def state(self) -> dict[str, Tensor]:
        return {"weight": self._weight, "scales": self._scales}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.state())
        self._weight, self._scales = state["weight"], state["scales"]


class VectorWise(NumberFormat):
    """All linear layers and the output head."""

    compact_tables = True
    name = "vector_wise"

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return VectorWiseMatrix(num_rows, num_columns)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(whole numbers as float32, scales [n]); a row of zeros has scale 0."""
    scales = rows.abs().amax(1) / LARGEST
    return torch.round(rows / scales.where(scales > 0, 1)[:, None]), scales
