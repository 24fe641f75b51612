"""Lanes: how a layer comes into its buffer. From a file into host memory; from pinned memory, or a file, to a GPU."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.layers.pinned import PinnedMemory
from quire.weights.layer_files import LayerFiles


class FileLane:
    """From a file into host memory, read by a thread. The computation is this process's own: no mark is needed."""

    def __init__(self, files: LayerFiles) -> None:
        self._files = files
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-layers")

    def mark(self) -> None:
        return None

    def bring(self, layer: int, buffer: Tensor, after: None) -> "Future[None]":
        return self._reader.submit(self._files.read, layer, buffer)

    def wait(self, arrival: "Future[None]") -> None:
        arrival.result()

    def settle(self, arrival: "Future[None]") -> None:
        arrival.result()


class Copies(Protocol):
    """Copies beside the computation, in order, and the marks that order both."""

    def mark(self) -> Any:
        """The computation as queued so far."""
        ...

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Queued behind earlier copies and the mark `after`; returns the copy's own mark."""
        ...

    def wait(self, mark: Any) -> None:
        """The computation goes on after the mark."""
        ...

    def settle(self, mark: Any) -> None:
        """The caller waits for the mark."""
        ...


class CudaCopies:
    """A side stream; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

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


class PinnedLane:
    """From pinned host memory: everything is queued, nothing waits."""

    def __init__(self, copies: Copies, pieces: Mapping[int, Tensor], memory: PinnedMemory) -> None:
        """`pieces` lie in `memory`, which stays pinned for as long as this lives."""
        self._copies = copies
        self._pieces = pieces
        self._memory = memory

    def mark(self) -> Any:
        return self._copies.mark()

    def bring(self, layer: int, buffer: Tensor, after: Any) -> Any:
        return self._copies.copy(self._pieces[layer], buffer, after)

    def wait(self, arrival: Any) -> None:
        self._copies.wait(arrival)

    def settle(self, arrival: Any) -> None:
        self._copies.settle(arrival)


class StagedLane:
    """Some layers lie in pinned memory, the others in files: a thread reads these into pinned buffers first.

    The caller waits until a layer's copy is queued, since a device cannot wait for what nobody has asked for yet.
    """

    def __init__(
        self,
        copies: Copies,
        pieces: Mapping[int, Tensor],
        staging: Sequence[Tensor],
        memory: PinnedMemory,
        files: LayerFiles,
    ) -> None:
        """`pieces` and `staging` lie in `memory`, which stays pinned for as long as this lives."""
        self._memory = memory
        self._copies = copies
        self._pieces = pieces
        self._files = files
        self._staging = list(staging)
        self._used: list[Any] = [None] * len(staging)  # until which copy each of them is read
        self._turn = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-layers")

    def mark(self) -> Any:
        return self._copies.mark()

    def bring(self, layer: int, buffer: Tensor, after: Any) -> "Future[Any]":
        return self._reader.submit(self._bring, layer, buffer, after)

    def wait(self, arrival: "Future[Any]") -> None:
        self._copies.wait(arrival.result())

    def settle(self, arrival: "Future[Any]") -> None:
        self._copies.settle(arrival.result())

    def _bring(self, layer: int, buffer: Tensor, after: Any) -> Any:
        if layer in self._pieces:
            return self._copies.copy(self._pieces[layer], buffer, after)
        turn, self._turn = self._turn, (self._turn + 1) % len(self._staging)
        if self._used[turn] is not None:
            self._copies.settle(self._used[turn])
        self._files.read(layer, self._staging[turn])
        self._used[turn] = self._copies.copy(self._staging[turn], buffer, after)
        return self._used[turn]
