"""Full precision: weights as they are, in one floating-point type."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels import choose
from quire.kernels.registry import REFERENCE, load
from quire.parallel.group import Group
from quire.quant.format import Gemm, Matrix, NumberFormat, check_state


class FullMatrix(Matrix):
    """A plain matrix. `gemm` multiplies, and is shared by all matrices of a model."""

    fuses_norm = True

    def __init__(
        self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device, gemm: Gemm
    ) -> None:
        native = device.type != "cpu" or dtype is torch.float32
        activation = choose("activation", device) if native else load("activation", REFERENCE)
        super().__init__(num_rows, num_columns, activation)
        self._like = torch.empty(num_rows, num_columns, dtype=dtype, device="meta")
        self._device = device
        self._weight: Tensor | None = None  # [num_rows, num_columns]
        self._narrow = choose("narrow_linear", device)
        self._gemm = gemm.gemm

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        if self._weight is None:
            self._weight = torch.empty_like(self._like, device=self._device)
        self._weight[first_row : first_row + rows.shape[0]].copy_(rows)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        assert self._weight is not None, "a matrix must be loaded before it is used"
        if self._is_narrow(x):
            return self._narrow.linear(x, self._weight, bias, residual)
        return self._gemm(x, self._weight, bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        assert self._weight is not None, "a matrix must be loaded before it is used"
        return self._gemm(x, self._weight, widened=True)

    def linear_relu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_cuda or self._is_narrow(x):
            return super().linear_relu(x, bias)
        assert self._weight is not None, "a matrix must be loaded before it is used"
        return self._gemm(x, self._weight, bias, relu=True)

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        if not self._is_narrow(x):
            return None
        if silu_mul:
            return self._narrow.linear_silu_mul(x, self._weight, norm_weight, eps)
        return self._narrow.linear(x, self._weight, norm_weight=norm_weight, eps=eps)

    def _is_narrow(self, x: Tensor) -> bool:
        return self._narrow.SERVES and x.shape[0] == 1 and x.dtype is not torch.float32

    def state(self) -> dict[str, Tensor]:
        assert self._weight is not None, "a matrix must be loaded before it is kept"
        return {"weight": self._weight}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, {"weight": self._like})
        self._weight = state["weight"].to(self._device)

    def release(self) -> None:
        """Frees the numbers, which are kept elsewhere; `state` then tells their sizes."""
        self._weight = self._like


class InvariantMatrix(FullMatrix):
    """A plain matrix with batch-invariant GEMMs: a token's result does not depend on the others."""

    fuses_norm = False

    def __init__(
        self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device, gemm: Gemm
    ) -> None:
        super().__init__(num_rows, num_columns, dtype, device, gemm)
        self._kernel = choose("invariant_linear", device)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._kernel.linear(x, self._weight, bias, residual)

    def joined(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, group: Group, tag: str
    ) -> Tensor:
        """One rank's bits: each rank goes on with the sums of the ranks before, in float32.

        Only where ranks begin at multiples of 64 columns, as heads of 64 or 128 do.
        """
        y = x.new_zeros(x.shape[0], self.num_rows, dtype=torch.float32)
        for rank in range(group.size):
            if rank == group.rank:
                self._kernel.linear(x, self._weight, sums=y)
            elif rank > 0:
                y.zero_()
            y = group.all_reduce(y, tag)  # all others' are zeros
        y = y if bias is None else y.add_(bias)
        return (y if residual is None else y.add_(residual)).to(x.dtype)

    def linear_relu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._activation.relu(self.linear(x, bias, None))

    def logits(self, x: Tensor) -> Tensor:
        return self._kernel.linear(x, self._weight, dtype=torch.float32)


class FullPrecision(NumberFormat):
    """float32, float16 or bfloat16 throughout. `invariant`: batch-invariant GEMMs."""

    def __init__(self, dtype: torch.dtype, device: torch.device, invariant: bool = False) -> None:
        super().__init__(dtype, device)
        self.name = str(dtype).removeprefix("torch.")
        self._kind = InvariantMatrix if invariant else FullMatrix

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        return self._kind(num_rows, num_columns, self.activation_dtype, self._device, self.gemm)
