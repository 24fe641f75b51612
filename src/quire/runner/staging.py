"""From host memory to the device: a step's integers in one copy, and a ring of pinned bytes for adapters."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, of what is used on the device
FILLERS, SHARE = 8, 4 << 20  # threads that fill a piece, and bytes that each of them copies, at least
PIECES = 4  # at least, that a large source is cut into: one is filled while others are on their way
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


@dataclass(frozen=True, slots=True)
class _Piece:
    first: int
    last: int
    copied: torch.cuda.Event | None


class Staging:
    """A ring of pinned bytes, and another on the device for what is used from there.

    Allocated once, at start: to pin memory later the driver would wait until the device is idle. A copy through it
    waits only where it is full of copies that the device has not made or used yet.
    """

    def __init__(self, num_bytes: int, pin: bool, device: torch.device | None = None) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
        self._there = torch.empty(num_bytes if device else 0, dtype=torch.uint8, device=device)
        self._pinned = pin
        self._fillers = ThreadPoolExecutor(FILLERS, thread_name_prefix="quire-staging")
        self._next = 0
        self._pieces: deque[_Piece] = deque()  # oldest first

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target [n, width] uint8 on the device gets source [n, width], in the current stream; it is read at once."""
        num_rows = max(1, len(self._memory) // PIECES // max(1, source.shape[1]))
        for first in range(0, len(source), num_rows):
            some = source[first : first + num_rows]
            piece = self._take(some.numel())
            self._fill(piece, some.reshape(-1))
            target[first : first + num_rows].view(-1).copy_(piece, non_blocking=True)
            self._note(some.numel(), self._next)

    @contextmanager
    def sent(self, source: Tensor) -> Iterator[Tensor]:
        """source [bytes] uint8 on the device, for what the current stream is given before this ends."""
        size = -(-len(source) // ALIGNMENT) * ALIGNMENT
        piece = self._take(size)
        last = self._next
        self._fill(piece, source)
        there = self._there[last - size :][: len(source)]
        there.copy_(piece[: len(source)], non_blocking=True)
        try:
            yield there
        finally:  # the copy is queued, even if its use failed
            self._note(size, last)

    def _fill(self, piece: Tensor, source: Tensor) -> None:
        """One thread copies at a fifth of the speed at which a device takes it."""
        there, here = piece[: len(source)].numpy(), source.numpy()
        share = max(SHARE, -(-len(here) // FILLERS))
        copies = [
            self._fillers.submit(np.copyto, there[at : at + share], here[at : at + share])
            for at in range(share, len(here), share)
        ]
        np.copyto(there[:share], here[:share])
        for copy in copies:
            copy.result()

    def _note(self, num_bytes: int, last: int) -> None:
        """The `num_bytes` before `last` may be taken again when the current stream has come here."""
        event = None
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
        self._pieces.append(_Piece(last - num_bytes, last, event))

    def _take(self, num_bytes: int) -> Tensor:
        """`num_bytes` whose last copy was made."""
        if num_bytes > len(self._memory):
            raise ValueError(f"{num_bytes} bytes do not fit a staging memory of {len(self._memory)}")
        self._forget_copied()
        first = -(-self._next // ALIGNMENT) * ALIGNMENT if self._there.numel() else self._next
        first = first if first + num_bytes <= len(self._memory) else 0
        last = first + num_bytes
        # Pieces lie in the order of their copies: all that are older than an overlapping one are done as well.
        while any(piece.first < last and first < piece.last for piece in self._pieces):
            oldest = self._pieces.popleft()
            if oldest.copied is not None:
                oldest.copied.synchronize()
        self._next = last
        return self._memory[first:last]

    def _forget_copied(self) -> None:
        """Drops pieces whose copies were made: many small ones would slow down every new one."""
        while self._pieces and (copied := self._pieces[0].copied) is not None and copied.query():
            self._pieces.popleft()
