"""Loader: where one checkpoint tensor goes, and what shape it must have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.core.errors import WeightsError
from quire.layers.lora import LoraGroup


class Adaptable(Protocol):
    """A layer whose result adapters can add to."""

    def take_lora(self, group: LoraGroup) -> None:
        """From now on adds what the lines' adapters have at these sites."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its own tensors, by name; views, not copies."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a layer that one checkpoint matrix fills: a site of adapters."""

    layer: Adaptable
    first_row: int
    num_outputs: int
    num_inputs: int
    is_embedding: bool = False  # inputs are ids
    module: str = ""  # the module's name, where the tensor is another's


@dataclass(frozen=True, slots=True)
class Loader:
    """Called with a tensor of `shape` in any float type; converts and keeps it, never the tensor itself."""

    shape: tuple[int, ...]
    take: Callable[[Tensor], None]
    parts: tuple[Part, ...] = ()  # what the tensor fills, as far as adapters can add to it

    def __call__(self, tensor: Tensor) -> None:
        check_shape(tensor, self.shape)
        self.take(tensor)


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Refuses a tensor that this model cannot use; the caller knows its name."""
    if tuple(tensor.shape) != expected:
        raise WeightsError(f"its shape is {list(tensor.shape)} where the config asks for {list(expected)}")
