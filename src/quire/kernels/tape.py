"""Records the native operations of a forward pass and runs them again without Python.

    with Tape() as tape:
        logits = model(batch, pool)   # runs, and is recorded
    tape.replay()                     # runs again, on the same buffers

It is the CPU's form of a captured graph: inputs are changed by writing into the tensors that were recorded, and
results appear in the tensors that the recorded run returned. Only native operations of the thread that entered the
tape are recorded: other threads may call kernels, or record tapes of their own, meanwhile.
"""

import math
import weakref
from array import array
from types import TracebackType

import numpy
import torch
from torch import Tensor

from quire.kernels import native

ALIGNMENT = 64


class Arena:
    """Memory shared by tapes that one thread records and replays in turn.

    A buffer is reused once no tensor from `empty` refers to it: replay keeps the order of operations, so each buffer is
    written before it is read, also after another tape has used it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[numpy.ndarray]] = {}
        self._buffers: dict[int, numpy.ndarray] = {}  # by address

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose buffer returns to the arena when the tensor and all its views are gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = max(ALIGNMENT, 1 << (num_bytes - 1).bit_length()) if num_bytes else ALIGNMENT
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._allocate(size)
        lent = buffer[:num_bytes]
        weakref.finalize(lent, free.append, buffer).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def borrowed(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory that does not reserve it: the next tape may write there."""
        buffer = self._buffers[tensor.data_ptr()]
        return torch.from_numpy(buffer[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape)

    @property
    def num_buffers(self) -> int:
        """How many buffers there are, given out or free."""
        return len(self._buffers)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor, or what it is a view of, lies in this arena."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _allocate(self, size: int) -> numpy.ndarray:
        memory = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        buffer = memory[start : start + size]
        self._buffers[buffer.ctypes.data] = buffer
        return buffer


class Tape:
    """The native operations that ran inside `with`, in order, and every tensor that they need.

    Tapes with an arena in common take the memory of the largest; each one's results last until another runs.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena or Arena()
        self._entries: list[tuple[int, array[int]]] = []
        self._kept: dict[int, Tensor] = {}
        self._program: array[int] = array("q")

    def __enter__(self) -> "Tape":
        native.loaded()
        if native.recording.tape is not None:
            raise RuntimeError("a tape is recording already; tapes do not nest")
        native.recording.tape = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native.recording.tape = None
        self._program = array("q")
        for address, arguments in self._entries:
            self._program.extend((address, arguments.buffer_info()[0]))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_buffers(self) -> int:
        """How many buffers the recorded outputs share."""
        return self._arena.num_buffers

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor from the arena; what it holds after a replay is this tape's result."""
        return self._arena.empty(shape, dtype)

    def record(self, address: int, arguments: "array[int]", tensors: tuple[Tensor | None, ...]) -> None:
        """Adds one call. Called by `native.call`."""
        self._entries.append((address, arguments))
        for tensor in tensors:
            if tensor is not None and not self._arena.owns(tensor):
                self._kept[id(tensor)] = tensor

    def replay(self) -> None:
        """Runs all recorded operations again, in order, in one call."""
        native.loaded().library.quire_replay(self._program.buffer_info()[0], len(self._program) // 2)
