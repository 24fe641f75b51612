"""Sections: several integer arrays in one, so that a step sends one piece of memory to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Each array begins at a multiple of 16 bytes: a kernel is compiled again for pointers of another alignment.
ALIGNED = 4


def round_up(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class Sections:
    """Arrays one behind the other, found again in the tensor that the host array became."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._lengths = [len(array) for array in arrays]
        ends = np.cumsum([round_up(length) for length in self._lengths]).tolist()
        self._firsts = [0, *ends[:-1]]
        self.packed = np.zeros(ends[-1], np.int32)
        for array, first, length in zip(arrays, self._firsts, self._lengths, strict=True):
            self.packed[first : first + length] = array

    def __len__(self) -> int:
        return len(self.packed)

    def split(self, sent: Tensor) -> list[Tensor]:
        """The arrays in `sent`, a copy of `packed`."""
        return [
            sent[first : first + length] for first, length in zip(self._firsts, self._lengths, strict=True)
        ]


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array of int32 on the device, without waiting: torch keeps the pinned copy until it was read."""
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """A host tensor that the device can read while the host goes on."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    tensor = torch.empty(array.shape, dtype=torch.int32, pin_memory=True)
    tensor.numpy()[...] = array
    return tensor
