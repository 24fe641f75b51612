"""CUDA C++ compiled at run time by NVRTC, which comes with PyTorch, and launched through the driver.

Machine code is cached on disk by source, options, architecture and compiler version. Neither nvcc nor headers are
needed. All names and numbers are those of nvrtc.h and cuda.h.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache

import torch

from quire.kernels.cache_files import replacing
from quire.observe.host import cache_folder
from quire.observe.logs import get_logger

logger = get_logger(__name__)

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A kernel that takes structures by value."""

    def __init__(self, function: c_void_p, shared_bytes: int) -> None:
        self.function = function
        self._shared_bytes = shared_bytes
        self._allowed = 0
        self._at_once: dict[tuple[int, int], int] = {}
        self._allow(shared_bytes)

    def blocks_at_once(self, num_threads: int, shared_bytes: int) -> int:
        """Of one multiprocessor."""
        key = (num_threads, shared_bytes)
        if key not in self._at_once:
            self._allow(shared_bytes)
            count = c_int()
            check(
                driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    byref(count), self.function, c_int(num_threads), c_size_t(shared_bytes)
                )
            )
            self._at_once[key] = count.value
        return self._at_once[key]

    def _allow(self, shared_bytes: int) -> None:
        """Blocks may have this much dynamic shared memory."""
        if shared_bytes > self._allowed:
            check(driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, c_int(shared_bytes)))
            self._allowed = shared_bytes

    def __call__(
        self,
        grid: Sequence[int],
        num_threads: int,
        *arguments: ctypes.Structure,
        shared_bytes: int | None = None,
    ) -> None:
        """Enqueues the kernel on the current stream. `shared_bytes`: if not what it was made with."""
        grid_x, grid_y, grid_z = (*grid, 1, 1)[:3]
        parameters = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch.cuda.current_stream().cuda_stream
        shared = self._shared_bytes if shared_bytes is None else shared_bytes
        config = _LaunchConfig(
            grid_x, grid_y, grid_z, num_threads, 1, 1, shared, stream, ctypes.addressof(_EARLY), 1
        )
        check(driver().cuLaunchKernelEx(byref(config), self.function, parameters, None))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"{kind}_{axis}", c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("kind", c_int), ("padding", c_int), ("value", c_int * 16))


# A kernel may begin while the one before ends; it waits where it needs results (griddepcontrol.wait).
_EARLY = _LaunchAttribute(6, 0, (c_int * 16)(1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Module:
    """Compiled machine code, loaded on the current device."""

    def __init__(self, source: str, options: Sequence[str]) -> None:
        self._code = compiled(source, options)
        self._module = c_void_p()
        torch.cuda.current_stream()  # the driver needs PyTorch's context
        check(driver().cuModuleLoadData(byref(self._module), c_char_p(self._code)))

    def kernel(self, name: str, shared_bytes: int = 0) -> Kernel:
        """`shared_bytes`: of dynamic shared memory per block."""
        function = c_void_p()
        check(driver().cuModuleGetFunction(byref(function), self._module, c_char_p(name.encode())))
        return Kernel(function, shared_bytes)


def available() -> bool:
    """Whether the compiler can be loaded."""
    try:
        return _compiler() is not None
    except OSError:
        return False


def compiled(source: str, options: Sequence[str]) -> bytes:
    """Machine code for the current device, from the cache if it is there."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    options = (*options, f"--gpu-architecture={architecture}", "--std=c++17", "--use_fast_math")
    key = hashlib.sha256(repr((source, options, version())).encode()).hexdigest()[:24]
    path = cache_folder() / "cuda" / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code = _compile(source, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(code)
    return code


@cache
def version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    check(_compiler().nvrtcVersion(byref(major), byref(minor)))
    return major.value, minor.value


def _compile(source: str, options: Sequence[str]) -> bytes:
    library = _compiler()
    program = c_void_p()
    check(
        library.nvrtcCreateProgram(
            byref(program), c_char_p(source.encode()), b"quire.cu", c_int(0), None, None
        )
    )
    flags = (c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, c_int(len(options)), flags)
    size = c_size_t()
    if status:
        library.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"a CUDA kernel does not compile: {log.value.decode(errors='replace')}")
    check(library.nvrtcGetCUBINSize(program, byref(size)))
    code = ctypes.create_string_buffer(size.value)
    check(library.nvrtcGetCUBIN(program, code))
    library.nvrtcDestroyProgram(byref(program))
    return code.raw


@cache
def _compiler() -> ctypes.CDLL:
    return ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA answered with status {status}")
