"""Normalisation by native code. Promises are those of the reference."""

from torch import Tensor

from quire.kernels import native


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [T, d] / sqrt(mean(x^2) + eps) * weight [d]."""
    return _norm_rows("rms_norm", x, None, weight, None, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then `rms_norm` of residual."""
    return _norm_rows("add_rms_norm", x, residual, weight, None, eps, out)


def rms_norm_onto(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, d] += `rms_norm` of x, in place; returns residual."""
    return _norm_rows("rms_norm_onto", x, residual, weight, None, eps, residual)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """Layer normalisation of x [T, d]."""
    return _norm_rows("layer_norm", x, None, weight, bias, eps, out)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then `layer_norm` of residual."""
    return _norm_rows("add_layer_norm", x, residual, weight, bias, eps, out)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalises every head of x [T, H, D] (a strided view, last dimension dense) in place; weight [D]."""
    native.check_floats(x, weight)
    tokens, heads, head_dim = x.shape
    native.call(
        "head_rms_norm",
        (
            x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, head_dim,
            weight.data_ptr(), native.real(eps),
        ),
        (x, weight),
    )  # fmt: skip


def _norm_rows(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    rows, width = x.shape
    out = native.empty(rows, width) if out is None else out
    native.check_floats(x, residual, weight, bias, out)
    native.call(
        name,
        (
            x.data_ptr(), x.stride(0), rows, width,
            weight.data_ptr(), native.address(bias), native.real(eps),
            out.data_ptr(), out.stride(0),
            native.address(residual), 0 if residual is None else residual.stride(0),
        ),
        (x, residual, weight, bias, out),
    )  # fmt: skip
    return out
