"""The native library: loading it, its threads, its instruction set, and calls, which a Tape records and replays.

Every native operation is `void op(const int64_t* arguments)`: pointers, integers and doubles packed in one
array, so that a tape can run it again without Python.
"""

import ctypes
import math
import os
import struct
import threading
import weakref
from array import array
from functools import cache
from types import TracebackType

import numpy
import torch
from torch import Tensor

from quire.kernels import build
from quire.observe.host import default_num_threads as default_num_threads
from quire.observe.logs import get_logger

logger = get_logger(__name__)

ALIGNMENT = 64  # bytes, of an arena's buffers
ISAS = ("amx", "avx512", "avx2", "generic")

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PAGE_CODES = {**DTYPE_CODES, torch.int8: 3}  # of numbers in the pool


class Recording(threading.local):
    """The tape that records in this thread, if any: another thread's calls and outputs are not its business."""

    tape: "Tape | None" = None


recording = Recording()


class NativeState:
    """The loaded library and the instruction set in use."""

    __slots__ = ("addresses", "isa", "library")

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.isa = ""
        self.addresses: dict[str, int] = {}


@cache
def _state() -> NativeState | None:
    try:
        library = ctypes.CDLL(str(build.ensure_built()))
    except (build.BuildError, OSError) as failure:
        logger.warning("native kernels are not available, the torch reference serves: %s", failure)
        return None
    library.quire_has_isa.argtypes = [ctypes.c_char_p]
    library.quire_operation.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.quire_operation.restype = ctypes.c_void_p
    for call in (library.quire_call, library.quire_call_aside):
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    library.quire_replay.argtypes, library.quire_replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
    library.quire_set_num_threads.argtypes = [ctypes.c_int]
    library.quire_set_num_threads(default_num_threads())
    state = NativeState(library)
    wanted = os.environ.get("QUIRE_ISA", "")
    usable = [isa for isa in ISAS if library.quire_has_isa(isa.encode())]
    if wanted and wanted not in usable:
        logger.warning("QUIRE_ISA=%s cannot run here, taking %s", wanted, usable[0])
    state.isa = wanted if wanted in usable else usable[0]
    return state


def available() -> bool:
    """Whether native kernels can be used; compiles them on the first call if need be."""
    return _state() is not None


def loaded() -> NativeState:
    """The library's state. Raises if native kernels are not available."""
    state = _state()
    if state is None:
        raise RuntimeError("native kernels are not available: install a C++ compiler")
    return state


def isa() -> str:
    """The instruction set in use."""
    return loaded().isa


def usable_isas() -> tuple[str, ...]:
    """Instruction sets that run here, best first."""
    library = loaded().library
    return tuple(name for name in ISAS if library.quire_has_isa(name.encode()))


def select_isa(name: str) -> None:
    """Uses another instruction set from now on (for tests; QUIRE_ISA does it at start)."""
    if name not in usable_isas():
        raise ValueError(f"instruction set {name!r} cannot run here; usable are {', '.join(usable_isas())}")
    state = loaded()
    state.isa = name
    state.addresses = {}


def set_num_threads(count: int) -> None:
    """How many threads native operations use that this thread calls, itself included."""
    loaded().library.quire_set_num_threads(count)


def num_threads() -> int:
    """How many threads native operations use that this thread calls; the number that was set last if it set none."""
    return int(loaded().library.quire_num_threads())


def real(value: float) -> int:
    """A float as the bits of a double, to be packed among integer arguments."""
    return struct.unpack("<q", struct.pack("<d", value))[0]  # type: ignore[no-any-return]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output tensor: from the arena of the tape that records in this thread, else freshly allocated."""
    tape = recording.tape
    return torch.empty(shape, dtype=dtype) if tape is None else tape.empty(shape, dtype)


def call(name: str, arguments: tuple[int, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Runs an operation, and records it if this thread has a tape running. `tensors` own the memory pointed to."""
    state = loaded()
    address = state.addresses.get(name) or _find(state, name)
    packed = array("q", arguments)
    state.library.quire_call(address, packed.buffer_info()[0])
    tape = recording.tape
    if tape is not None:
        tape.record(address, packed, tensors)


def call_aside(name: str, arguments: tuple[int, ...]) -> None:
    """Runs a single-threaded operation beside other operations, without the library's lock; never recorded."""
    state = loaded()
    packed = array("q", arguments)
    state.library.quire_call_aside(state.addresses.get(name) or _find(state, name), packed.buffer_info()[0])


def _find(state: NativeState, name: str) -> int:
    address = state.library.quire_operation(state.isa.encode(), name.encode())
    if not address:
        raise RuntimeError(f"the native library has no operation {name!r} for {state.isa}")
    state.addresses[name] = address
    return int(address)


def address(tensor: Tensor | None) -> int:
    """A tensor's address, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def page_scales(pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> tuple[int, int, int, int]:
    """The scales of K and V pages as arguments: two addresses, two strides of both. Zeros unless pages are int8."""
    if k_scales is None or v_scales is None:
        if pages.dtype is torch.int8:
            raise TypeError("pages in int8 have scales: give k_scales and v_scales")
        return 0, 0, 0, 0
    if (
        k_scales.dtype is not torch.bfloat16
        or k_scales.stride() != v_scales.stride()
        or k_scales.stride(2) != 1
    ):
        raise TypeError(f"scales of pages must be bfloat16 and lie alike, not {k_scales.dtype}")
    return k_scales.data_ptr(), v_scales.data_ptr(), k_scales.stride(0), k_scales.stride(1)


def check_floats(*tensors: Tensor | None) -> None:
    """Refuses tensors that native code would misread: not fp32, or with a strided last dimension."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype is not torch.float32 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            raise TypeError(
                f"native kernels take fp32 with a dense last dimension, "
                f"not {tensor.dtype} with strides {tensor.stride()}"
            )


def check_indices(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """Refuses index tensors that are not dense or of another type."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not dtype or not tensor.is_contiguous()):
            raise TypeError(f"native kernels take dense {dtype} here, not {tensor.dtype}")


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

        with Tape() as tape:
            logits = model(batch, pool)   # runs, and is recorded
        tape.replay()                     # runs again, on the same buffers

    The CPU's form of a captured graph: inputs are changed by writing into the recorded tensors, and results appear in
    the tensors that the recorded run returned. Only operations of the thread that entered the tape are recorded. Tapes
    with an arena in common take the memory of the largest; each one's results last until another runs.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena or Arena()
        self._entries: list[tuple[int, array[int]]] = []
        self._kept: dict[int, Tensor] = {}
        self._program: array[int] = array("q")

    def __enter__(self) -> "Tape":
        loaded()
        if recording.tape is not None:
            raise RuntimeError("a tape is recording already; tapes do not nest")
        recording.tape = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recording.tape = None
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
        """Adds one call. Called by `call`."""
        self._entries.append((address, arguments))
        for tensor in tensors:
            if tensor is not None and not self._arena.owns(tensor):
                self._kept[id(tensor)] = tensor

    def replay(self) -> None:
        """Runs all recorded operations again, in order, in one call."""
        loaded().library.quire_replay(self._program.buffer_info()[0], len(self._program) // 2)
