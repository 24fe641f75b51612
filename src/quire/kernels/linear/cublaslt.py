"""cuBLASLt through ctypes: the candidate algorithms of a GEMM, and running one of them.

PyTorch takes the first candidate of the library's heuristic, which proposes several and measures none. Descriptors live
in memory of this module, so nothing must be released. All names and numbers are those of cublasLt.h.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

MAX_CANDIDATES = 8  # the heuristic never proposes more
WORKSPACE_BYTES = 32 << 20  # as PyTorch allows on Hopper
ALIGNMENT = 256  # bytes; what the heuristic assumes of every pointer unless told otherwise

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSED = 1  # CUBLAS_OP_T
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_EPILOGUE_PLAIN, _EPILOGUE_RELU, _EPILOGUE_BIAS = 1, 2, 4
_PREF_WORKSPACE, _PREF_REDUCTIONS = 1, 3
_IN_FLOAT32 = 3  # in place or in the compute type, never in 16 bits


class _Opaque8(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)  # algorithm, matrix layout, preference


class _Opaque32(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 32),)  # GEMM descriptor


class Algorithm(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Opaque8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A GEMM but for its number of tokens."""

    num_rows: int  # of the weight
    num_columns: int
    dtype: torch.dtype
    bias: bool = False
    residual: bool = False
    relu: bool = False
    widened: bool = False  # results in float32

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.widened else self.dtype

    def __str__(self) -> str:
        extras = [name for name in ("bias", "residual", "relu", "widened") if getattr(self, name)]
        name = str(self.dtype).removeprefix("torch.")
        return "-".join((f"{self.num_rows}x{self.num_columns}", name, *extras))


class GemmPlan:
    """A GEMM of one shape and number of tokens: its descriptors and candidate algorithms."""

    def __init__(self, shape: GemmShape, num_tokens: int, device: torch.device) -> None:
        self.shape = shape
        self.num_tokens = num_tokens
        self._handle = _handle(torch.cuda.current_device() if device.index is None else device.index)
        # To the library, which is column-major, this is [N, T] = weight.T.T [N, K] @ x.T [K, T].
        self._description = _description(shape)
        self._weight = _layout(shape.dtype, shape.num_columns, shape.num_rows)
        self._x = _layout(shape.dtype, shape.num_columns, num_tokens)
        self._out = _layout(shape.out_dtype, shape.num_rows, num_tokens)
        self._one = c_float(1)
        self._beta = c_float(shape.residual)

    @cached_property
    def candidates(self) -> list[Algorithm]:
        """Algorithms that the heuristic proposes, its favourite first."""
        library = _library()
        preference = _Opaque8()
        _check(
            library.cublasLtMatmulPreferenceInit_internal(
                byref(preference), c_size_t(ctypes.sizeof(preference))
            )
        )
        set_preference = library.cublasLtMatmulPreferenceSetAttribute
        _check(
            set_preference(byref(preference), _PREF_WORKSPACE, byref(c_uint64(WORKSPACE_BYTES)), c_size_t(8))
        )
        _check(set_preference(byref(preference), _PREF_REDUCTIONS, byref(c_uint32(_IN_FLOAT32)), c_size_t(4)))
        algorithms, count = (Algorithm * MAX_CANDIDATES)(), c_int()
        problem = (self._description, self._weight, self._x, self._out, self._out, preference)
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, *map(byref, problem), MAX_CANDIDATES, algorithms, byref(count)
            )
        )
        return [algorithm for algorithm in algorithms[: count.value] if not algorithm.state]

    def run(self, algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Enqueues the GEMM. `out` holds the residual if there is one, then the result. Pointers must be aligned."""
        if bias is not None:
            _set(self._description, _DESC_BIAS_POINTER, c_void_p(bias.data_ptr()))
        size = algorithm.workspace_bytes
        workspace = x.new_empty(size, dtype=torch.uint8) if size else None
        result = c_void_p(out.data_ptr())
        _check(
            _library().cublasLtMatmul(
                self._handle, byref(self._description), byref(self._one),
                c_void_p(weight.data_ptr()), byref(self._weight), c_void_p(x.data_ptr()), byref(self._x),
                byref(self._beta), result, byref(self._out), result, byref(self._out),
                byref(algorithm.algorithm), c_void_p(workspace.data_ptr() if workspace is not None else None),
                c_size_t(size), c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )
        )  # fmt: skip


def version() -> str:
    """The library's version: another one may propose other algorithms."""
    return str(_library().cublasLtGetVersion())


@cache
def _library() -> ctypes.CDLL:
    """The library that PyTorch has loaded. OSError if there is none."""
    library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
    library.cublasLtGetVersion.restype = c_size_t
    return library


@cache
def _handle(device_index: int) -> c_void_p:
    """One per device; any thread may use it."""
    handle = c_void_p()
    with torch.cuda.device(device_index):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _description(shape: GemmShape) -> _Opaque32:
    description = _Opaque32()
    size = c_size_t(ctypes.sizeof(description))
    _check(
        _library().cublasLtMatmulDescInit_internal(
            byref(description), size, _COMPUTE_FLOAT32, _TYPES[torch.float32]
        )
    )
    epilogue = _EPILOGUE_RELU * shape.relu + _EPILOGUE_BIAS * shape.bias
    _set(description, _DESC_TRANSA, c_int(_TRANSPOSED))
    _set(description, _DESC_EPILOGUE, c_int(epilogue or _EPILOGUE_PLAIN))
    if shape.bias:
        _set(description, _DESC_BIAS_TYPE, c_int(_TYPES[shape.dtype]))
    return description


def _set(description: _Opaque32, attribute: int, value: c_int | c_void_p) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _check(_library().cublasLtMatmulDescSetAttribute(byref(description), attribute, byref(value), size))


def _layout(dtype: torch.dtype, num_rows: int, num_columns: int) -> _Opaque8:
    """A dense column-major matrix."""
    layout = _Opaque8()
    sizes = (c_uint64(num_rows), c_uint64(num_columns), c_int64(num_rows))
    _check(
        _library().cublasLtMatrixLayoutInit_internal(
            byref(layout), c_size_t(ctypes.sizeof(layout)), _TYPES[dtype], *sizes
        )
    )
    return layout


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered with status {status}")
