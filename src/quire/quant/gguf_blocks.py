"""GGUF's blocks in their own bytes: Q4_0, Q4_1, Q8_0 (32 columns), Q4_K, Q5_K, Q6_K (256 columns).

Decoded bit for bit as the `gguf` package does.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.core.errors import WeightsError
from quire.quant.encoded import Part, Scheme, divided

Decode = Callable[[Tensor], Tensor]  # blocks uint8 [n, bytes] -> float32 [n, columns]


class GgufBlocks(Scheme):
    def __init__(self, kind: str) -> None:
        """`kind` as GGUF names it, such as Q4_K."""
        self.kind = kind
        self.block, self.block_bytes, self._decode, self._halves = KINDS[kind]
        self.packing = self.block

    @property
    def name(self) -> str:
        return f"gguf-{self.kind.lower()}"

    @classmethod
    def parse(cls, name: str) -> "GgufBlocks | None":
        kind = name.removeprefix("gguf-").upper()
        return cls(kind) if name.startswith("gguf-") and kind in KINDS else None

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        blocks = divided(num_columns, self.block, self.name)
        shape = (num_rows, blocks, self.block_bytes)
        return {"blocks": Part(shape, (torch.uint8,), columns=self.block)}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return self._decode(parts["blocks"].reshape(-1, self.block_bytes)).view(shape)

    def check(self, blocks: Tensor) -> None:
        """WeightsError if a block [..., block_bytes] has a scale that is not a number."""
        for at in self._halves:
            scales = blocks[..., at : at + 2].contiguous().view(torch.float16)
            wrong = ~torch.isfinite(scales)
            if wrong.any():
                raise WeightsError(
                    f"its {self.kind} block {int(wrong.flatten().nonzero()[0])} has a scale of "
                    f"{float(scales[wrong][0])}: fetch or convert the model again"
                )


def _half(blocks: Tensor, at: int) -> Tensor:
    """[n, 1] float32 from the two bytes at `at`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifted(values: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """uint8 [n, m] -> [n, m × shifts]: each run of `width` bytes once per shift."""
    runs = values.reshape(values.shape[0], -1, width)
    return torch.stack([(runs >> shift) & mask for shift in shifts], dim=2).view(values.shape[0], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_shifted(blocks[:, 2:], 16, (0, 4), 15).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _shifted(blocks[:, 4:], 16, (0, 4), 15).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 8, 1] each, of Q4_K and Q5_K: six bits per group of 32, times the block's two halves."""
    low, middle, high = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return (_half(blocks, 0) * scales.float())[:, :, None], (_half(blocks, 2) * minimums.float())[:, :, None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _scales_and_minimums(blocks)
    q = _shifted(blocks[:, 16:], 32, (0, 4), 15).view(-1, 8, 32).float()
    return (scales * q - minimums).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _scales_and_minimums(blocks)
    low = _shifted(blocks[:, 48:], 32, (0, 4), 15)
    high = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1)
    q = (low | (high << 4)).view(-1, 8, 32).float()
    return (scales * q - minimums).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    low = _shifted(blocks[:, :128], 64, (0, 4), 15)
    high = _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    q = (low | (high << 4)).view(-1, 16, 16).float() - 32
    return (scales[:, :, None] * q).view(-1, 256)


# Columns and bytes of a block; its decoder; where its halves are.
KINDS: dict[str, tuple[int, int, Decode, tuple[int, ...]]] = {
    "Q4_0": (32, 18, _q4_0, (0,)),
    "Q4_1": (32, 20, _q4_1, (0, 2)),
    "Q8_0": (32, 34, _q8_0, (0,)),
    "Q4_K": (256, 144, _q4_k, (0, 2)),
    "Q5_K": (256, 176, _q5_k, (0, 2)),
    "Q6_K": (256, 210, _q6_k, (208,)),
}
