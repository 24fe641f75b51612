"""How near a prompt's GEMMs and attention come to what the vector units of this CPU can do (AVX-512 with VNNI).

    python -m quire_lab.benchmarks.cpu_ceilings [--tokens 1000] [--rounds 5] [--output FILE]

Peaks are loops of dot products in registers, one on each core, compiled here. GEMMs are those of all layers of
the built-in model's shapes, in int8 and in native Q4_1 blocks; attention is causal, in float32 over float16 pages.
Everything is measured in turn, round by round; the fastest of each counts.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from quire.bench.machine import describe_origin
from quire.bench.table import aligned
from quire.kernels import choose, native
from quire.kernels.build import compiler
from quire.quant.encoded import Encoded
from quire.quant.schemes import named, pack
from quire_lab.benchmarks.native_kernels import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    LAYERS,
    QKV,
    WIDTH,
    attend,
    random_model,
    random_requests,
    taped,
)

RESULTS = "benchmarks/results/cpu_ceilings.json"
SHAPES = {
    "qkv": (QKV, WIDTH),
    "output": (WIDTH, HEADS * HEAD_DIM),
    "gate and up": (2 * FEED_FORWARD, WIDTH),
    "down": (WIDTH, FEED_FORWARD),
}
WEIGHTS = sum(rows * columns for rows, columns in SHAPES.values()) * LAYERS
# An estimate: of a block of 32 columns and 16 channels 8 of VNNI, and 3 of floats for two scales and a minimum, as if
# all ran on the same units.
NATIVE_SHARE = 8 / 11
NATIVE = "GEMMs in native blocks (limit estimated)"
SOURCE = """
#include <immintrin.h>
template <class Vector, class Step> static inline void loop(long n, Vector a, Vector b, Vector* out, const Step& step) {
    Vector sums[16];
    for (int i = 0; i < 16; ++i) sums[i] = a;
    for (long j = 0; j < n; ++j) {
        for (int i = 0; i < 16; ++i) sums[i] = step(sums[i], a, b);
    }
    for (int i = 0; i < 16; ++i) out[i] = sums[i];
}
extern "C" double int8_products(long n) {
    __m512i kept[16];
    volatile int byte = 1;
    const __m512i a = _mm512_set1_epi8(byte), b = _mm512_set1_epi8(byte);
    loop(n, a, b, kept, [](__m512i c, __m512i x, __m512i y) { return _mm512_dpbusd_epi32(c, x, y); });
    volatile int used = _mm512_reduce_add_epi32(kept[n & 15]);
    return 16.0 * 64 * n;
}
extern "C" double float_products(long n) {
    __m512 kept[16];
    volatile float number = 0.5f;
    const __m512 a = _mm512_set1_ps(number), b = _mm512_set1_ps(number);
    loop(n, a, b, kept, [](__m512 c, __m512 x, __m512 y) { return _mm512_fmadd_ps(x, y, c); });
    volatile float used = _mm512_reduce_add_ps(kept[n & 15]);
    return 16.0 * 16 * n;
}
"""
TURNS = 4_000_000  # of a loop: some milliseconds
Timed = Callable[[], float]  # -> products per second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help=f"such as {RESULTS}")
    options = parser.parse_args()
    if native.isa() != "avx512":
        sys.exit(f"the peaks are those of AVX-512 with VNNI, and the kernels here are {native.isa()}")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        cases = {**peaks(Path(folder)), **gemms(options.tokens), "attention": attention(options.tokens)}
        best = dict.fromkeys(cases, 0.0)
        for _ in range(options.rounds):
            for name, timed in cases.items():
                best[name] = max(best[name], timed())
    rows = as_rows(best, options.tokens)
    print(aligned([list(rows[0]), *(list(map(str, row.values())) for row in rows)], right=range(1, 5)))
    if options.output:
        record = {
            **describe_origin(),
            "tokens": options.tokens,
            "threads": native.num_threads(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def peaks(folder: Path) -> dict[str, Timed]:
    """Of all cores together."""
    source, library = folder / "peaks.cpp", folder / "peaks.so"
    source.write_text(SOURCE)
    flags = ("-O3", "-std=c++17", "-march=native", "-funroll-loops", "-shared", "-fPIC")
    subprocess.run([*compiler().split(), *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    threads = native.num_threads()
    pool = ThreadPoolExecutor(threads)

    def timed(name: str) -> Timed:
        function = getattr(loaded, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]

        def run() -> float:
            began = time.perf_counter()
            products = sum(pool.map(function, [TURNS] * threads))
            return products / (time.perf_counter() - began)

        return run

    return {"peak, int8": timed("int8_products"), "peak, float32": timed("float_products")}


def gemms(tokens: int) -> dict[str, Timed]:
    """All GEMMs of the layers, on a tape; gate and up with SiLU fused."""
    linear, model = choose("int8_linear", "cpu"), random_model()
    inputs = {columns: torch.randn(tokens, columns) for _, columns in SHAPES.values()}
    encoded = [{name: _native_product(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]

    def int8(index: int) -> None:
        layer = model.layers[index]
        for weight in (layer.qkv, layer.output):
            linear.linear(inputs[WIDTH], *weight)
        linear.linear_silu_mul(inputs[WIDTH], *layer.gate_up)
        linear.linear(inputs[FEED_FORWARD], *layer.down)

    def blocks(index: int) -> None:
        for name, product in encoded[index].items():
            rows, columns = SHAPES[name]
            if name == "gate and up":
                product.linear_silu_mul(inputs[columns], None)
            else:
                product.linear(inputs[columns], native.empty(tokens, rows), None, None)

    products = float(WEIGHTS * tokens)
    return {
        "GEMMs in int8": _rate(taped(int8, LAYERS), products),
        NATIVE: _rate(taped(blocks, LAYERS), products),
    }


def _native_product(rows: int, columns: int) -> Any:
    """Of the kernel, for random blocks."""
    scheme = named("gguf-q4_1")
    (size,) = [part.shape for part in scheme.layout(rows, columns).values()]
    blocks = torch.randint(0, 256, size, dtype=torch.uint8)
    for at in (0, 2):  # scale and minimum
        halves = (torch.rand(*size[:2], 1) * 1e-3).half()
        blocks[..., at : at + 2] = halves.view(torch.uint8).view(*size[:2], 2)
    packed = pack(Encoded(scheme, {"blocks": blocks}, (rows, columns)), torch.device("cpu"), torch.float32)
    kept: Any = packed.scheme
    return kept.kernel.Product(kept.inner.name, packed.parts, packed.shape)


def attention(tokens: int) -> Timed:
    """Causal: a query's products with the keys and the values that it sees."""
    requests, qkv = random_requests([tokens], [tokens]), torch.randn(tokens, QKV)
    seen = tokens * (tokens + 1) / 2
    return _rate(
        taped(lambda index: attend(qkv, requests, index), LAYERS), 2 * seen * HEADS * HEAD_DIM * LAYERS
    )


def _rate(run: Callable[[], object], products: float) -> Timed:
    def timed() -> float:
        began = time.perf_counter()
        run()
        return products / (time.perf_counter() - began)

    run()
    return timed


def as_rows(best: dict[str, float], tokens: int) -> list[dict[str, object]]:
    """Each rate beside its peak, and the time that it takes of a prompt."""
    seen = tokens * (tokens + 1) / 2
    work = {
        "GEMMs in int8": (WEIGHTS * tokens, best["peak, int8"]),
        NATIVE: (WEIGHTS * tokens, best["peak, int8"] * NATIVE_SHARE),
        "attention": (2 * seen * HEADS * HEAD_DIM * LAYERS, best["peak, float32"]),
    }
    rows: list[dict[str, object]] = []
    for name, rate in best.items():
        products, limit = work.get(name, (0.0, rate))
        rows.append(
            {
                "what": name,
                "GMAC/s": round(rate / 1e9),
                "limit": round(limit / 1e9),
                "of the limit": f"{100 * rate / limit:.0f} %",
                "ms": round(1e3 * products / rate, 1) if products else "",
            }
        )
    return rows


if __name__ == "__main__":
    main()
