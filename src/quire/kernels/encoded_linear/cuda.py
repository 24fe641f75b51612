"""Encoded rows times activations on NVIDIA GPUs: CUDA C++ with tensor cores (compute 8.0 or later).

Weights are packed once in the order in which a lane of a warp needs them (`decode.cuh`). Few tokens are bound by
memory: every weight is read once, 16 bytes per lane. More tokens run on Hopper's asynchronous products with the weights
decoded into registers; for very many, or on older GPUs, the weight is decoded as a whole and multiplied by cuBLAS.
"""

import ctypes
import math
import re
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels import nvrtc
from quire.kernels.encoded_linear import formats
from quire.kernels.encoded_linear.formats import BOOK, CHUNK, ROWS, TILE, Format
from quire.kernels.sm_share import num_sms

LAYOUT = "cuda1"
PACKING = ROWS * CHUNK
DTYPES = (torch.float16, torch.bfloat16)
FEW = 8  # tokens up to which a block walks along whole rows
FEW_INTEGERS = 16  # the same for int4 without minimums, which takes the fewest instructions
TOKEN_TILES = (32, 64, 128, 256)  # of the kernel for many tokens
STAGES = {32: 6, 64: 6, 128: 6, 256: 5}
MANY = 512  # tokens beyond which a decoded weight and cuBLAS are faster
THREADS = 256  # of a block for few tokens
# Kernels for few tokens by tiles of 8 tokens (0: one token, kept in shared memory) and by tiles of rows.
FEW_KERNELS = {
    (0, 1): "one",
    (0, 2): "one_gated",
    (1, 1): "few_1",
    (2, 1): "few_2",
    (1, 2): "few_1_gated",
    (2, 2): "few_2_gated",
}
ONE_BYTES = 65536  # of the token, at most
RING_BYTES = 40960  # of a block and tile of rows for few tokens, about
SPLIT_BYTES = 12  # how much a split's partial sums count against rounds of blocks; an estimate, not tuned

layout, pack, decode = formats.layout, formats.pack, formats.decode


def fits(scheme: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
    """Whether there is a product for such rows, on a GPU that need not be here."""
    found = formats.parse(scheme)
    return found is not None and dtype in DTYPES and num_columns % found.column_multiple == 0


def serves(scheme: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
    return (
        fits(scheme, num_rows, num_columns, dtype)
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
        and nvrtc.available()
    )


class KernelArguments(ctypes.Structure):
    """`Args` of decode.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "high", "scales", "mins", "x", "out", "bias", "residual")),
        ("norm", c_void_p),
        ("partial", c_void_p),
        *((name, c_int64) for name in ("x_stride", "out_stride", "residual_stride")),
        *(
            (name, c_int)
            for name in ("tokens", "rows", "chunks", "x_chunks", "splits", "up_tile", "wide", "by_four")
        ),
        ("eps", c_float),
    )


class CudaProduct:
    """Products by one packed weight. Launches are made on the current stream and may be captured."""

    def __init__(self, scheme: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        self._format = formats.parse(scheme)
        assert self._format is not None
        integers = self._format.code == formats.INTEGER and not self._format.mins
        self._most_few = FEW_INTEGERS if integers else FEW
        self._parts, self._shape = parts, shape
        self._kernels: dict[torch.dtype, Kernels] = {}

    def linear(self, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        """out [T, rows] in x's type or float32; in x's type it may be the residual."""
        tokens = x.shape[0]
        if tokens == 0:
            return
        if tokens <= self._most_few:
            arguments = self._arguments(x, out, bias, residual)
            self._bound(x).few(-(-self._shape[0] // TILE), arguments, 1, keeps_token(x))
        elif tokens <= MANY and torch.cuda.get_device_capability(x.device)[0] == 9:
            self._many(x, out, bias, residual)
        else:
            self._expanded(x, out, bias, residual)

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """[T, rows / 2]; None where a GEMM and an activation are as fast."""
        return self._gated(x, bias, None, 0.0) if self._gates(x) else None

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float, silu_mul: bool) -> Tensor | None:
        """RMS norm of one token and GEMM in one kernel; None for more, and for a longer token than fits."""
        if not keeps_token(x, norm_weight) or (silu_mul and not self._gates(x)):
            return None
        if silu_mul:
            return self._gated(x, None, norm_weight, eps)
        out = x.new_empty(x.shape[0], self._shape[0])
        arguments = self._arguments(x, out, None, None, norm_weight, eps)
        self._bound(x).few(-(-self._shape[0] // TILE), arguments, 1, True)
        return out

    def _gates(self, x: Tensor) -> bool:
        return x.shape[0] <= self._most_few and self._shape[0] % (2 * TILE) == 0

    def _gated(self, x: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float) -> Tensor:
        half = self._shape[0] // 2
        out = x.new_empty(x.shape[0], half)
        arguments = self._arguments(x, out, bias, None, norm_weight, eps)
        self._bound(x).few(half // TILE, arguments, 2, keeps_token(x))
        return out

    def _many(self, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        kernels = self._bound(x)
        (tokens, columns), rows = x.shape, self._shape[0]
        tile = next((size for size in TOKEN_TILES if size >= tokens), TOKEN_TILES[-1])
        token_tiles, blocks, chunks = -(-tokens // tile), -(-rows // ROWS), formats.num_chunks(columns)
        ordered = x.new_empty(chunks, token_tiles * tile, CHUNK)
        arguments = self._arguments(x, ordered, None, None)
        arguments.out_stride = token_tiles * tile
        kernels.permute((-(-tokens * chunks * 2 // 256),), 256, arguments)
        splits = best_splits(blocks * token_tiles, chunks, tile, kernels.num_processors)
        partial = x.new_empty(splits, tokens, blocks * ROWS, dtype=torch.float32) if splits > 1 else None
        arguments = self._arguments(x, out, bias, residual)
        arguments.x, arguments.x_stride, arguments.splits = ordered.data_ptr(), token_tiles * tile, splits
        arguments.partial = 0 if partial is None else partial.data_ptr()
        kernels.many[tile]((blocks, token_tiles, splits), 384, arguments)
        if splits > 1:
            kernels.reduce((-(-tokens * blocks * ROWS // 4 // 256),), 256, arguments)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Decoded as a whole: [rows, columns] in a 16-bit type."""
        rows, columns = self._shape
        weight = torch.empty(rows, columns, dtype=dtype, device=self._parts["packed"].device)
        arguments = self._arguments(weight, weight, None, None)
        self._bound(weight).expand((-(-rows // TILE), -(-columns // CHUNK // 8)), 256, arguments)
        return weight

    def _expanded(self, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        weight = self.weight(x.dtype)
        if residual is not None and residual.data_ptr() == out.data_ptr():
            out.addmm_(x, weight.t())
            residual = None
        elif out.dtype is x.dtype:
            torch.mm(x, weight.t(), out=out) if out.is_contiguous() else out.copy_(x @ weight.t())
        else:
            out.copy_(torch.mm(x, weight.t(), out_dtype=torch.float32))
        for term in (bias, residual):
            if term is not None:
                out += term

    def _bound(self, x: Tensor) -> "Kernels":
        if x.dtype not in self._kernels:
            scales = self._parts["scales"].dtype
            assert self._format is not None
            self._kernels[x.dtype] = kernels_of(self._format, scales, x.dtype, x.device)
        return self._kernels[x.dtype]

    def _arguments(
        self,
        x: Tensor,
        out: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> KernelArguments:
        assert self._format is not None
        assert x.stride(1) == 1, "columns must be contiguous"
        rows, columns = self._shape
        pointers = (self._parts.get(name) for name in ("packed", "high", "scales", "mins"))
        tensors = (*pointers, x, out, bias, residual, norm, None)
        return KernelArguments(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            x.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
            x.shape[0], rows, formats.num_chunks(columns), columns // CHUNK, 1, rows // 2 // TILE,
            out.dtype is torch.float32, _by_four(rows, out, bias, residual), eps,
        )  # fmt: skip


Product = CudaProduct


def keeps_token(x: Tensor, norm_weight: Tensor | None = None) -> bool:
    """Whether x is one token that fits in shared memory and is read in quads."""
    aligned = all(tensor.data_ptr() % 8 == 0 for tensor in (x, norm_weight) if tensor is not None)
    return x.shape[0] == 1 and x.shape[1] * 2 <= ONE_BYTES and aligned


def _by_four(rows: int, *tensors: Tensor | None) -> bool:
    """Whether four rows of a token can be read and written at a time."""
    given = [tensor for tensor in tensors if tensor is not None]
    return rows % 4 == 0 and all(
        tensor.data_ptr() % (4 * tensor.element_size()) == 0
        and (tensor.dim() == 1 or tensor.stride(0) % 4 == 0)
        for tensor in given
    )


def fp8_rows(weight: Tensor, scales: Tensor) -> CudaProduct | None:
    """Products of up to FEW tokens by float8 rows as they are [rows, columns], with one float32 scale each."""
    shape = (weight.shape[0], weight.shape[1])
    if not serves(formats.ROWS_OF_FLOAT8, *shape, torch.bfloat16):
        return None
    return CudaProduct(formats.ROWS_OF_FLOAT8, {"packed": weight, "scales": scales}, shape)


def best_splits(blocks: int, chunks: int, tile: int, processors: int) -> int:
    """Parts that the columns are cut into: fewer rounds of blocks against sums that are written and read again."""

    def cost(splits: int) -> float:
        rounds = math.ceil(blocks * splits / processors)
        return rounds * (math.ceil(chunks / splits) + 2) + (blocks * splits / processors * SPLIT_BYTES / 8)

    return min(range(1, max(2, chunks // 4)), key=cost)


@dataclass(frozen=True)
class Kernels:
    """Of one format and activation type."""

    few_tokens: dict[tuple[int, int], tuple[nvrtc.Kernel, int]]  # FEW_KERNELS, and bytes of shared memory
    pair_groups: int  # of two chunks
    expand: nvrtc.Kernel
    permute: nvrtc.Kernel
    reduce: nvrtc.Kernel
    many: dict[int, nvrtc.Kernel]
    num_processors: int

    def few(self, tiles: int, arguments: KernelArguments, row_tiles: int, one: bool) -> None:
        """Few tokens: as many blocks as run at once, which take tiles in turn. `one`: it is kept in shared memory."""
        kernel, shared_bytes = self.few_tokens[0 if one else -(-arguments.tokens // 8), row_tiles]
        if one:
            shared_bytes += arguments.chunks * CHUNK * 2 + arguments.chunks // 2 * self.pair_groups * 4
        blocks = kernel.blocks_at_once(THREADS, shared_bytes) * self.num_processors
        kernel((min(tiles, blocks),), THREADS, arguments, shared_bytes=shared_bytes)


def ring_slots(slot_bytes: int, halved: bool) -> int:
    """Slots of a block's ring, as few_rows.cuh counts them."""
    whole = RING_BYTES // slot_bytes
    return max(1, whole // 2) if halved else whole


@cache
def kernels_of(kind: Format, scales: torch.dtype, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Compiles them, or takes them from the disk: a second or two the first time."""
    hopper = torch.cuda.get_device_capability(device)[0] == 9 and kind.code != formats.FLOAT8_ROWS
    module = nvrtc.Module(source(kind, scales, dtype, hopper), ())
    raw_words = kind.raw_words(scales)
    sets = 1 if not kind.group or kind.group > CHUNK else 2
    pair = 8 * 32 * (2 * kind.words + sets * raw_words) * 4  # of two chunks
    table = 256 * 32 * 4 if kind.code == BOOK else 0
    few = {}
    for (tokens, rows), name in FEW_KERNELS.items():
        ring = ring_slots(pair, tokens * rows == 4 or kind.code == BOOK) * pair * rows
        few[tokens, rows] = (module.kernel(name), ring + table)
    pair_groups = 1 if kind.groups == 0 or kind.group > CHUNK else 2 * kind.groups
    many = {
        tile: module.kernel(
            f"many_{tile}", STAGES[tile] * (tile * 128 + 8 * 128 * kind.words + 8 * 32 * raw_words) + table
        )
        for tile in (TOKEN_TILES if hopper else ())
    }
    helpers = {name: module.kernel(name) for name in ("expand", "permute", "reduce")}
    return Kernels(few, pair_groups, **helpers, many=many, num_processors=num_sms(device))


def source(kind: Format, scales: torch.dtype, dtype: torch.dtype, hopper: bool) -> str:
    """The program of one format: the headers of this folder behind their definitions."""
    scale = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}.get(scales, 0)
    names: dict[str, int | str] = {
        "HALF": int(dtype is torch.float16), "CODE": kind.code, "ZERO": kind.zero, "GROUPS": kind.groups,
        "WIDTH": max(1, kind.group // CHUNK),
        "MINS": int(kind.mins), "SUPER": int(kind.superblocks), "SCALE": scale, "RING_BYTES": RING_BYTES,
    }  # fmt: skip
    if kind.codes:
        bits = torch.tensor(kind.codes).to(dtype).view(torch.int16).tolist()
        names["CODES"] = ", ".join(str(value & 0xFFFF) for value in bits)
    text = "".join(f"#define {name} {value}\n" for name, value in names.items())
    files = ("decode.cuh", "few_rows.cuh", "many_rows.cuh" if hopper else "", "helpers.cuh")
    folder = Path(__file__).parent
    text += "".join((folder / file).read_text() for file in files if file)
    return re.sub(r"^WGMMA .*$", lambda _: wgmma(dtype), text, flags=re.MULTILINE)


def wgmma(dtype: torch.dtype) -> str:
    """wgmma.m64nNk16 for every tile of tokens: inline assembly names each of its registers."""
    kind = "f16" if dtype is torch.float16 else "bf16"
    text = "template <int BN> __device__ inline void wgmma(float* d, const u32* a, unsigned long long b);\n"
    for tile in TOKEN_TILES:
        count = tile // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        operand = ", ".join(f"%{count + i}" for i in range(4))
        bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        text += (
            f"template <> __device__ inline void wgmma<{tile}>(float* d, const u32* a, unsigned long long b) {{\n"
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; '
            f"wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.{kind}.{kind} {{{sums}}}, {{{operand}}}, %{count + 4}, "
            f'p, 1, 1, 0; }}" : {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));\n}}\n'
        )
    return text
