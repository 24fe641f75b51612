"""int8: weights with one scale per output channel, activations with one scale per token, exact int32 sums.

A weight is quantized and packed as it arrives, so loading never holds more than one tensor in floats. A row of
a result depends on that row alone, bit for bit.
"""

import hashlib
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from quire.core.errors import WeightsError
from quire.kernels import choose
from quire.kernels.int8_linear.reference import MIXED
from quire.kernels.registry import REFERENCE
from quire.parallel.group import LARGEST, Group
from quire.quant.encoded import Columns, floats
from quire.quant.format import Matrix, NumberFormat, check_state

# Rows that are quantized at a time: bounds the float32 copies of an embedding-sized matrix.
ROWS_AT_A_TIME = 4096


class Int8Matrix(Matrix):
    """A packed int8 matrix with its scales and row sums."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        super().__init__(num_rows, num_columns, choose("activation", device))
        self._kernel = choose("int8_linear", device)
        self._packed: Tensor | None = None  # opaque int8, as the kernel packs it
        self._scales = torch.empty(0)  # [num_rows] float32
        self._sums = torch.empty(0)  # [num_rows] int32, of the quantized rows

    def load_rows(self, first_row: int, rows: Tensor, first: int = 0, last: int | None = None) -> None:
        if self._packed is None:
            self._packed = self._kernel.empty_packed(self.num_rows, self.num_columns)
            self._scales = torch.zeros(self.num_rows, dtype=torch.float32)
            self._sums = torch.zeros(self.num_rows, dtype=torch.int32)
        for start in range(0, rows.shape[0], ROWS_AT_A_TIME):
            self._load_piece(first_row + start, rows[start : start + ROWS_AT_A_TIME], first, last)

    def load_columns(self, first_row: int, rows: Columns) -> None:
        """Scales are those of whole rows, so that a sum over ranks has the bits of the whole product."""
        if rows.first % MIXED or (rows.last % MIXED and rows.last != rows.whole.shape[1]):
            raise WeightsError(
                f"columns {rows.first} to {rows.last} do not begin and end at a multiple of {MIXED}, which int8 needs: "
                "give another tensor_parallel_size, or quantization none"
            )
        self.load_rows(first_row, floats(rows.whole), rows.first, rows.last)

    def _load_piece(self, first_row: int, rows: Tensor, first: int, last: int | None) -> None:
        quantized, scales = self._kernel.quantize(rows)
        quantized = quantized[:, first:last]
        broken = (~torch.isfinite(scales)).nonzero()  # a scale is its row's largest value: no second pass
        if len(broken):
            raise WeightsError(
                f"row {first_row + int(broken[0])} holds NaN or infinity, which int8 cannot hold: use an undamaged "
                "copy of the model"
            )
        last_row = first_row + rows.shape[0]
        self._kernel.pack_rows(self._packed, first_row, quantized)
        self._scales[first_row:last_row] = scales
        self._sums[first_row:last_row] = self._kernel.row_sums(quantized)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._kernel.linear(x, self._packed, self._scales, self._sums, bias, residual)

    def joined(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, group: Group, tag: str
    ) -> Tensor:
        """The bits of `linear` over all columns: scales of whole rows, exact sums."""
        peaks = group.all_reduce(self._kernel.row_peaks(x), "scales", LARGEST)
        partial = self._kernel.partial_linear(x, self._packed, self._sums, peaks)
        sums = group.all_reduce(partial, tag)
        return self._kernel.scale_sums(sums, peaks, self._scales, bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        return self.linear(x, None, None)

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernel.linear_silu_mul(x, self._packed, self._scales, self._sums, bias)

    def linear_relu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, bias, None).relu_()

    def state(self) -> dict[str, Tensor]:
        assert self._packed is not None, "a matrix must be loaded before it is kept"
        return {"packed": self._packed, "scales": self._scales, "sums": self._sums}

    def sized_state(self) -> dict[str, Tensor]:
        """Shapes of `state` without content; the kernel itself says how much packing pads."""
        with torch.device("meta"):
            return {
                "packed": self._kernel.empty_packed(self.num_rows, self.num_columns),
                "scales": torch.empty(self.num_rows, dtype=torch.float32),
                "sums": torch.empty(self.num_rows, dtype=torch.int32),
            }

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.sized_state())
        self._packed, self._scales, self._sums = state["packed"], state["scales"], state["sums"]


class Int8(NumberFormat):
    """Per-channel int8 weights, per-token int8 activations; everything between GEMMs is float32."""

    compact_tables = True
    worth_keeping = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.float32, device)
        kernel = choose("int8_linear", device)
        self.name = f"int8-{layout_digest(kernel)}"
        self.native = not kernel.__name__.endswith(REFERENCE)

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return Int8Matrix(num_rows, num_columns, self._device)


def layout_digest(kernel: ModuleType) -> str:
    """Tells how this kernel quantizes and packs: converted weights of another one must not be read as its own."""
    probe = torch.arange(48 * 136, dtype=torch.float32).remainder(251).view(48, 136) - 125
    quantized, scales = kernel.quantize(probe)
    packed = kernel.pack(quantized)
    return hashlib.sha256(packed.numpy().tobytes() + scales.numpy().tobytes()).hexdigest()[:12]
