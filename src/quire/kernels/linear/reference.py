"""GEMMs in plain torch, with the algorithm that torch's library picks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def gemm(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N], added; may be overwritten
    relu: bool = False,
    widened: bool = False,  # float32 results: sums are float32 inside, and rounding them makes ties
) -> Tensor:  # [T, N]
    """x @ weight.T (+ bias) (+ residual), then relu."""
    if widened:
        assert bias is None and residual is None and not relu, "an output head has none of these"  # noqa: PT018
        return _widened(x, weight)
    if x.is_cuda and bias is None and residual is not None:
        y = residual.addmm_(x, weight.t())  # the sum is part of the GEMM's epilogue
    elif x.is_cuda and bias is not None and residual is None and relu:
        return torch._addmm_activation(bias, x, weight.t())  # and so is relu
    else:
        y = F.linear(x, weight, bias)
        y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


class TorchGemm:
    """One model's GEMMs, with nothing to measure."""

    summary = ""  # a report of the algorithms chosen; empty: none was

    def __init__(self, device: torch.device) -> None:
        self.gemm = gemm

    @contextmanager
    def tuning(self, sizes: Sequence[int]) -> Iterator[None]:
        """Does nothing: there is no algorithm to choose."""
        yield


make_gemm = TorchGemm  # takes the device
