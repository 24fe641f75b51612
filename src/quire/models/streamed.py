"""StreamedLayer: a decoder's layer whose weights lie elsewhere and come into a ring's buffer when it is their turn."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.layers.parameters import Stateful
from quire.layers.streaming import Ring
from quire.models.model import Layer, Model


class StreamedLayer:
    """Stands in for the layer in its model's stack; the layer's tensors are views of its buffer."""

    def __init__(self, layer: Layer, index: int, ring: Ring) -> None:
        self._layer = layer
        self._index = index
        self._ring = ring

    def attend(self, *arguments: Any) -> Tensor:
        self._ring.begin(self._index)
        return self._layer.attend(*arguments)

    def finish(self, *arguments: Any) -> Any:
        result = self._layer.finish(*arguments)
        self._ring.end(self._index)
        return result

    def layers(self) -> dict[str, Stateful]:
        return self._layer.layers()


@dataclass(frozen=True, slots=True)
class Streaming:
    """Where a model's layers live and what a step has to move, as decided when it was loaded."""

    num_layers: int
    layer_bytes: int
    pinned: tuple[int, ...]  # layers in pinned host memory
    on_disk: tuple[int, ...]  # layers in files
    folder: str  # where those are
    ring: Ring
    bytes_per_second: float  # of bringing layers, measured at start
    kept_bytes: int  # of weights that are always in memory, buffers not counted

    @property
    def step_bytes(self) -> int:
        """What every step moves."""
        return self.ring.num_streamed * self.layer_bytes

    @property
    def step_seconds(self) -> float:
        """What every step takes at least."""
        return self.step_bytes / self.bytes_per_second

    @property
    def buffer_bytes(self) -> int:
        return self.ring.num_buffers * self.layer_bytes


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, evenly through the depth: those between them give each copy time."""
    return tuple((i + 1) * num_layers // count - 1 for i in range(count))


def is_streamed(model: Model) -> bool:
    """Whether passes must be run layer by layer: a recorded one could not wait for weights."""
    return any(isinstance(layer, StreamedLayer) for layer in model.stack)
