"""dK and dV on Hopper GPUs in CUDA C++ (`hopper.cuh`), for 16-bit inputs with heads of 128.

Two warpgroups a block overlap products with the arithmetic between them, which Triton's loop does not. Everything
else is Triton's. Promises are those of the reference; sums have a fixed order.
"""

import ctypes
from ctypes import byref, c_char, c_float, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels import nvrtc
from quire.kernels.nvrtc import check, driver
from quire.kernels.packed_attention import triton
from quire.kernels.packed_attention.triton import forward, rows_of_heads

__all__ = ["backward", "forward"]

WIDTH, ROWS, TILE, THREADS = 128, 128, 64, 384
SHARED_BYTES = (8 + 4 * 4) * TILE * TILE * 2 + 1024  # a block's own rows and four stages, aligned
_KINDS = {torch.float16: (6, "f16"), torch.bfloat16: (9, "bf16")}  # CU_TENSOR_MAP_DATA_TYPE_…, PTX
_SWIZZLE_128B, _PROMOTE_256B = 3, 3


class _TensorMap(ctypes.Structure):
    _fields_ = (("bytes", c_char * 128),)


class _Maps(ctypes.Structure):
    _fields_ = tuple((name, _TensorMap) for name in ("k", "v", "q", "grad"))


class _Arguments(ctypes.Structure):
    """`Args` of hopper.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("sums", "delta", "dk", "dv", "starts")),
        ("scale", c_float),
        *((name, c_int) for name in ("num_tokens", "heads", "kv_heads")),
    )


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, max_len: int,
    scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the reference."""
    if mask is not None or not serves(q):
        return triton.backward(grad, q, k, v, out, sums, starts, max_len, scale, mask)
    grad, q, k, v = grad.contiguous(), rows_of_heads(q), rows_of_heads(k), rows_of_heads(v)
    dq, delta = triton.backward_queries(grad, q, k, v, out, sums, starts, max_len, scale)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    grid = (-(-max_len // ROWS), k.shape[1], len(starts) - 1)
    pointers = (x.data_ptr() for x in (sums, delta, dk, dv, starts))
    arguments = _Arguments(*pointers, scale, q.shape[0], q.shape[1], k.shape[1])
    _kernel(q.dtype, q.device)(grid, THREADS, _Maps(*map(_tensor_map, (k, v, q, grad))), arguments)
    return dq, dk, dv


def serves(q: Tensor) -> bool:
    return (
        q.shape[2] == WIDTH
        and q.dtype in _KINDS
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and nvrtc.available()
    )


def _tensor_map(x: Tensor) -> _TensorMap:
    """Boxes of 64 rows and 64 columns of x [T, heads, 128] as [T, heads * 128], swizzled."""
    made = _TensorMap()
    sizes = (c_uint64 * 2)(x.shape[1] * x.shape[2], x.shape[0])
    strides = (c_uint64 * 1)(x.stride(0) * x.element_size())
    box, steps = (c_uint32 * 2)(TILE, TILE), (c_uint32 * 2)(1, 1)
    kind, _ = _KINDS[x.dtype]
    pointer = c_void_p(x.data_ptr())
    check(
        driver().cuTensorMapEncodeTiled(
            byref(made), c_int(kind), c_uint32(2), pointer, sizes, strides, box, steps, c_int(0),
            c_int(_SWIZZLE_128B), c_int(_PROMOTE_256B), c_int(0),
        )
    )  # fmt: skip
    return made


@cache
def _kernel(dtype: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.Module(source(dtype), ()).kernel("keys", SHARED_BYTES)


def source(dtype: torch.dtype) -> str:
    _, kind = _KINDS[dtype]
    text = (Path(__file__).parent / "hopper.cuh").read_text()
    generated = _pair_of(kind) + _wgmma(kind, "scores", 64, False) + _wgmma(kind, "sums", 128, True)
    return "".join(
        generated if line.startswith("WGMMA ") else line for line in text.splitlines(keepends=True)
    )


def _pair_of(kind: str) -> str:
    """Two floats rounded to 16 bits, the first in the lower half, and each of them again."""
    low, high = "return __uint_as_float(pair << 16);", "return __uint_as_float(pair & 0xffff0000u);"
    if kind == "f16":
        low, high = (
            f'float wide; asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)({half}))); return wide;'
            for half in ("pair", "pair >> 16")
        )
    return (
        "__device__ inline u32 pair_of(float low, float high) {\n"
        f'u32 pair; asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); return pair;\n}}\n'
        f"__device__ inline float low_of(u32 pair) {{ {low} }}\n"
        f"__device__ inline float high_of(u32 pair) {{ {high} }}\n"
    )


def _wgmma(kind: str, name: str, columns: int, adds: bool) -> str:
    """wgmma.m64nNk16: inline assembly names each of its registers. With `adds`, a in registers and b by rows."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a_given, a_bound, at, transposed = ("u64 a", '"l"(a)', f"%{count}", "0, 0")
    if adds:
        a_given, at, transposed = (
            "const u32* a",
            f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}",
            "1",
        )
        a_bound = ", ".join(f'"r"(a[{i}])' for i in range(4))
    rest = count + (4 if adds else 1)
    given, predicate = ("", '"r"(1)') if adds else (", int adds", '"r"(adds)')
    return (
        f"__device__ inline void {name}(float* d, {a_given}, u64 b{given}) {{\n"
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{rest + 1}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{sums}}}, {at}, %{rest}, p, 1, 1, "
        f'{transposed}; }}" : {bound} : {a_bound}, "l"(b), {predicate});\n}}\n'
    )
