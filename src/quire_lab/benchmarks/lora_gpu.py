"""Adapters' Triton kernels on a GPU: checked against the reference for many mixes, then timed in llama8b's shapes.

    PYTHONPATH=src python -m quire_lab.benchmarks.lora_gpu [--output lora.json] [--seconds 80] [--dry]

Times are µs for one layer's q, k, v and o, from replays of a CUDA graph over layers whose weights do not fit the
cache, with 100 adapters' worth of segments as a server would launch them. The last part tries other tunings, one change
at a time. `--dry` runs small shapes once, wherever Triton runs (TRITON_INTERPRET=1 without a GPU).
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora import reference
from quire.kernels.lora import triton as kernel
from quire.kernels.lora.records import LoraSegments, LoraTables
from quire.layers.lora import group_by_adapter, max_segments

RANKS = (8, 16, 32, 64)
PARTS = 4  # q, k, v and o
COLD_BYTES = 400 << 20  # weights that a timed graph walks over: far more than the cache holds


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's attention."""

    hidden: int = 4096
    kv_width: int = 1024

    @property
    def bounds(self) -> tuple[int, ...]:
        return 0, self.hidden, self.hidden + self.kv_width, self.hidden + 2 * self.kv_width

    @property
    def widths(self) -> tuple[int, ...]:
        return self.hidden, self.kv_width, self.kv_width, self.hidden


@dataclass
class LoraReport:
    """What was measured, and what went wrong."""

    device: torch.device
    dry: bool
    deadline: float
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)

    def check(self, name: str, actual: Tensor, expected: Tensor, limit: float) -> None:
        error = float(
            (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
        )
        self.checks += 1
        if not error < limit:
            self.failures.append(f"{name}: error {error:.2e}")
            print(f"FAILED {name}: error {error:.2e}", flush=True)

    def timed(
        self, name: str, call: Callable[[], object], per: int, num_bytes: int = 0, **more: object
    ) -> float:
        """µs of a call, divided by `per`; `num_bytes` are those of one such part."""
        taken = (once if self.dry else graph_time)(call) / per
        rate = num_bytes / taken / 1e3
        self.rows.append({"name": name, "us": round(taken, 2), "gb_per_s": round(rate), **more})
        print(f"{name:64s} {taken:9.2f} µs {rate:7.0f} GB/s", flush=True)
        return taken

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline


def once(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def graph_time(call: Callable[[], object]) -> float:
    """Median µs of a call over replays of a graph that holds it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


def make_tables(
    ranks: np.ndarray,  # [slots, sites]
    inputs: list[int],  # of each site
    outputs: list[int],
    dtype: torch.dtype,
    device: torch.device,
    tile_ranks: int = 16,
) -> LoraTables:
    """Adapters with random weights, tiles behind each other."""
    tables = LoraTables.empty(torch.empty(0), *ranks.shape)
    used = 0
    for slot, site in np.ndindex(*ranks.shape):
        rank = int(ranks[slot, site])
        tables.ranks[slot, site], tables.tile_ranks[slot, site] = rank, tile_ranks
        tables.scales[slot, site] = 0.5
        for starts, width in ((tables.tile_a, inputs[site]), (tables.tile_b, outputs[site])):
            for tile, first in enumerate(range(0, rank, tile_ranks)):
                starts[slot, site, tile] = used
                used += -(-min(tile_ranks, rank - first) * width // 8) * 8
    weights = torch.empty(max(used, 1), dtype=dtype, device=device).normal_(0.0, 0.05)
    rest = (getattr(tables, name).to(device) for name in LoraTables.__slots__[1:])
    return LoraTables(weights, *rest)


def make_segments(
    line_slots: np.ndarray, max_lines: int, num_slots: int, device: torch.device
) -> LoraSegments:
    """As a server has them: as many segments as that number of rows could need."""
    grouped = group_by_adapter(line_slots.astype(np.int32), max_lines)
    missing = max_segments(len(line_slots), num_slots, max_lines) - len(grouped.slots)
    slots = np.append(grouped.slots, np.full(missing, -1)).astype(np.int32)
    starts = np.append(grouped.starts, np.full(missing, grouped.starts[-1])).astype(np.int32)
    order, slots_, starts_ = (torch.from_numpy(a).to(device) for a in (grouped.order, slots, starts))
    return LoraSegments(order, slots_, starts_, max_lines)


def check_mixes(report: LoraReport) -> None:
    """Odd ranks, odd widths, lines without adapters, every type, both lengths of segments."""
    draw, device = np.random.default_rng(0), report.device
    shapes = [(512, [512, 128, 128]), (200, [72, 40, 24]), (100, [33, 7, 20]), (14336, [256])]
    if report.dry:
        shapes = [(96, [64, 32, 32]), (50, [33, 7, 20])]
    limits = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
    for inputs, widths in shapes:
        for dtype, limit in limits.items():
            if dtype is not torch.bfloat16 and inputs != shapes[0][0]:
                continue  # every variant is compiled, which takes longer than all the rest
            for num_lines, tile_ranks in ((1, 16), (23, 16), (150, 5)):
                ranks = draw.choice([0, 1, 4, 7, 16, 30, 64, 100], (6, len(widths)))
                ranks[0] = 160 if num_lines == 150 else 512  # tiles of 5 ranks reach to 160
                tables = make_tables(ranks, [inputs] * len(widths), widths, dtype, device, tile_ranks)
                bounds = (0, *np.cumsum(widths).tolist())
                x = torch.randn(num_lines, inputs, device=device).to(dtype)
                line_slots = draw.integers(-1, 6, num_lines)
                for max_lines in (16, 64):
                    segments = make_segments(line_slots, max_lines, 6, device)
                    # logits are float32 for every dtype of x
                    for wide in (False, True) if inputs == shapes[0][0] else (False,):
                        zeros = torch.zeros(num_lines, bounds[-1], device=device)
                        y = zeros.clone() if wide else zeros.to(dtype)
                        kernel.add(x, y, tables, segments, 0, bounds)
                        expected = reference.add(x, zeros, tables, segments, 0, bounds)
                        name = f"{num_lines} x {inputs} -> {widths} {dtype} {max_lines} {wide}"
                        report.check(name, y, expected, limit)
                check_embedded(report, tables, line_slots, inputs, widths[0], limit)


def check_embedded(
    report: LoraReport, tables: LoraTables, line_slots: np.ndarray, num_ids: int, width: int, limit: float
) -> None:
    segments = make_segments(line_slots, 16, 6, report.device)
    ids = torch.randint(0, num_ids - 2, (len(line_slots),), dtype=torch.int32, device=report.device)
    y = torch.zeros(len(line_slots), width, device=report.device)
    expected = reference.add_embedded(ids, y.clone(), tables, segments, 0, num_ids, 2)
    report.check("embedded", kernel.add_embedded(ids, y, tables, segments, 0, num_ids, 2), expected, limit)


class LoraCase:
    """Layers of q, k, v and o with a number of adapters, and a number of rows that use them."""

    def __init__(
        self, report: LoraReport, shape: Shape, line_slots: np.ndarray, num_adapters: int, max_lines: int
    ):
        self.report, self.shape = report, shape
        device, dtype = report.device, torch.float32 if report.dry else torch.bfloat16
        ranks = np.resize(RANKS, num_adapters)
        used = np.unique(line_slots[line_slots >= 0])
        inputs, outputs = [shape.hidden] * PARTS, list(shape.widths)
        self.num_ranks = int(ranks[used].sum())
        self.bytes_qkv = self.num_ranks * 2 * (3 * shape.hidden + sum(outputs[:3]))
        self.bytes_o = self.num_ranks * 2 * 2 * shape.hidden
        cold = COLD_BYTES // (self.bytes_qkv + self.bytes_o) + 1
        self.num_layers = 1 if report.dry else int(min(32, max(2, cold)))
        sites = np.repeat(ranks[:, None], PARTS * self.num_layers, axis=1)
        self.tables = make_tables(sites, inputs * self.num_layers, outputs * self.num_layers, dtype, device)
        self.segments = make_segments(line_slots, max_lines, num_adapters, device)
        lines = len(line_slots)
        self.x = torch.randn(lines, shape.hidden, device=device).to(dtype)
        self.qkv = torch.zeros(lines, shape.bounds[-1], dtype=dtype, device=device)
        self.o = torch.zeros(lines, shape.hidden, dtype=dtype, device=device)

    def both(self) -> None:
        for layer in range(self.num_layers):
            kernel.add(self.x, self.qkv, self.tables, self.segments, layer * PARTS, self.shape.bounds)
            kernel.add(self.x, self.o, self.tables, self.segments, layer * PARTS + 3, (0, self.shape.hidden))

    def shrink(self, tuning: kernel.LoraTuning) -> None:
        for layer in range(self.num_layers):
            kernel._shrink(self.x, self.tables, self.segments, layer * PARTS, 3, tuning)

    def expand(self, tuning: kernel.LoraTuning) -> Callable[[], None]:
        inner = kernel._shrink(self.x, self.tables, self.segments, 0, 3, tuning)

        def run() -> None:
            for layer in range(self.num_layers):
                kernel._expand(
                    self.qkv, inner, self.tables, self.segments, layer * PARTS, self.shape.bounds, tuning
                )

        return run


def bench_shapes(report: LoraReport, shape: Shape) -> None:
    """Decodes and prompts as they come."""
    mixes = [(1, 1, 16), (64, 1, 16), (64, 32, 16), (256, 1, 16), (256, 32, 16), (256, 100, 16)]
    prompts = [(512, 1, 16), (512, 4, 16), (1024, 4, 64), (8192, 1, 64), (8192, 32, 64), (8192, 100, 64)]
    if report.dry:
        mixes, prompts = [(3, 2, 16)], [(40, 2, 64)]
    for num_lines, adapters, max_lines in mixes + prompts:
        draw = np.random.default_rng(1)
        shuffled = draw.permutation(np.arange(num_lines) % adapters)
        line_slots = shuffled if max_lines == 16 and num_lines < 512 else np.sort(shuffled)
        case = LoraCase(report, shape, line_slots, adapters, max_lines)
        taken = report.timed(
            f"{num_lines} lines, {adapters} adapters: one layer", case.both, case.num_layers,
            case.bytes_qkv + case.bytes_o, lines=num_lines, adapters=adapters,
        )  # fmt: skip
        if not report.dry:
            base = base_time(report, shape, num_lines)
            print(
                f"{'':8s}32 layers {taken * 32 / 1e3:.2f} ms; a layer's base products {base:.1f} µs",
                flush=True,
            )
            report.rows[-1] |= {"base_layer_us": round(base, 1), "step_ms": round(taken * 32 / 1e3, 3)}


def base_time(report: LoraReport, shape: Shape, num_lines: int) -> float:
    """A layer's own products: q|k|v, o, gate|up and down."""
    sizes = ((shape.bounds[-1], shape.hidden), (shape.hidden, shape.hidden), (28672, 4096), (4096, 14336))
    pairs = [
        (
            torch.randn(num_lines, columns, device=report.device, dtype=torch.bfloat16),
            torch.randn(rows, columns, device=report.device, dtype=torch.bfloat16),
        )
        for rows, columns in sizes
    ]
    return graph_time(lambda: [torch.mm(x, weight.t()) for x, weight in pairs])


def bench_tunings(report: LoraReport, shape: Shape) -> None:
    """One change at a time, for the decode and the prompt that matter most."""
    few, many = kernel.TUNINGS[16], kernel.TUNINGS[64]
    shrinks: dict[int, list[dict[str, int]]] = {
        16: [
            {}, {"shrink_stages": 4}, {"shrink_stages": 2}, {"shrink_ranks": 32}, {"shrink_ranks": 64},
            {"shrink_ranks": 32, "shrink_stages": 4}, {"chunk": 256}, {"chunk": 256, "splits": 16},
            {"chunk": 256, "splits": 16, "shrink_ranks": 32}, {"chunk": 1024, "splits": 4},
            {"shrink_warps": 2}, {"shrink_warps": 8}, {"shrink_ranks": 32, "shrink_warps": 8},
        ],
        64: [
            {}, {"shrink_ranks": 16}, {"shrink_ranks": 64}, {"chunk": 128}, {"splits": 1},
            {"shrink_warps": 8}, {"shrink_stages": 4}, {"shrink_ranks": 64, "chunk": 128},
            {"shrink_ranks": 64, "shrink_warps": 8},
        ],
    }  # fmt: skip
    expands: dict[int, list[dict[str, int]]] = {
        16: [
            {}, {"expand_ranks": 32}, {"expand_ranks": 64}, {"columns": 128}, {"columns": 512},
            {"expand_warps": 2}, {"expand_warps": 8}, {"expand_stages": 2}, {"expand_stages": 4},
            {"expand_ranks": 32, "columns": 128}, {"expand_ranks": 64, "columns": 128},
        ],
        64: [
            {}, {"expand_ranks": 32}, {"expand_ranks": 64}, {"columns": 64}, {"columns": 256},
            {"expand_warps": 8}, {"expand_stages": 2}, {"expand_ranks": 32, "columns": 256, "expand_warps": 8},
        ],
    }  # fmt: skip
    decode = np.random.default_rng(1).permutation(np.arange(256) % 100)
    prompt = np.sort(np.arange(8192) % 32)
    if report.dry:
        decode, prompt = decode[:4] % 2, prompt[:70] % 2
    for max_lines, line_slots, basis in ((16, decode, few), (64, prompt, many)):
        case = LoraCase(report, shape, line_slots, int(line_slots.max()) + 1, max_lines)
        for kind, changes in (("shrink", shrinks[max_lines]), ("expand", expands[max_lines])):
            for change in changes[: 2 if report.dry else None]:
                if report.late:
                    print("out of time: the remaining tunings were not tried")
                    return
                try_tuning(report, case, kind, change, replace(basis, **change), max_lines)


def try_tuning(
    report: LoraReport,
    case: LoraCase,
    kind: str,
    change: dict[str, int],
    tuning: kernel.LoraTuning,
    max_lines: int,
) -> None:
    width = 3 * case.shape.hidden if kind == "shrink" else sum(case.shape.widths[:3])
    try:
        call = (lambda: case.shrink(tuning)) if kind == "shrink" else case.expand(tuning)
        report.timed(
            f"{max_lines}: {kind} {change or asdict(tuning)}"[:64], call, case.num_layers,
            case.num_ranks * 2 * width, kind=kind, max_lines=max_lines, change=change,
        )  # fmt: skip
    except Exception as error:  # a tuning that does not compile is a result too
        print(f"{max_lines}: {kind} {change}: {type(error).__name__} {str(error)[:80]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=80.0, help="no new tuning is tried after so long")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one, or try the script itself with --dry")
    torch.manual_seed(0)
    device = torch.device("cpu" if options.dry and not torch.cuda.is_available() else "cuda")
    report = LoraReport(device, options.dry, time.perf_counter() + options.seconds)
    shape = Shape(128, 64) if options.dry else Shape()
    check_mixes(report)
    print(f"{report.checks} checks, {len(report.failures)} failed", flush=True)
    bench_shapes(report, shape)
    bench_tunings(report, shape)
    record = {"checks": report.checks, "failures": report.failures, "rows": report.rows}
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("checks", "failures")}))
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
