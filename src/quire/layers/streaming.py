"""Streaming of weights: layers that share a few buffers, each fetched while others compute.

`Ring` decides which layer comes into which buffer; a LayerTransfer copies it there, from a file to host memory or from
pinned memory or a file to a GPU. `LayerLayout` puts all parameters of a layer in one run of bytes, one copy.
"""

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import huge_pages
from quire.kernels.sm_share import side_stream
from quire.weights.layer_files import LayerFiles

ALIGNMENT = 256  # the widest load of tensor cores, on any device


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of a layer."""

    name: str  # as `parameters.collect` spells it
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte

    @property
    def end(self) -> int:
        return self.first + torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """All parameters of one decoder layer in one contiguous run of bytes."""

    parts: tuple[TensorSpan, ...]
    num_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "LayerLayout":
        """Room for these tensors, in their order."""
        parts = []
        first = 0
        for name, tensor in state.items():
            parts.append(TensorSpan(name, tensor.dtype, tuple(tensor.shape), first))
            first = -(-parts[-1].end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts), first)

    def views(self, piece: Tensor) -> dict[str, Tensor]:
        """piece [num_bytes] uint8 -> the layer's tensors inside it."""
        return {
            part.name: piece[part.first : part.end].view(part.dtype).view(part.shape) for part in self.parts
        }

    def fill(self, piece: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copies a layer's tensors into a piece, from and to any device. ConfigError if they are not of this layout."""
        if LayerLayout.of(state) != self:
            raise ConfigError(
                "layers of this model are stored in different ways, or some have experts and others none: they cannot "
                "take turns in one buffer: leave out the offload of weights, or, if only their number formats differ, "
                "choose quantization='none' or 'int4'"
            )
        for name, view in self.views(piece).items():
            view.copy_(state[name])

    def to_json(self) -> list[list[Any]]:
        return [[p.name, str(p.dtype).removeprefix("torch."), list(p.shape)] for p in self.parts]

    @classmethod
    def from_json(cls, described: list[list[Any]]) -> "LayerLayout":
        """The inverse of `to_json`."""
        kinds = [(name, getattr(torch, dtype), shape) for name, dtype, shape in described]
        return cls.of({name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in kinds})

    def without(self, prefix: str) -> "LayerLayout":
        """The layout of the tensors whose names do not begin so."""
        return LayerLayout.from_json([part for part in self.to_json() if not part[0].startswith(prefix)])


class PinnedMemory:
    """Host memory that a GPU copies from at the link's full speed.

    Pinned once as a whole, in huge pages: registering page by page would take most of a start.
    """

    def __init__(self, num_bytes: int, device: torch.device, setting: str = "cpu_offload_gb") -> None:
        """`setting`: the setting to lower where the system does not allow it."""
        # In a mapping of its own: a page cannot be pinned twice, and small tensors share theirs with others.
        alone = max(num_bytes, huge_pages.SMALLEST_ALONE)
        self.bytes: Tensor = huge_pages.zeros(alone, dtype=torch.uint8)[:num_bytes]
        if device.type != "cuda":
            return
        self.bytes.zero_()  # by many threads: faults the pages in before the driver does so one by one
        cudart = torch.cuda.cudart()
        result = cudart.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
        if result != cudart.cudaError.success:
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # consumes the sticky error
            raise ConfigError(
                f"{num_bytes / 1e9:.1f} GB of host memory could not be pinned ({result}): lower "
                f"{setting}, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(self, cudart.cudaHostUnregister, self.bytes.data_ptr()).atexit = False

    def pieces(self, num_bytes: int) -> list[Tensor]:
        """Cut into as many pieces of `num_bytes` as fit."""
        count = len(self.bytes) // num_bytes
        return list(self.bytes[: count * num_bytes].view(count, num_bytes).unbind(0)) if count else []


class LayerTransfer(Protocol):
    """Copies layers beside the computation, in the order of the calls."""

    def mark(self) -> Any:
        """The computation as queued so far."""
        ...

    def start(self, layer: int, buffer: Tensor, after: Any) -> Any:
        """Fills the buffer once the computation has passed the mark `after` (None: at once). Returns a handle."""
        ...

    def wait(self, handle: Any) -> None:
        """Orders later computation after the transfer."""
        ...

    def settle(self, handle: Any) -> None:
        """Blocks the caller until the transfer is done."""
        ...


class FileTransfer:
    """From a file into host memory, read by a thread. The CPU computes in the caller's thread: no mark is needed."""

    def __init__(self, files: LayerFiles) -> None:
        self._files = files
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-layers")

    def mark(self) -> None:
        return None

    def start(self, layer: int, buffer: Tensor, after: None) -> "Future[None]":
        return self._reader.submit(self._files.read, layer, buffer)

    def wait(self, handle: "Future[None]") -> None:
        handle.result()

    def settle(self, handle: "Future[None]") -> None:
        handle.result()


class CopyStream(Protocol):
    """Copies beside the computation, in order; a copy's handle is its mark. The rest is as in LayerTransfer."""

    def mark(self) -> Any: ...

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Queued behind earlier copies and the mark `after`; returns the copy's own mark."""
        ...

    def wait(self, mark: Any) -> None: ...
    def settle(self, mark: Any) -> None: ...


class CudaCopyStream:
    """A CUDA side stream; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, source: Tensor, target: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def settle(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


class PinnedTransfer:
    """From pinned host memory: everything is queued, nothing waits."""

    def __init__(self, copies: CopyStream, pieces: Mapping[int, Tensor], memory: PinnedMemory) -> None:
        """`pieces` lie in `memory`, which stays pinned for the life of this object."""
        self._copies = copies
        self._pieces = pieces
        self._memory = memory

    def mark(self) -> Any:
        return self._copies.mark()

    def start(self, layer: int, buffer: Tensor, after: Any) -> Any:
        return self._copies.copy(self._pieces[layer], buffer, after)

    def wait(self, handle: Any) -> None:
        self._copies.wait(handle)

    def settle(self, handle: Any) -> None:
        self._copies.settle(handle)


class StagedTransfer(PinnedTransfer):
    """From pinned memory for some layers; for the others a thread reads a file into a pinned buffer first.

    The caller waits until a layer's copy is queued: a device cannot wait for a copy that is not.
    """

    def __init__(
        self,
        copies: CopyStream,
        pieces: Mapping[int, Tensor],
        staging: Sequence[Tensor],
        memory: PinnedMemory,
        files: LayerFiles,
    ) -> None:
        """`pieces` and `staging` lie in `memory`, which stays pinned for the life of this object."""
        super().__init__(copies, pieces, memory)
        self._files = files
        self._staging = list(staging)
        self._used: list[Any] = [None] * len(staging)  # the last copy that reads each of them
        self._turn = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-layers")

    def start(self, layer: int, buffer: Tensor, after: Any) -> "Future[Any]":
        return self._reader.submit(self._start, layer, buffer, after)

    def wait(self, handle: "Future[Any]") -> None:
        self._copies.wait(handle.result())

    def settle(self, handle: "Future[Any]") -> None:
        self._copies.settle(handle.result())

    def _start(self, layer: int, buffer: Tensor, after: Any) -> Any:
        if layer in self._pieces:
            return self._copies.copy(self._pieces[layer], buffer, after)
        turn, self._turn = self._turn, (self._turn + 1) % len(self._staging)
        if self._used[turn] is not None:
            self._copies.settle(self._used[turn])
        self._files.read(layer, self._staging[turn])
        self._used[turn] = self._copies.copy(self._staging[turn], buffer, after)
        return self._used[turn]


class _Slot:
    """A buffer, the layer in it or on its way, and the mark until which it is in use."""

    __slots__ = ("after", "buffer", "handle", "layer")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.layer: int | None = None
        self.handle: Any = None
        self.after: Any = None


class Ring:
    """Layers that take turns in a few buffers: while one is used, the next ones are fetched.

    A layer always uses the same buffer, so its tensors are views that never change. Any order of layers is correct;
    the order only decides how long a layer is waited for.
    """

    def __init__(self, transfer: LayerTransfer, buffers: Sequence[Tensor], layers: Sequence[int]) -> None:
        """`layers` in the order they run; buffers [n] uint8 that hold any of them."""
        self._transfer = transfer
        self._slots = [_Slot(buffer) for buffer in buffers]
        self._slot_of = {layer: self._slots[i % len(buffers)] for i, layer in enumerate(layers)}
        self._next: dict[int, int] = {}  # the next layer in the same buffer, of the next step too
        for first in range(len(buffers)):
            turns = layers[first :: len(buffers)]
            self._next |= dict(zip(turns, [*turns[1:], turns[0]] if turns else [], strict=True))
        self.num_transfers = 0

    @property
    def num_buffers(self) -> int:
        return len(self._slots)

    @property
    def num_streamed(self) -> int:
        """Layers that are copied in each step; a layer with a buffer of its own stays there."""
        return sum(layer != following for layer, following in self._next.items())

    def buffer(self, layer: int) -> Tensor:
        """The layer's buffer."""
        return self._slot_of[layer].buffer

    def fill(self) -> float:
        """Fetches every buffer's first layer; returns the bytes per second.

        Measured over all buffers twice, after a first time that may fault memory in.
        """
        first = list(self._slot_of)[: len(self._slots)]
        second = [self._next[layer] for layer in first]
        self._settle(first)
        started = time.perf_counter()
        before = self.num_transfers
        self._settle(second)
        self._settle(first)
        seconds = max(time.perf_counter() - started, 1e-9)
        num_bytes = (self.num_transfers - before) * self._slots[0].buffer.nbytes
        return num_bytes / seconds if num_bytes else float("inf")

    def _settle(self, layers: list[int]) -> None:
        for layer in layers:
            self._start(layer)
        for layer in layers:
            self._transfer.settle(self._slot_of[layer].handle)

    def begin(self, layer: int) -> None:
        """Orders later computation after the layer's transfer into its buffer."""
        slot = self._slot_of[layer]
        if slot.layer != layer:  # the last forward pass was aborted
            slot.after = self._transfer.mark()
            self._start(layer)
        try:
            self._transfer.wait(slot.handle)
        except BaseException:
            slot.layer = None
            raise

    def end(self, layer: int) -> None:
        """Ends the layer's use: the next transfer into its buffer may start."""
        self._slot_of[layer].after = self._transfer.mark()
        self._start(self._next[layer])

    def _start(self, layer: int) -> None:
        slot = self._slot_of[layer]
        if slot.layer == layer:
            return
        slot.layer = layer
        slot.handle = self._transfer.start(layer, slot.buffer, slot.after)
        self.num_transfers += 1
