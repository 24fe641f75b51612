"""Vector: a small parameter kept in full precision, such as a norm's weight or a bias."""

import torch
from torch import Tensor

from quire.layers.loader import Loader, check_shape


class Vector:
    """One dimension, filled from checkpoint tensors in any float type."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, fill: float = 0.0) -> None:
        self.value = torch.full((size,), fill, dtype=dtype, device=device)  # [size]

    def loader(self, first: int = 0, size: int | None = None) -> Loader:
        """Takes one checkpoint tensor into entries first .. first + size - 1 (all unless told)."""
        count = self.value.shape[0] if size is None else size

        def take(tensor: Tensor) -> None:
            self.value[first : first + count].copy_(tensor)

        return Loader((count,), take)

    def adopt(self, tensor: Tensor) -> None:
        """Takes over a tensor of the same shape without copying it."""
        check_shape(tensor, tuple(self.value.shape))
        self.value = tensor.to(device=self.value.device, dtype=self.value.dtype)
