"""Activations by native code where that pays. Promises are those of the reference."""

from torch import Tensor

from quire.kernels import native
from quire.kernels.activation.reference import gelu, relu

__all__ = ["gelu", "relu", "silu_mul"]


def silu_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> silu(gate) * up [T, F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = native.empty(rows, width) if out is None else out
    native.check_floats(x, out)
    native.call(
        "silu_mul",
        (x.data_ptr(), x.stride(0), rows, width, out.data_ptr(), out.stride(0)),
        (x, out),
    )
    return out
