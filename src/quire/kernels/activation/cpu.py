"""Activations by native code where that pays. Promises are those of the reference."""

from torch import Tensor

from quire.kernels import native
from quire.kernels.activation import reference
from quire.kernels.activation.reference import relu

__all__ = ["gelu", "gelu_mul", "relu", "silu_mul"]


def silu_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> silu(gate) * up [T, F]."""
    return _gated("silu_mul", x, out)


def gelu_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> gelu(gate) * up [T, F]; approximate is "none" (erf) or "tanh"."""
    return _gated("gelu_tanh_mul" if approximate == "tanh" else "gelu_mul", x, out)


def _gated(operation: str, x: Tensor, out: Tensor | None) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = native.empty(rows, width) if out is None else out
    native.check_floats(x, out)
    native.call(
        operation,
        (x.data_ptr(), x.stride(0), rows, width, out.data_ptr(), out.stride(0)),
        (x, out),
    )
    return out


def gelu(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """GELU; approximate is "none" (erf) or "tanh"."""
    if approximate != "none" or x.dim() != 2:
        return reference.gelu(x, approximate, out)
    out = native.empty(*x.shape) if out is None else out
    native.check_floats(x, out)
    native.call(
        "gelu",
        (x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], out.data_ptr(), out.stride(0)),
        (x, out),
    )
    return out
