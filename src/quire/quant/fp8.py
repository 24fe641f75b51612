"""Eight-bit floating point: weights scaled per output channel, activations per token, sums in float32."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import choose
from quire.kernels.registry import load
from quire.quant.encoded_matrix import LowBit
from quire.quant.format import Matrix, NumberFormat, check_state

FEW_TOKENS = 8
ALIGNED = 16  # rows and columns of a GEMM are multiples of this


class Fp8Matrix(Matrix):
    """float8 (e4m3) weights; GEMMs by the tensor cores' float8 path. Activations of a few tokens are not rounded: such
    products are bound by the weights' bytes.
    """

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_rows, num_columns, choose("activation", device))
        self._dtype = dtype
        self._device = device
        self._rows = choose("fp8_rows", device)
        self._few: Any = None  # the kernel for a few tokens, if there is one
        self._weight: Tensor | None = None  # [num_rows, num_columns] float8_e4m3fn
        self._scales = torch.empty(0)  # [1, num_rows] float32

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        if self._weight is None:
            self._weight = torch.empty(
                self.num_rows, self.num_columns, dtype=torch.float8_e4m3fn, device=self._device
            )
            self._scales = torch.empty(1, self.num_rows, dtype=torch.float32, device=self._device)
        quantized, scales = self._rows.quantize(rows.to(self._device).contiguous())
        self._weight[first_row : first_row + rows.shape[0]] = quantized
        self._scales[0, first_row : first_row + rows.shape[0]] = scales[:, 0]

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        assert self._weight is not None, "a matrix must be loaded before it is used"
        few = self._product(x)
        if few is not None:
            out = x.new_empty(x.shape[0], self.num_rows) if residual is None else residual
            few.linear(x, out, bias, residual)
            return out
        quantized, scales = self._rows.quantize(x)
        y = torch._scaled_mm(
            quantized, self._weight.t(), scale_a=scales, scale_b=self._scales, bias=bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        ).to(self._dtype)  # fmt: skip
        return y if residual is None else y.add_(residual)

    @property
    def fuses_norm(self) -> bool:  # type: ignore[override]
        return self._device.type == "cuda"

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        few = self._product(x)
        return None if few is None else few.normed(x, norm_weight, eps, silu_mul)

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        few = self._product(x)
        fused = None if few is None else few.linear_silu_mul(x, bias)
        return super().linear_silu_mul(x, bias) if fused is None else fused

    def _product(self, x: Tensor) -> Any:
        """None for more than a few tokens, and where the weight's shape has no kernel."""
        if x.shape[0] > FEW_TOKENS or not x.is_cuda:
            return None
        if self._few is None:
            cuda = load("encoded_linear", "cuda")
            self._few = cuda.fp8_rows(self._weight, self._scales) or False
        return self._few or None

    def state(self) -> dict[str, Tensor]:
        assert self._weight is not None, "a matrix must be loaded before it is kept"
        return {"weight": self._weight, "scales": self._scales}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        like = torch.empty(self.num_rows, self.num_columns, dtype=torch.float8_e4m3fn, device="meta")
        check_state(state, {"weight": like, "scales": torch.empty(1, self.num_rows, device="meta")})
        self._few = None
        self._weight = state["weight"].to(self._device)
        self._scales = state["scales"].to(self._device)


class Fp8(NumberFormat):
    """Linear layers in float8; small or sensitive weights stay in the activations' dtype."""

    name = "fp8"

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        if num_rows % ALIGNED or num_columns % ALIGNED:
            raise ConfigError(
                f"quantization='fp8' needs matrices whose sides are multiples of {ALIGNED}, and this model has "
                f"one of {num_rows} × {num_columns}: choose none"
            )
        return Fp8Matrix(num_rows, num_columns, self.activation_dtype, self._device)

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        return self.of_head.head(num_rows, num_columns)

    @property
    def of_head(self) -> LowBit:
        """int8 per channel, as int4 has it, and activations are not rounded: float8 has fewer bits."""
        low = LowBit(self.name, (), self.activation_dtype, self._device)
        low.gemm = self.gemm
        return low
