"""Ring: layers that take turns in a few buffers. While one is used, the next ones are on their way.

A layer always comes into the same buffer, so that its tensors can be views that never change. Whatever order
layers are asked for, what is used is what was asked for: order decides only how long one waits.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Lane(Protocol):
    """Brings layers beside the computation, one after the other in the order asked for."""

    def mark(self) -> Any:
        """The computation as queued so far."""
        ...

    def bring(self, layer: int, buffer: Tensor, after: Any) -> Any:
        """Fills the buffer once the computation has passed the mark `after` (None: at once). Returns the arrival."""
        ...

    def wait(self, arrival: Any) -> None:
        """What the computation queues from now on comes after the arrival."""
        ...

    def settle(self, arrival: Any) -> None:
        """The caller itself waits for the arrival."""
        ...


class _Slot:
    """A buffer, who lies in it or is coming, and until when it is in use."""

    __slots__ = ("after", "arrival", "buffer", "layer")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.layer: int | None = None
        self.arrival: Any = None
        self.after: Any = None


class Ring:
    def __init__(self, lane: Lane, buffers: Sequence[Tensor], layers: Sequence[int]) -> None:
        """`layers` in the order they run; buffers [n] uint8 that hold any of them."""
        self._lane = lane
        self._slots = [_Slot(buffer) for buffer in buffers]
        self._slot_of = {layer: self._slots[i % len(buffers)] for i, layer in enumerate(layers)}
        self._next: dict[int, int] = {}  # who follows in the same buffer, the next step's included
        for first in range(len(buffers)):
            turns = layers[first :: len(buffers)]
            self._next |= dict(zip(turns, [*turns[1:], turns[0]] if turns else [], strict=True))
        self.num_brought = 0

    @property
    def num_buffers(self) -> int:
        return len(self._slots)

    @property
    def num_streamed(self) -> int:
        """Layers that come anew in each step; one that has a buffer to itself stays there."""
        return sum(layer != following for layer, following in self._next.items())

    def buffer(self, layer: int) -> Tensor:
        """Where the layer always lies when it is used."""
        return self._slot_of[layer].buffer

    def fill(self) -> float:
        """Brings every buffer's first layer, so that nothing waits later; at how many bytes per second.

        Measured over all buffers twice, after a first time that may have found no memory behind them yet.
        """
        first = list(self._slot_of)[: len(self._slots)]
        second = [self._next[layer] for layer in first]
        self._settle(first)
        started = time.perf_counter()
        before = self.num_brought
        self._settle(second)
        self._settle(first)
        seconds = max(time.perf_counter() - started, 1e-9)
        num_bytes = (self.num_brought - before) * self._slots[0].buffer.nbytes
        return num_bytes / seconds if num_bytes else float("inf")

    def _settle(self, layers: list[int]) -> None:
        for layer in layers:
            self._bring(layer)
        for layer in layers:
            self._lane.settle(self._slot_of[layer].arrival)

    def begin(self, layer: int) -> None:
        """What is computed from now on finds the layer in its buffer."""
        slot = self._slot_of[layer]
        if slot.layer != layer:  # the pass before this one was broken off
            slot.after = self._lane.mark()
            self._bring(layer)
        try:
            self._lane.wait(slot.arrival)
        except BaseException:
            slot.layer = None
            raise

    def end(self, layer: int) -> None:
        """The layer was used; what comes next into its buffer may set out."""
        self._slot_of[layer].after = self._lane.mark()
        self._bring(self._next[layer])

    def _bring(self, layer: int) -> None:
        slot = self._slot_of[layer]
        if slot.layer == layer:
            return
        slot.layer = layer
        slot.arrival = self._lane.bring(layer, slot.buffer, slot.after)
        self.num_brought += 1
