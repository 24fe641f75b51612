"""Triton kernels beside attention on a GPU: each checked against its reference, then timed.

    python -m quire_lab.benchmarks.small_kernels_gpu [--only norm,sample] [--sweep] [--output results.json]

Times are µs per call: `device` from replays of a CUDA graph that holds many calls, `host` for the launches alone, made
eagerly. Bytes are counted once per input and output; for sampling, once over the logits, so that the rate shows how
many passes a row took. Needs torch, triton and numpy only.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.bench.machine import describe_origin
from quire.core.sampling import SamplingParams
from quire.kernels import registry
from quire.kernels.sample import triton as sample_kernel
from quire.sampling.records import SampleRequests
from quire.sampling.sampler import Sampler
from quire_lab.benchmarks.sample_checks import (
    GREEDY,
    PLAIN,
    TOP_K,
    TOP_P,
    check_draws,
    check_failures,
    columns_of,
    draw_of,
)

DEVICE = torch.device("cuda")
TOKENS = (1, 64, 256, 1024, 8192)
SHAPES = ((4096, 14336, 32, 8, 128), (2048, 8192, 32, 8, 64), (576, 1536, 9, 3, 64))
BLOCK_BYTES = 2 << 20


@dataclass
class KernelReport:
    """Rows of the table, and what went wrong."""

    rows: list[dict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def timed(self, name: str, bytes_moved: int, call: Callable[[], object], eager: bool = True) -> None:
        device = graph_time(call)
        host = host_time(call) if eager else float("nan")
        rate = bytes_moved / device / 1e3
        self.rows.append({"name": name, "device_us": device, "host_us": host, "gb_per_s": rate})
        print(f"{name:52s} {device:9.2f} µs  {rate:8.0f} GB/s   host {host:6.1f} µs", flush=True)

    def check(self, name: str, fine: bool, detail: str = "") -> None:
        if not fine:
            self.failures.append(f"{name}: {detail}")
            print(f"FAILED {name}: {detail}", flush=True)


def graph_time(call: Callable[[], object]) -> float:
    """Median µs per call over replays of a graph of many calls."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    inner = max(2, min(40, int(2e-3 / max(time.perf_counter() - start, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / inner)
    return float(np.median(times))


def host_time(call: Callable[[], object], calls: int = 100) -> float:
    """µs that the host spends per call while the device works behind."""
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return best


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def both(operation: str):
    return registry.load(operation, "triton"), registry.load(operation, "reference")


def bench_norm(report: KernelReport) -> None:
    kernel, reference = both("norm")
    for width, *_ in SHAPES:
        weight, bias = randn(width), randn(width)
        for tokens in TOKENS:
            x, residual = randn(tokens, width), randn(tokens, width)
            label = f"{tokens} x {width}"
            for name, extra in (("rms_norm", ()), ("layer_norm", (bias,))):
                actual = getattr(kernel, name)(x, weight, *extra, 1e-5)
                expected = getattr(reference, name)(
                    x.float(), weight.float(), *(b.float() for b in extra), 1e-5
                )
                error = relative_error(actual, expected)
                report.check(f"{name} {label}", error < 5e-3, f"error {error:.2e}")
                first, second = residual.clone(), residual.clone()
                actual = getattr(kernel, f"add_{name}")(x, first, weight, *extra, 1e-5)
                expected = getattr(reference, f"add_{name}")(x, second, weight, *extra, 1e-5)
                error = relative_error(actual, expected)
                report.check(
                    f"add_{name} {label}", error < 5e-3 and torch.equal(first, second), f"error {error:.2e}"
                )
            out, small = torch.empty_like(x), randn(tokens, width, scale=1e-3)
            size = 2 * tokens * width
            report.timed(f"rms_norm {label}", 2 * size, partial(kernel.rms_norm, x, weight, 1e-5, out))
            report.timed(
                f"add_rms_norm {label}",
                4 * size,
                partial(kernel.add_rms_norm, small, residual, weight, 1e-5, out),
            )
            if width == 4096:
                report.timed(
                    f"add_layer_norm {label}",
                    4 * size,
                    partial(kernel.add_layer_norm, small, residual, weight, bias, 1e-5, out),
                )
    heads, weight = randn(1024, 48 * 128), randn(128)
    other = heads.clone()
    kernel.head_rms_norm(heads[:, : 32 * 128].view(1024, 32, 128), weight, 1e-6)
    reference.head_rms_norm(other[:, : 32 * 128].view(1024, 32, 128), weight, 1e-6)
    report.check("head_rms_norm", relative_error(heads, other) < 5e-3)
    view = heads[:, : 32 * 128].view(1024, 32, 128)
    report.timed(
        "head_rms_norm 1024 x 32 x 128", 4 * view.numel(), partial(kernel.head_rms_norm, view, weight, 1e-6)
    )


def bench_rotary(report: KernelReport) -> None:
    kernel, reference = both("rotary")
    for width, _, heads, kv_heads, head_dim in SHAPES:
        angles = torch.rand(8192, head_dim // 2, device=DEVICE) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        for tokens in TOKENS:
            pool = torch.zeros(1024, 2, 2, 16, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
            other = pool.clone()
            start = randn(tokens, (heads + 2 * kv_heads) * head_dim)
            positions = torch.randint(8192, (tokens,), dtype=torch.int32, device=DEVICE)
            slots = torch.randperm(1023 * 16, device=DEVICE)[:tokens] + 16
            qkv, expected = start.clone(), start.clone()
            shape = (heads, kv_heads, head_dim)
            pages = (pool[:, 1, 0], pool[:, 1, 1])
            kernel.rotate_and_store(qkv, *shape, cos_sin, positions, slots, *pages)
            reference.rotate_and_store(
                expected, *shape, cos_sin, positions, slots, other[:, 1, 0], other[:, 1, 1]
            )
            error = max(relative_error(qkv, expected), relative_error(pool, other))
            report.check(f"rotate {tokens} x {width}", error < 5e-3, f"error {error:.2e}")
            moved = 2 * tokens * head_dim * (2 * (heads + kv_heads) + 3 * kv_heads)
            report.timed(
                f"rotate_and_store {tokens} x {heads}+2*{kv_heads} x {head_dim}",
                moved,
                partial(kernel.rotate_and_store, qkv, *shape, cos_sin, positions, slots, *pages),
            )


def bench_activation(report: KernelReport) -> None:
    kernel, reference = both("activation")
    for _, inner, *_ in SHAPES:
        for tokens in TOKENS:
            x = randn(tokens, 2 * inner)
            label = f"{tokens} x {inner}"
            calls = {
                "silu_mul": (kernel.silu_mul(x), reference.silu_mul(x.float())),
                "gelu": (kernel.gelu(x), reference.gelu(x.float())),
                "gelu tanh": (kernel.gelu(x, "tanh"), reference.gelu(x.float(), "tanh")),
                "relu": (kernel.relu(x), reference.relu(x)),
            }
            for name, (actual, expected) in calls.items():
                error = relative_error(actual, expected)
                report.check(f"{name} {label}", error < 6e-3, f"error {error:.2e}")
            out = torch.empty(tokens, inner, dtype=x.dtype, device=DEVICE)
            report.timed(f"silu_mul {label}", 6 * tokens * inner, partial(kernel.silu_mul, x, out))
            half = x[:, :inner].contiguous()
            if inner == 14336:
                report.timed(
                    f"gelu tanh {label}", 4 * tokens * inner, partial(kernel.gelu, half, "tanh", out)
                )


def bench_embedding(report: KernelReport) -> None:
    kernel, reference = both("embedding")
    for width, *_ in SHAPES:
        table = randn(49152, width)
        for tokens in TOKENS:
            ids = torch.randint(49152, (tokens,), dtype=torch.int32, device=DEVICE)
            out = torch.empty(tokens, width, dtype=torch.bfloat16, device=DEVICE)
            kernel.gather(table, ids, out)
            fine = torch.equal(out, reference.gather(table, ids, dtype=torch.bfloat16))
            report.check(f"gather {tokens} x {width}", fine, "rows differ")
            report.timed(
                f"gather {tokens} x {width}", 4 * tokens * width, partial(kernel.gather, table, ids, out)
            )


def bench_pages(report: KernelReport) -> None:
    kernel, reference = both("pages")
    pool = torch.randint(256, (512, BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    for copies in (1, 2, 4, 8, 16, 32, 64, 200):
        order = torch.randperm(511, device=DEVICE) + 1
        sources, targets = order[:copies], order[copies // 2 : copies // 2 + copies]  # chains
        expected = pool.clone()
        reference.copy_blocks(expected, sources, targets)
        kernel.copy_blocks(pool, sources, targets)
        report.check(f"copy_blocks {copies}", torch.equal(pool, expected), "blocks differ")
        moved = 2 * copies * BLOCK_BYTES
        report.timed(
            f"copy_blocks {copies} x 2 MiB", moved, partial(kernel.copy_blocks, pool, sources, targets)
        )


def bench_sample(report: KernelReport, sweep: bool) -> None:
    check_draws(report.check, DEVICE)
    check_failures(report.check, DEVICE)
    kinds = {
        "greedy": ([GREEDY], 0.5),
        "half top-p flat": ([GREEDY, TOP_P], 0.5),
        "top-p flat": ([TOP_P], 0.5),
        "top-p peaked": ([TOP_P], 4.0),
        "top-k 50": ([TOP_K], 0.5),
        "temperature only": ([PLAIN], 0.5),
    }
    tunings = [sample_kernel.SampleTuning()]
    if sweep:
        base = sample_kernel.SampleTuning()
        tunings += [
            replace(base, piece=4096), replace(base, piece=16384), replace(base, draw_warps=16),
            replace(base, stages=2), replace(base, tile=2048, warps=4), replace(base, tile=8192),
            replace(base, registers=255), replace(base, list_registers=128), replace(base, listed=2048, sample=2048),
        ]  # fmt: skip
    for tuning in tunings:
        sample_kernel.TUNING = tuning
        changed = [
            f"{k} {v}" for k, v in asdict(tuning).items() if v != getattr(sample_kernel.SampleTuning(), k)
        ]
        mark = f" [{', '.join(changed)}]" if changed else ""
        for vocabulary in (128256,) if mark else (128256, 49152):
            for count in (1, 512) if mark else (1, 64, 256, 512, 1024):
                source = torch.randn(count, vocabulary, device=DEVICE)
                for name, (params, spread) in kinds.items():
                    draw = draw_of(source * spread, [params[i % len(params)] for i in range(count)])
                    report.timed(
                        f"{name} {count} x {vocabulary}{mark}", 4 * count * vocabulary, draw, eager=not mark
                    )
                if count == 512 and not mark:
                    draw = draw_of((source * 0.5).bfloat16(), [TOP_P] * count)
                    report.timed(f"top-p flat bf16 {count} x {vocabulary}", 2 * count * vocabulary, draw)
    sample_kernel.TUNING = sample_kernel.SampleTuning()


def bench_sampler(report: KernelReport) -> None:
    """The whole sampler at 256 rows. Nothing in it may wait for the device: that raises here."""
    count, vocabulary, length = 256, 128256, 1024
    logits = torch.randn(count, vocabulary, device=DEVICE)
    kinds = {
        "sampler top-p": SamplingParams(temperature=0.8, top_p=0.95),
        "sampler penalties": SamplingParams(
            temperature=0.8, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1
        ),
        "sampler logprobs 5": SamplingParams(temperature=0.8, top_p=0.95, logprobs=5),
        "sampler bias": SamplingParams(temperature=0.8, logit_bias={5: 2.0, 77: -4.0}),
        "sampler allowed": SamplingParams(temperature=0.8, allowed_token_ids=tuple(range(0, 5000, 7))),
    }
    sampler = Sampler(DEVICE)
    for name, params in kinds.items():
        columns, on_device = columns_of([params] * count, vocabulary, DEVICE)
        token_ids = torch.randint(vocabulary, (count, length), dtype=torch.int32, device=DEVICE)
        rows, positions = np.arange(count), np.full(count, length - 1)
        requests = SampleRequests(
            rows, positions, columns, token_ids, None,
            torch.from_numpy(rows).to(DEVICE), torch.from_numpy(positions).to(DEVICE), on_device,
        )  # fmt: skip
        sampler(logits.clone(), requests)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            times, hosts = [], []
            for _ in range(8):
                used = logits.clone()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                start = time.perf_counter()
                sampled = sampler(used, requests)
                hosts.append((time.perf_counter() - start) * 1e6)
                end.record()
                torch.cuda.set_sync_debug_mode("default")
                end.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                times.append(begin.elapsed_time(end) * 1e3)
        except RuntimeError as error:
            report.check(name, False, str(error).splitlines()[0])
            continue
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report.check(name, bool(sampled.finite.all()), "rows failed")
        device, host = float(np.median(times)), float(np.median(hosts))
        report.rows.append({"name": name, "device_us": device, "host_us": host})
        print(
            f"{name + f' {count} x {vocabulary}':52s} {device:9.2f} µs (eager)       host {host:6.1f} µs",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="norm,rotary,activation,embedding,pages,sample,sampler")
    parser.add_argument("--sweep", action="store_true", help="also other tile sizes for the sampling kernel")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one")
    torch.manual_seed(int(time.time()))
    report, started = KernelReport(), time.perf_counter()
    parts = {
        "norm": bench_norm, "rotary": bench_rotary, "activation": bench_activation,
        "embedding": bench_embedding, "pages": bench_pages,
        "sample": lambda report: bench_sample(report, options.sweep), "sampler": bench_sampler,
    }  # fmt: skip
    for name in options.only.split(","):
        print(f"--- {name}, {time.perf_counter() - started:.0f} s", flush=True)
        parts[name](report)
    folder = os.environ.get("OUT")
    output = options.output or (Path(folder) / "small_kernels.json" if folder else None)
    if output is not None:
        record = {**describe_origin(), "rows": report.rows, "failures": report.failures}
        output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(report.rows)} timed, {len(report.failures)} failed, {time.perf_counter() - started:.0f} s")
    for failure in report.failures:
        print(f"FAILED {failure}")
    if report.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
