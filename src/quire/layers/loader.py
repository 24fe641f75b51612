"""Loader: where one checkpoint tensor goes, and what shape it must have."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.core.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Loader:
    """Called with a tensor of `shape` in any float type; converts and keeps it, never the tensor itself."""

    shape: tuple[int, ...]
    take: Callable[[Tensor], None]

    def __call__(self, tensor: Tensor) -> None:
        check_shape(tensor, self.shape)
        self.take(tensor)


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Refuses a tensor that this model cannot use; the caller knows its name."""
    if tuple(tensor.shape) != expected:
        raise WeightsError(f"its shape is {list(tensor.shape)} where the config asks for {list(expected)}")
