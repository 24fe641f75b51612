"""Stored tensors of a scheme -> integer codes with their scales and minimums, some rows at a time."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.kernels.encoded_linear.books import dynamic_map

# Rows first .. last - 1: codes [n, K] uint8, int8 or float8; scales and minimums [n, groups]. Superblocks have bytes
# [n, K / 64, 4] as scales and their factors [n, K / 256, 1 or 2] in float16 as minimums.
NESTED_BLOCK = 256  # absmaxes of a code book that share a second-level scale
Codes = Callable[[int, int], tuple[Tensor, Tensor, Tensor | None]]


def codes_of(scheme: str, parts: Mapping[str, Tensor]) -> Codes:
    if scheme.startswith("gguf-"):
        return _gguf(scheme.removeprefix("gguf-"), parts["blocks"])
    if scheme.startswith("int4-"):
        return _int4(parts)
    if scheme.startswith(("int8-", "fp8-")):
        return _scaled(scheme, parts)
    return _book(parts)


def _int4(parts: Mapping[str, Tensor]) -> Codes:
    packed, scales, zeros = parts["packed"], parts["scales"], parts.get("zeros")

    def codes(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        q = _nibbles(packed[first:last], 0, 4)
        rows = scales[first:last]
        return q, rows, None if zeros is None else (rows.float() * zeros[first:last]).to(rows.dtype)

    return codes


def _nibbles(packed: Tensor, first: int, second: int) -> Tensor:
    """[n, K / 2] -> [n, K], bits `first` on in even columns."""
    both = torch.stack(((packed >> first) & 15, (packed >> second) & 15), dim=2)
    return both.view(packed.shape[0], -1)


def _book(parts: Mapping[str, Tensor]) -> Codes:
    packed, absmax = parts["packed"], parts["absmax"]
    if "nested" in parts:
        values = torch.tensor(dynamic_map(), device=absmax.device)[absmax.long()]
        block = torch.arange(absmax.numel(), device=absmax.device).view(absmax.shape) // NESTED_BLOCK
        absmax = values * parts["nested"].flatten()[block] + parts["offset"]

    def codes(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return _nibbles(packed[first:last], 4, 0), absmax[first:last], None

    return codes


def _scaled(scheme: str, parts: Mapping[str, Tensor]) -> Codes:
    weight, scales = parts["weight"], parts["scales"]
    tile_rows = 1 if scheme.endswith("channel") else int(scheme.split("-")[1].split("x")[0])

    def codes(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = torch.arange(first, last, device=scales.device) // tile_rows
        return weight[first:last], scales[rows], None

    return codes


def _gguf(kind: str, blocks: Tensor) -> Codes:
    """blocks uint8 [num_rows, blocks of a row, bytes]."""

    def codes(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = blocks[first:last]
        q, scales, mins = _BLOCKS[kind](rows.reshape(-1, rows.shape[2]))
        n = rows.shape[0]
        if kind.endswith("_k"):  # of 256 columns: four chunks
            assert mins is not None
            return q.view(n, -1), scales.reshape(n, -1, 4), mins.view(n, rows.shape[1], -1)
        return q.view(n, -1), scales.view(n, -1), None if mins is None else mins.view(n, -1)

    return codes


def _half(blocks: Tensor, at: int) -> Tensor:
    """[n, 1] float16 from the two bytes at `at`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _shifted(values: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """uint8 [n, m] -> [n, m x shifts]: each run of `width` bytes once per shift."""
    runs = values.reshape(values.shape[0], -1, width)
    return torch.stack([(runs >> shift) & mask for shift in shifts], dim=2).view(values.shape[0], -1)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _shifted(blocks[:, 2:], 16, (0, 4), 15), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _shifted(blocks[:, 4:], 16, (0, 4), 15), _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _steps(blocks: Tensor) -> Tensor:
    """Of Q4_K and Q5_K: [n, 4 chunks, 4] bytes: two scales, two minimums of six bits."""
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return torch.cat((scales.view(-1, 4, 2), minimums.view(-1, 4, 2)), dim=2)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    q = _shifted(blocks[:, 16:], 32, (0, 4), 15)
    return q, _steps(blocks), blocks[:, :4].contiguous().view(torch.float16)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low = _shifted(blocks[:, 48:], 32, (0, 4), 15)
    high = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1)
    return low | (high << 4), _steps(blocks), blocks[:, :4].contiguous().view(torch.float16)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low = _shifted(blocks[:, :128], 64, (0, 4), 15)
    high = _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    return low | (high << 4), blocks[:, 192:208], _half(blocks, 208)


_BLOCKS = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
