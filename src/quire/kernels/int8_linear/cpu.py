"""Linear layers in int8 by native code. Promises, and bits, are those of the reference."""

import torch
from torch import Tensor

from quire.kernels import huge_pages, native
from quire.kernels.activation.cpu import silu_mul
from quire.kernels.int8_linear.reference import quantize as quantize
from quire.kernels.int8_linear.reference import quantize_rows as quantize_rows
from quire.kernels.int8_linear.reference import row_sums as row_sums

CHANNELS = 16  # of a block
GROUP = 4  # columns that lie together
COLUMN_MULTIPLE = 64  # one AMX tile is 16 groups


def empty_packed(num_rows: int, num_columns: int) -> Tensor:
    """A packed weight of zeros [N / 16, K / 4, 16, 4], N and K rounded up, to be filled by `pack_rows`."""
    blocks = -(-num_rows // CHANNELS)
    groups = -(-num_columns // COLUMN_MULTIPLE) * (COLUMN_MULTIPLE // GROUP)
    return huge_pages.zeros(blocks, groups, CHANNELS, GROUP, dtype=torch.int8)


def pack(q: Tensor) -> Tensor:
    """q int8 [N, K] -> the layout that `linear` of this alternative reads."""
    packed = empty_packed(*q.shape)
    pack_rows(packed, 0, q)
    return packed


def pack_rows(packed: Tensor, first_row: int, q: Tensor) -> None:
    """Puts q [n, K] at rows first_row .. first_row + n - 1 of a packed weight, in place."""
    rows = torch.arange(first_row, first_row + q.shape[0])
    padded = torch.zeros(q.shape[0], packed.shape[1] * GROUP, dtype=torch.int8)
    padded[:, : q.shape[1]] = q
    packed[rows // CHANNELS, :, rows % CHANNELS] = padded.view(q.shape[0], -1, GROUP)


def unpack(packed: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The inverse of `pack`: int8 [N, K]."""
    rows = packed.permute(0, 2, 1, 3).reshape(packed.shape[0] * CHANNELS, -1)
    return rows[:num_rows, :num_columns].contiguous()


def linear(
    x: Tensor,  # [T, K] fp32, rows may be strided
    packed: Tensor,
    scales: Tensor,  # [N] fp32
    sums: Tensor,  # [N] int32
    bias: Tensor | None = None,  # [N] fp32
    residual: Tensor | None = None,  # [T, N] fp32; may be `out`
    out: Tensor | None = None,
) -> Tensor:  # [T, N] fp32
    """y = (acc * x_scale) * w_scale (+ bias) (+ residual), in that order; acc is an exact int32 sum."""
    out = native.empty(x.shape[0], scales.shape[0]) if out is None else out
    _run("linear", x, packed, scales, sums, bias, residual, out)
    return out


def row_peaks(x: Tensor) -> Tensor:
    """x [T, K] fp32 -> [T] fp32, the largest magnitude of each row once it is mixed."""
    native.check_floats(x)
    peaks = native.empty(x.shape[0])
    native.call(
        "row_peaks", (x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], peaks.data_ptr()), (x, peaks)
    )
    return peaks


def partial_linear(x: Tensor, packed: Tensor, sums: Tensor, peaks: Tensor) -> Tensor:
    """x [T, K] fp32, peaks [T] of whole rows -> exact sums over these columns, int32 [T, N]."""
    native.check_floats(x, peaks)
    native.check_indices(torch.int32, sums)
    out = native.empty(x.shape[0], sums.shape[0], dtype=torch.int32)
    native.call(
        "partial_linear",
        (
            x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], packed.data_ptr(), packed.shape[1] * GROUP,
            sums.shape[0], sums.data_ptr(), peaks.data_ptr(), out.data_ptr(),
        ),
        (x, packed, sums, peaks, out),
    )  # fmt: skip
    return out


def scale_sums(
    sums: Tensor,  # [T, N] int32, over all columns
    peaks: Tensor,  # [T] fp32
    scales: Tensor,  # [N] fp32
    bias: Tensor | None = None,  # [N] fp32
    residual: Tensor | None = None,  # [T, N] fp32
) -> Tensor:  # [T, N] fp32
    """y = (sum * x_scale) * w_scale (+ bias) (+ residual), in that order."""
    native.check_floats(peaks, scales, bias, residual)
    out = native.empty(*sums.shape)
    native.call(
        "scale_sums",
        (
            sums.data_ptr(), sums.shape[0], sums.shape[1], peaks.data_ptr(), scales.data_ptr(), native.address(bias),
            native.address(residual), 0 if residual is None else residual.stride(0), out.data_ptr(), out.stride(0),
        ),
        (sums, peaks, scales, bias, residual, out),
    )  # fmt: skip
    return out


def linear_silu_mul(
    x: Tensor,  # [T, K] fp32
    packed: Tensor,  # rows 0..F-1 gate, F..2F-1 up
    scales: Tensor,  # [2F]
    sums: Tensor,  # [2F]
    bias: Tensor | None = None,  # [2F]
    out: Tensor | None = None,
) -> Tensor:  # [T, F] fp32
    """silu(gate) * up of one fused projection."""
    if scales.shape[0] % (2 * CHANNELS) != 0:  # gate and up would share a block
        return silu_mul(linear(x, packed, scales, sums, bias), out)
    out = native.empty(x.shape[0], scales.shape[0] // 2) if out is None else out
    _run("linear_silu_mul", x, packed, scales, sums, bias, None, out)
    return out


def _run(
    name: str,
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    sums: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    native.check_floats(x, scales, bias, residual, out)
    native.check_indices(torch.int32, sums)
    native.call(
        name,
        (
            x.data_ptr(), x.stride(0), x.shape[0], x.shape[1],
            packed.data_ptr(), packed.shape[1] * GROUP, scales.shape[0],
            scales.data_ptr(), sums.data_ptr(), native.address(bias),
            native.address(residual), 0 if residual is None else residual.stride(0),
            out.data_ptr(), out.stride(0),
        ),
        (x, packed, scales, sums, bias, residual, out),
    )  # fmt: skip
