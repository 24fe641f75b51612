"""Linear layers in int8, in plain torch. The bits of every alternative are defined here.

A packed weight is opaque: each alternative has its own layout, made by its own `pack`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
MIXED = 64  # columns that are mixed with each other
# Below this a row counts as zero: 127 / absmax must not overflow.
SMALLEST_ABSMAX = 1e-30


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] float -> (q int8 [N, K], scales fp32 [N]), symmetric per output channel."""
    return quantize_rows(weight.float())


def mix(x: Tensor) -> Tensor:
    """x [T, K] fp32: every 64 columns times a Hadamard matrix / 8; columns beyond the last full block stay.

    Weights and activations are mixed alike, and the matrix is orthogonal, so dot products do not change. But an
    outlier is spread over its block instead of taking the precision of every other column
    (quire_lab.benchmarks.perplexity shows what is left of it).
    """
    full = x.shape[1] // MIXED * MIXED
    blocks = x[:, :full].reshape(-1, MIXED)
    distance = 1
    while distance < MIXED:
        first, second = blocks.view(-1, MIXED // (2 * distance), 2, distance).unbind(2)
        blocks = torch.stack((first + second, first - second), dim=2).view(-1, MIXED)
        distance *= 2
    return torch.cat(((blocks * MIXED**-0.5).view(x.shape[0], full), x[:, full:]), dim=1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] fp32, mixed first -> (q int8 [T, K], scales fp32 [T]); rounds half to even, zero rows give scale 0."""
    x = mix(x)
    absmax = x.abs().amax(dim=1)
    absmax = torch.where(absmax < SMALLEST_ABSMAX, torch.zeros_like(absmax), absmax)
    inverse = torch.where(absmax == 0, torch.zeros_like(absmax), LARGEST / absmax)
    q = torch.round(x * inverse[:, None]).clamp_(-LARGEST, LARGEST).to(torch.int8)
    return q, absmax / LARGEST


def row_sums(q: Tensor) -> Tensor:
    """q int8 [N, K] -> int32 [N], what kernels with unsigned activations subtract."""
    return q.sum(dim=1, dtype=torch.int32)


def empty_packed(num_rows: int, num_columns: int) -> Tensor:
    """A packed weight of zeros, to be filled by `pack_rows`."""
    return torch.zeros(num_rows, num_columns, dtype=torch.int8)


def pack(q: Tensor) -> Tensor:
    """q int8 [N, K] -> the layout that `linear` of this alternative reads."""
    packed = empty_packed(*q.shape)
    pack_rows(packed, 0, q)
    return packed


def pack_rows(packed: Tensor, first_row: int, q: Tensor) -> None:
    """Puts q [n, K] at rows first_row .. first_row + n - 1 of a packed weight, in place."""
    packed[first_row : first_row + q.shape[0]] = q


def unpack(packed: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The inverse of `pack`: int8 [N, K]."""
    return packed[:num_rows, :num_columns].contiguous()


def linear(
    x: Tensor,  # [T, K] fp32, rows may be strided
    packed: Tensor,
    scales: Tensor,  # [N] fp32
    sums: Tensor,  # [N] int32
    bias: Tensor | None = None,  # [N] fp32
    residual: Tensor | None = None,  # [T, N] fp32
    out: Tensor | None = None,
) -> Tensor:  # [T, N] fp32
    """y = (acc * x_scale) * w_scale (+ bias) (+ residual), in that order; acc is an exact int32 sum.

    A row of the result depends on that row of x alone, bit for bit.
    """
    q, x_scales = quantize_rows(x)
    accumulated = _integer_gemm(q, packed)
    y = (accumulated.float() * x_scales[:, None]) * scales[None, :]
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)


def row_peaks(x: Tensor) -> Tensor:
    """x [T, K] fp32 -> [T] fp32, the largest magnitude of each row once it is mixed.

    `row_peaks`, `partial_linear` and `scale_sums` are `linear` where several ranks have some of the columns each: the
    largest of their peaks and the sum of their partial sums give its bits.
    """
    peaks = mix(x).abs().amax(dim=1)
    return torch.where(peaks < SMALLEST_ABSMAX, torch.zeros_like(peaks), peaks)


def partial_linear(x: Tensor, packed: Tensor, sums: Tensor, peaks: Tensor) -> Tensor:
    """x [T, K] fp32, peaks [T] of whole rows -> exact sums over these columns, int32 [T, N]."""
    inverse = torch.where(peaks == 0, torch.zeros_like(peaks), LARGEST / peaks)
    q = torch.round(mix(x) * inverse[:, None]).clamp_(-LARGEST, LARGEST).to(torch.int8)
    return _integer_gemm(q, packed)


def scale_sums(
    sums: Tensor,  # [T, N] int32, over all columns
    peaks: Tensor,  # [T] fp32
    scales: Tensor,  # [N] fp32
    bias: Tensor | None = None,  # [N] fp32
    residual: Tensor | None = None,  # [T, N] fp32
) -> Tensor:  # [T, N] fp32
    """y = (sum * x_scale) * w_scale (+ bias) (+ residual), in that order."""
    y = (sums.float() * (peaks / LARGEST)[:, None]) * scales[None, :]
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def linear_silu_mul(
    x: Tensor,  # [T, K] fp32
    packed: Tensor,  # rows 0..F-1 gate, F..2F-1 up
    scales: Tensor,  # [2F]
    sums: Tensor,  # [2F]
    bias: Tensor | None = None,  # [2F]
    out: Tensor | None = None,
) -> Tensor:  # [T, F] fp32
    """silu(gate) * up of one fused projection."""
    gate, up = linear(x, packed, scales, sums, bias).chunk(2, dim=1)
    y = F.silu(gate) * up
    return y if out is None else out.copy_(y)


def _integer_gemm(q: Tensor, weight: Tensor) -> Tensor:
    if q.device.type == "cpu":
        return torch._int_mm(q, weight.t())
    # Doubles hold every int32 sum exactly.
    return (q.double() @ weight.double().t()).to(torch.int32)
