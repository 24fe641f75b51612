"""Products by encoded rows and int8 KV on a GPU: checked against the reference, then timed beside what they replace.

    PYTHONPATH=src python -m quire_lab.benchmarks.low_bit_gpu [--only checks,chain,products,kv] [--output results.json]

checks    every kernel against decoded rows, outputs poisoned; layers in a graph against the same, one kernel at a time
chain     llama8b's layers in a graph, as a decode of few rows runs them: early launches and sizes of the ring
products  llama8b's matrices at 65 to 512 tokens: by blocks, a decoded weight with cuBLAS, bfloat16
kv        attention of 256 rows over pages in bfloat16 and int8, with several tiles

Weights are read from memory: more of them than the chip's cache holds take turns. Needs torch and Triton only.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.bench.machine import describe_origin
from quire.kernels import dependents, nvrtc, registry
from quire.kernels.attention import autotune
from quire.kernels.attention.tuning import TUNINGS, AttentionTuning, HeadShape
from quire.kernels.encoded_linear import cuda, formats
from quire.kernels.measurement import graph_seconds
from quire.quant.encoded import Encoded
from quire.quant.schemes import named, pack

DEVICE = torch.device("cuda")
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
LAYERS = 4  # with different weights: int4 takes 112 MB each
REPEATED = 2  # times that a chain goes through them
CHAINED = {"int4": "int4-g128", "nf4": "nf4-b64n", "fp8": formats.ROWS_OF_FLOAT8}
CHECKED = ("int4-g128", "int4-g128z", "nf4-b64n", "int8-channel", "fp8-channel", formats.ROWS_OF_FLOAT8)
CHECKED_SHAPES = ((1096, 512), (4096, 4096), (28672, 512))  # odd blocks, splits that join, pairs
CHECKED_TOKENS = (1, 2, 5, 8, 16, 64, 65, 128, 200, 256, 300, 512, 600)
MANY_TOKENS = (96, 128, 192, 256, 384, 512)
CONTEXT, BLOCK_SIZE = 256, 16


def product_of(scheme: str, weight: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """The product, and the rows that it multiplies by in float32."""
    if scheme == formats.ROWS_OF_FLOAT8:
        scales = (weight.abs().amax(1, keepdim=True) / 448).float()
        rows = (weight / scales).to(torch.float8_e4m3fn)
        product = cuda.fp8_rows(rows, scales.view(1, -1))
        assert product is not None
        return product, rows.float() * scales
    encoded = Encoded.of(named(scheme), weight)
    packed = pack(encoded, DEVICE, dtype)
    return cuda.Product(scheme, packed.parts, packed.shape), encoded.decode()


def compile_all() -> None:
    """Every program of the products, side by side: one takes ten seconds or more."""
    wanted: dict[str, tuple[Any, ...]] = {}
    rings = sorted({values.get("RING_BYTES", cuda.RING_BYTES) for values, _ in WAYS.values()})
    for scheme in CHECKED:
        kind = formats.parse(scheme)
        assert kind is not None
        for dtype in (torch.bfloat16, torch.float16):
            hopper = kind.code != formats.FLOAT8_ROWS
            of_chains = scheme in CHAINED.values() and dtype is torch.bfloat16
            for ring in rings if of_chains else (cuda.RING_BYTES,):
                with changed(RING_BYTES=ring):
                    text = cuda.source(kind, kind.scales[0], dtype, hopper)
                wanted[text] = ()
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(nvrtc.compiled, wanted, wanted.values()))


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


def check_products() -> list[dict[str, Any]]:
    rows = []
    for scheme in CHECKED:
        for dtype in (torch.bfloat16, torch.float16):
            worst, again_equal = 0.0, True
            for shape in CHECKED_SHAPES:
                product, whole = product_of(scheme, torch.randn(shape, device=DEVICE) * 0.02, dtype)
                tokens = [
                    count for count in CHECKED_TOKENS if scheme != formats.ROWS_OF_FLOAT8 or count <= cuda.FEW
                ]
                for count in tokens:
                    error, equal = _check(product, whole, count, dtype)
                    worst, again_equal = max(worst, error), again_equal and equal
            row = {
                "scheme": scheme,
                "dtype": str(dtype),
                "worst_error": worst,
                "same_bits_again": again_equal,
            }
            row["right"] = bool(worst < 1e-2 and again_equal)
            print("check", row, flush=True)
            rows.append(row)
    return rows


def _check(product: Any, whole: Tensor, count: int, dtype: torch.dtype) -> tuple[float, bool]:
    x = torch.randn(count, whole.shape[1], device=DEVICE).to(dtype)
    residual = torch.randn(count, whole.shape[0], device=DEVICE).to(dtype)
    expected = x.float() @ whole.T
    results = []
    for _ in range(2):
        out = torch.full_like(residual, torch.nan)
        product.linear(x, out, None, residual)
        results.append(out)
    product.linear(x, residual_again := residual.clone(), None, residual_again)
    equal = torch.equal(results[0], results[1])
    errors = [relative(result, expected + residual.float()) for result in (results[0], residual_again)]
    gate, up = expected.chunk(2, 1)
    gated = product.linear_silu_mul(x, None)
    if gated is not None:
        errors.append(relative(gated, torch.nn.functional.silu(gate) * up))
    gain = torch.randn(whole.shape[1], device=DEVICE).to(dtype)
    normed = product.normed(x, gain, 1e-5, silu_mul=False)
    if normed is not None:
        by_hand = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5) * gain.float()
        errors.append(relative(normed, by_hand @ whole.T))
    worst = max(error if error == error else float("inf") for error in errors)
    return worst, equal


class Chain:
    """Layers as a decode runs them: products, norms, rotary, attention over bfloat16 pages."""

    def __init__(self, scheme: str | None, rows: int, attends: bool = True) -> None:
        self.rows, self.attends = rows, attends
        dtype = torch.bfloat16
        self.weights = [
            {name: torch.randn(shape, device=DEVICE) * shape[1] ** -0.5 for name, shape in SHAPES.items()}
            for _ in range(LAYERS)
        ]
        self.layers = [
            {
                name: weight.to(dtype) if scheme is None else product_of(scheme, weight, dtype)[0]
                for name, weight in layer.items()
            }
            for layer in self.weights
        ]
        del self.weights
        self.gain = torch.ones(HIDDEN, device=DEVICE, dtype=dtype)
        blocks = rows * CONTEXT // BLOCK_SIZE
        shape = (blocks, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.pool = torch.randn(shape, device=DEVICE, dtype=dtype)
        self.tables = torch.arange(blocks, device=DEVICE, dtype=torch.int32).view(rows, -1)
        self.starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
        self.lens = torch.full((rows,), CONTEXT, device=DEVICE, dtype=torch.int32)
        self.slots = torch.arange(rows, device=DEVICE) * CONTEXT + CONTEXT - 1
        self.positions = self.lens - 1
        self.cos_sin = torch.randn(CONTEXT, HEAD_DIM, device=DEVICE)
        self.attention, self.rotary = (registry.load(name, "triton") for name in ("attention", "rotary"))
        self.norm, self.gate = (registry.load(name, "triton") for name in ("norm", "activation"))
        self.narrow = registry.load("narrow_linear", "triton")
        self.planner = self.attention.AttentionPlanner(
            rows, HEADS, KV_HEADS, HEAD_DIM, DEVICE, max_tokens=rows, dtype=dtype,
            tuning=next(tuning for limit, tuning in TUNINGS if rows <= limit),
        )  # fmt: skip
        self.x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=dtype)
        self.out = torch.empty_like(self.x)

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """`pause`: after every kernel or so."""
        plan = self.planner.plan(self.starts, self.lens, self.rows)
        hidden = self.x.clone()
        for number in range(LAYERS * REPEATED):
            index = number % LAYERS
            layer = self.layers[index]
            qkv = self._normed(layer["qkv"], hidden, False)
            pause()
            if self.attends:
                k, v = self.pool[:, index, 0], self.pool[:, index, 1]
                self.rotary.rotate_and_store(
                    qkv, HEADS, KV_HEADS, HEAD_DIM, self.cos_sin, self.positions, self.slots, k, v
                )
                pause()
                q = qkv[:, : HEADS * HEAD_DIM].view(self.rows, HEADS, HEAD_DIM)
                attended = torch.empty(self.rows, HEADS * HEAD_DIM, device=DEVICE, dtype=q.dtype)
                self.attention.paged_attention(
                    q, k, v, self.starts, self.lens, self.tables, HEAD_DIM**-0.5, 0, attended, plan=plan,
                    max_query_len=1,
                )  # fmt: skip
                pause()
            else:
                attended = qkv[:, :HIDDEN]
            hidden = self._linear(layer["output"], attended, hidden)
            pause()
            gated = self._normed(layer["gate_up"], hidden, True)
            pause()
            hidden = self._linear(layer["down"], gated, hidden)
            pause()
        self.out.copy_(hidden)

    def _normed(self, matrix: Any, x: Tensor, silu_mul: bool) -> Tensor:
        if isinstance(matrix, Tensor) and self.rows == 1:
            if silu_mul:
                return self.narrow.linear_silu_mul(x, matrix, self.gain, 1e-5)
            return self.narrow.linear(x, matrix, norm_weight=self.gain, eps=1e-5)
        fused = None if isinstance(matrix, Tensor) else matrix.normed(x, self.gain, 1e-5, silu_mul)
        if fused is not None:
            return fused
        normed = self.norm.rms_norm(x, self.gain, 1e-5)
        gated = matrix.linear_silu_mul(normed, None) if silu_mul and not isinstance(matrix, Tensor) else None
        if gated is not None:
            return gated
        y = self._linear(matrix, normed, None)
        return self.gate.silu_mul(y) if silu_mul else y

    def _linear(self, matrix: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        if isinstance(matrix, Tensor):
            if self.rows == 1:
                return self.narrow.linear(x, matrix, None, residual)
            return x @ matrix.t() if residual is None else torch.addmm(residual, x, matrix.t())
        out = torch.empty(x.shape[0], matrix._shape[0], device=DEVICE, dtype=x.dtype)
        matrix.linear(x, out, None, residual)
        return out

    def forget(self) -> None:
        """Compiled kernels: the next product takes those of the module's values then."""
        for layer in self.layers:
            for matrix in layer.values():
                if not isinstance(matrix, Tensor):
                    matrix._kernels.clear()

    def layer_us(self) -> float:
        return 1e6 * graph_seconds(self.run) / (LAYERS * REPEATED)


def check_chains() -> list[dict[str, Any]]:
    """A graph's replays against kernels that run one at a time: an early start that reads too soon would differ."""
    rows = []
    for name, scheme in CHAINED.items():
        for count in (1, 4, 8) if name == "fp8" else (1, 4, 16, 64, 256):
            chain = Chain(scheme, count)
            chain.run(torch.cuda.synchronize)
            expected = chain.out.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain.run()
            equal = 0
            for _ in range(50):
                chain.out.fill_(torch.nan)
                graph.replay()
                equal += int(torch.equal(chain.out, expected))
            row = {"chain": name, "rows": count, "equal_replays": equal, "of": 50, "right": equal == 50}
            row["finite"] = bool(expected.isfinite().all())
            print("check", row, flush=True)
            rows.append(row)
    return rows


@contextmanager
def changed(fresh: bool = True, **values: Any) -> Iterator[None]:
    """Names of the products' module with other values. `fresh`: their kernels are compiled again."""
    before = {name: getattr(cuda, name) for name in values}
    for name, value in values.items():
        setattr(cuda, name, value)
    if fresh:
        cuda.kernels_of.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cuda, name, value)
        if fresh:
            cuda.kernels_of.cache_clear()


@contextmanager
def launches(products: bool, others: bool) -> Iterator[None]:
    """Whether products and Triton's kernels start early."""
    early = dict(dependents.EARLY)
    nvrtc._EARLY.value[0] = int(products)
    if not others:
        dependents.EARLY.clear()
    try:
        yield
    finally:
        nvrtc._EARLY.value[0] = 1
        dependents.EARLY.update(early)


WAYS: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "as it is": ({}, (True, True)),
    "only products early": ({}, (True, False)),
    "no early start": ({}, (False, False)),
    "ring 48K": ({"RING_BYTES": 49152}, (True, True)),
    "ring 64K": ({"RING_BYTES": 65536}, (True, True)),
    "ring 24K": ({"RING_BYTES": 24576}, (True, True)),
    "as it is, again": ({}, (True, True)),
}


def time_chains() -> list[dict[str, Any]]:
    rows = []
    layer_bytes = {"bf16": 2.0, "int4": 4.125 / 8, "nf4": 4.25 / 8, "fp8": 1.0}
    numbers = sum(high * wide for high, wide in SHAPES.values())
    for count in (1, 8):
        for attends in (False, True):
            for name, scheme in {"bf16": None, **CHAINED}.items():
                chain = Chain(scheme, count, attends)
                for way, (values, early) in WAYS.items():
                    if scheme is None and way.startswith("ring"):
                        continue
                    with changed(**values), launches(*early):
                        chain.forget()
                        us = chain.layer_us()
                    chain.forget()
                    row = {
                        "scheme": name, "rows": count, "attends": attends, "way": way, "layer_us": round(us, 2),
                        "floor_us": round(1e6 * numbers * layer_bytes[name] / 4.26e12, 2),
                    }  # fmt: skip
                    print("chain", row, flush=True)
                    rows.append(row)
                del chain
    return rows


def time_products() -> list[dict[str, Any]]:
    rows = []
    for matrix, shape in SHAPES.items():
        count = max(2, -(-(220 << 20) // (shape[0] * shape[1] // 2)))
        weights = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        products = [product_of("int4-g128", weight.float(), torch.bfloat16)[0] for weight in weights]
        for tokens in MANY_TOKENS:
            row = {"matrix": matrix, "tokens": tokens, **_time_product(weights, products, tokens)}
            print("product", row, flush=True)
            rows.append(row)
    return rows


def _time_product(weights: list[Tensor], products: list[Any], tokens: int) -> dict[str, float]:
    """Microseconds of one product, by each way."""
    high, wide = weights[0].shape
    x = torch.randn(tokens, wide, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(tokens, high, device=DEVICE, dtype=torch.bfloat16)

    def many() -> None:
        for product in products:
            product._many(x, out, None, None)

    def expanded() -> None:
        for product in products:
            product._expanded(x, out, None, None)

    def plain() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    ways = {"blocks_us": many, "decoded_us": expanded, "bf16_us": plain}
    return {label: round(1e6 * graph_seconds(run) / len(weights), 2) for label, run in ways.items()}


KV_TILES = (
    (64, 2, 2, 4),
    (64, 2, 3, 4),
    (64, 4, 2, 4),
    (128, 4, 2, 4),
    (32, 2, 3, 4),
    (64, 2, 2, 8),
    (64, 1, 2, 4),
)


def time_kv() -> list[dict[str, Any]]:
    default = TUNINGS[1][1]
    batches = {
        "256 rows of 128 to 384": autotune._decodes(*range(128, 384)),
        "ragged 256": autotune._ragged(256),
    }
    rows = []
    for label, lengths in batches.items():
        for kv_dtype in ("bfloat16", "int8"):
            heads = HeadShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, kv_dtype, 2, BLOCK_SIZE)
            batch = autotune.make_batch(heads, torch.bfloat16, lengths, DEVICE, 8 << 30)
            if kv_dtype == "int8":
                rows.append({"batch": label, "int8_error": _kv_error(batch, default)})
                print("kv", rows[-1], flush=True)
            for tile, warps, stages, pieces in KV_TILES:
                tuning = replace(
                    default, decode_tile=tile, decode_warps=warps, decode_stages=stages, decode_pieces=pieces
                )
                row: dict[str, Any] = {"batch": label, "kv": kv_dtype, "tiles": [tile, warps, stages, pieces]}
                for which, timed in (("alone_us", replace(batch, weight=None)), ("with_gemm_us", batch)):
                    calls = max(autotune.LAYERS, batch.pool.shape[1])
                    try:
                        row[which] = round(1e6 * graph_seconds(timed.launches(tuning, calls)) / calls, 2)
                    except Exception as fault:  # tiles that do not fit
                        row[which] = str(fault)[:80]
                print("kv", row, flush=True)
                rows.append(row)
    return rows


def _kv_error(batch: autotune.TimedBatch, tuning: AttentionTuning) -> float:
    """Of int8 pages with random scales against the same numbers in bfloat16 pages."""
    assert batch.scales is not None
    batch.scales.copy_(batch.scales * torch.rand_like(batch.scales.float()).add_(0.5))
    scales = batch.scales.permute(0, 1, 3, 4, 2).unsqueeze(-1)  # [blocks, layers, 2, slots, heads, 1]
    exact = replace(batch, pool=(batch.pool.float() * scales.float()).bfloat16(), scales=None)
    return relative(batch.result(tuning), exact.result(tuning).float())


SECTIONS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "checks": lambda: check_products() + check_chains(),
    "chain": time_chains,
    "products": time_products,
    "kv": time_kv,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--output", type=Path, help="JSON file, written after every section")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one")
    record: dict[str, Any] = describe_origin()
    began = time.perf_counter()
    compile_all()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    with torch.inference_mode():
        for name in options.only.split(","):
            began = time.perf_counter()
            record[name] = SECTIONS[name]()
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            if options.output:
                options.output.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [row for row in record.get("checks", []) if not row["right"]]
    print(f"{len(wrong)} checks failed", *wrong, sep="\n")


if __name__ == "__main__":
    main()
