"""Checks and times the Triton attention kernels on a GPU.

    python -m quire_lab.benchmarks.attention_gpu [--sections check,decode,served,prompt,…] [--output FILE]

Needs torch, triton and numpy only. Times are medians of CUDA graph replays; every layer of a graph reads its own part
of the pool, and the pool is larger than the cache, as in a model. Numbers go to FILE ($OUT/attention_gpu.json).
"""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from quire.kernels.attention import triton as attention
from quire.kernels.attention import triton_decode, triton_plan, triton_prompt
from quire.kernels.attention.cudnn import contiguous_attention
from quire.kernels.attention.triton import AttentionTuning
from quire.kernels.attention.tuning import TUNINGS
from quire_lab.benchmarks import workloads
from quire_lab.benchmarks.attention_checks import (
    CONTEXTS,
    DEVICE,
    LIMITS,
    QUERIES,
    READ_CEILING,
    REPORT,
    USUAL,
    VARIANTS,
    WIDE,
    AttentionCase,
    Heads,
    check_batches,
    check_trees,
    error,
    graph_time,
    label,
    make_case,
    record,
    reference,
)

# Decode attention between a model's products, for `attention_gpu.py --sections amid`.

STEPS = (40, 140, 250, 500, 760, 960)  # of a run that admits 50 prompts a step
ADMITTED = 50
LAYERS = 32
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # rows and columns, in a layer's order
WARM_SECONDS = 0.35  # the clock has fallen by then
AMID_TUNINGS = [
    AttentionTuning(),
    AttentionTuning(decode_pieces=2),
    AttentionTuning(decode_pieces=3),
    AttentionTuning(decode_pieces=6),
    AttentionTuning(decode_stages=3, decode_pieces=8),
    AttentionTuning(decode_tile=32, decode_stages=3, decode_pieces=8),
    AttentionTuning(decode_warps=4, decode_stages=3, decode_pieces=8),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=8),
]


def contexts_at(step: int) -> list[int]:
    """Of the rows that are left at a step."""
    lengths = workloads.lengths("sharegpt", 1024)
    ages = [step - number // ADMITTED for number in range(len(lengths))]
    return [prompt + age for (prompt, output), age in zip(lengths, ages, strict=True) if output > age]


def make_weights() -> list[list[torch.Tensor]]:
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    return [[torch.randn(*shape, **like) / 64 for shape in PRODUCTS] for _ in range(4)]


def time_amid(
    case: AttentionCase, weights: list[list[torch.Tensor]], tuning: AttentionTuning
) -> tuple[float, float]:
    """Seconds of attention in one layer, and of all layers with their products."""
    rows, heads = len(case.contexts), case.heads
    x = torch.randn(rows, PRODUCTS[0][1], dtype=heads.dtype, device=DEVICE)
    out = torch.empty(rows, heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
    plan = case.planner(tuning).plan(case.query_starts, case.context_lens, rows)

    def run() -> None:
        for layer in range(LAYERS):
            qkv, output, gate_up, down = weights[layer % len(weights)]
            F.linear(x, qkv)
            attention.paged_attention(*case.arguments(layer), 0, out, plan=plan, max_query_len=1)
            F.linear(x, output)
            F.linear(F.linear(x, gate_up)[:, : down.shape[1]], down)

    graph = _captured(run)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
        count += 1
    step = (time.perf_counter() - begin) / count
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    kernel = next(event for event in seen.key_averages() if "_decode_kernel" in event.key)
    return kernel.device_time_total / kernel.count / 1e6, step


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def amid() -> None:
    """Decodes between a model's products, where power sets the clock."""
    weights = make_weights()
    for step in STEPS:
        contexts = contexts_at(step)
        case = make_case(Heads(), contexts, [1] * len(contexts), LAYERS)
        num_bytes = sum(contexts) * Heads().token_bytes()
        name = f"step {step}: {len(contexts)} rows, mean {sum(contexts) // len(contexts)}"
        for tuning in AMID_TUNINGS:
            seconds, whole = time_amid(case, weights, tuning)
            record("amid", case=name, tuning=label(tuning), us=seconds * 1e6, tb_s=num_bytes / seconds / 1e12,
                   percent=100 * num_bytes / seconds / READ_CEILING, step_ms=whole * 1e3)  # fmt: skip
        del case
        torch.cuda.empty_cache()


CACHE_BYTES = 60 << 20
LOG2_E = math.log2(math.e)


# --- check ---------------------------------------------------------------------------------------------------------


def check() -> None:
    """Every variant on ragged batches and trees, then graphs with changed lengths, then deterministic bits."""
    check_batches(USUAL + WIDE, CONTEXTS, QUERIES)
    check_trees([Heads(), *WIDE], [700, 333, 4000])
    check_fresh([1024, 1024])
    check_fresh([1024, 1476])
    check_graph()
    check_bits()


def check_fresh(lengths: list[int]) -> None:
    """Prompts without a cached prefix, by the library's attention: in one call where they are equally long."""
    case = make_case(Heads(), lengths, lengths)
    rows, spans = [], []
    for row, length in enumerate(lengths):
        spans.append((sum(lengths[:row]), sum(lengths[: row + 1])))
        at = torch.arange(length, device=DEVICE)
        blocks = case.block_tables[row].long()[at // case.heads.block_size]
        rows.append([pages[blocks, at % case.heads.block_size] for pages in case.pages(0)])
    keys, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
    heads = torch.cat((case.q, keys, values), 1)  # views of one tensor, as a layer has them
    expected = reference(case)
    out = torch.full_like(expected, float("nan"), dtype=case.heads.dtype)
    padded = [(first, end, -(-(end - first) // 128) * 128) for first, end in spans]
    worst = error(
        contiguous_attention(heads, case.heads.num_heads, padded, case.arguments(0)[-1], out), expected
    )
    ok = worst < LIMITS[case.heads.dtype]
    record("check", what=f"fresh {lengths}", variant="library", error=worst, ok=ok)


def check_graph() -> None:
    """A captured plan and attention, replayed at other lengths, also many times over for races."""
    for name, (tuning, deterministic) in VARIANTS.items():
        case = make_case(Heads(), [2000] * 48, [1] * 48)
        planner, out = (
            case.planner(tuning, deterministic),
            torch.empty(48, 4096, dtype=torch.bfloat16, device=DEVICE),
        )

        def step() -> None:
            plan = planner.plan(case.query_starts, case.context_lens, 48)  # noqa: B023
            attention.paged_attention(*case.arguments(0), 0, out, plan=plan, max_query_len=1)  # noqa: B023

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        worst, moved = 0.0, False
        for _ in range(4):
            lengths = torch.randint(1, 2001, (48,)).tolist()
            case.context_lens.copy_(torch.tensor(lengths))
            expected, first = reference(case, 0, lengths), None
            for _ in range(50):
                out.fill_(float("nan"))
                graph.replay()
                moved |= first is not None and not torch.equal(out, first)
                first = out.clone()
            worst = max(worst, error(out, expected))
        record(
            "check",
            what="graph replays",
            variant=name,
            error=worst,
            ok=worst < 1e-2 and not moved,
            moved=moved,
        )


def check_bits() -> None:
    """Deterministic: a query's bits alone, in a chunk, in a batch and in a decode are equal."""
    length = 3000
    case = make_case(Heads(), [length, 700, 1500], [length, 1, 40])
    whole = attention.paged_attention(*case.arguments(0), deterministic=True)
    equal = {}
    for count in (1, 2, 33, 500):
        q, (k, v) = case.q[length - count : length], case.pages(0)
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        part = attention.paged_attention(
            q,
            k,
            v,
            starts,
            case.context_lens[:1],
            case.block_tables[:1],
            case.arguments(0)[-1],
            deterministic=True,
        )
        equal[count] = torch.equal(part, whole[length - count : length])
    record("check", what="bits", variant="deterministic", equal=equal, ok=all(equal.values()))


# --- decode --------------------------------------------------------------------------------------------------------

DECODE_TUNINGS = [
    AttentionTuning(),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=4),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=16),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=8, fused_reduction=False),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=8),
    AttentionTuning(decode_tile=128, decode_warps=4, decode_pieces=8, decode_stages=3),
    AttentionTuning(decode_warps=4, decode_stages=3, decode_pieces=8),
    AttentionTuning(decode_warps=4, decode_stages=3, decode_pieces=16),
    AttentionTuning(decode_warps=4, decode_stages=4, decode_pieces=8),
    AttentionTuning(decode_tile=32, decode_stages=3, decode_pieces=8),
]


def ragged(rows: int, mean: int = 500) -> list[int]:
    """Lengths like those of running conversations: a long tail, between 10 and 2000."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.empty(rows).log_normal_(0.0, 0.9, generator=generator)
    return (draws / draws.mean() * mean).clamp(10, 2000).int().tolist()


def time_decode(
    name: str,
    heads: Heads,
    contexts: list[int],
    tunings: list[AttentionTuning],
    deterministic: bool = True,
    section: str = "decode",
) -> None:
    """Terabytes per second of K and V; the plan is made before, its cost is shown once."""
    num_bytes = sum(contexts) * heads.token_bytes()
    layers = max(1, min(32, -(-5 * CACHE_BYTES // num_bytes)))
    case = make_case(heads, contexts, [1] * len(contexts), layers)
    out = torch.empty(len(contexts), heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
    forms = [(tuning, False) for tuning in tunings] + ([(AttentionTuning(), True)] if deterministic else [])
    for tuning, fixed in forms:
        planner = case.planner(tuning, fixed)
        make_plan = lambda: planner.plan(case.query_starts, case.context_lens, len(contexts))  # noqa: B023
        plan = make_plan()

        def run() -> None:
            for layer in range(layers):
                attention.paged_attention(*case.arguments(layer), 0, out, plan=plan, max_query_len=1)  # noqa: B023

        seconds = graph_time(run, layers)
        record(section, case=name, tuning="deterministic" if fixed else label(tuning), us=seconds * 1e6,
               tb_s=num_bytes / seconds / 1e12, percent=100 * num_bytes / seconds / READ_CEILING,
               plan_us=graph_time(make_plan, seconds=0.02) * 1e6)  # fmt: skip


def decode() -> None:
    """Batches of decodes, for a small grid of tunings, then other shapes of heads with the default."""
    main = Heads()
    for rows, context in ((64, 4096), (256, 1024), (64, 1024)):
        time_decode(f"{rows}x{context}", main, [context] * rows, DECODE_TUNINGS)
    few = [DECODE_TUNINGS[index] for index in (0, 2, 3, 6, 7)]
    for rows, context in ((16, 8192), (1, 1024), (1, 8192)):
        time_decode(f"{rows}x{context}", main, [context] * rows, few)
    time_decode("ragged 256", main, ragged(256), few)
    time_decode("ragged 1024", main, ragged(1024), few)
    wide = [AttentionTuning(), AttentionTuning(decode_warps=4, decode_stages=3, decode_pieces=8)]
    for heads in (Heads(8, 4, 64), Heads(3, 3, 64), Heads(40, 1, 128)):
        name = f"ragged 256, {heads.kv_heads} heads of {heads.head_dim}, group {heads.group}"
        time_decode(name, heads, ragged(256), wide, deterministic=False)


def served() -> None:
    """The tiles that a server uses, chosen by the number of rows."""
    for rows, context in ((64, 4096), (256, 1024), (64, 1024), (16, 4096), (1, 8192)):
        tuning = next(tuning for most, tuning in TUNINGS if rows <= most)
        time_decode(f"{rows}x{context}", Heads(), [context] * rows, [tuning], False, section="served")


# --- prompt --------------------------------------------------------------------------------------------------------

PROMPT_TUNINGS = [
    AttentionTuning(),
    AttentionTuning(prompt_tile=128, prompt_stages=2),
    AttentionTuning(prompt_tile=128, prompt_stages=3),
    AttentionTuning(prompt_tile=64, prompt_stages=4),
    AttentionTuning(prompt_rows=64, prompt_warps=4),
    AttentionTuning(prompt_warps=4, prompt_stages=2),
]


def prompt_flops(heads: Heads, length: int) -> float:
    """Products of causal attention, half of the square, as FlashAttention counts them."""
    return 2.0 * length * length * heads.num_heads * heads.head_dim


def time_prompt(heads: Heads, length: int, tunings: list[AttentionTuning]) -> None:
    """One fresh prompt, through pages, and the library beside it."""
    case = make_case(heads, [length], [length])
    out = torch.empty(length, heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
    name = f"{length}, {heads.num_heads}/{heads.kv_heads} heads of {heads.head_dim}"

    def show(what: str, run: Callable[[], object]) -> None:
        try:
            seconds = graph_time(run)
        except Exception as fault:  # a size that does not fit is a result too
            record("prompt", case=name, what=what, failed=str(fault).splitlines()[0][:100])
            return
        record(
            "prompt",
            case=name,
            what=what,
            us=seconds * 1e6,
            tflops=prompt_flops(heads, length) / seconds / 1e12,
        )

    pieces = [
        torch.randn(length, heads.kv_heads, heads.head_dim, device=DEVICE).to(heads.dtype) for _ in range(2)
    ]
    for tuning in tunings:
        words = (f"rows {tuning.prompt_rows} tile {tuning.prompt_tile} warps {tuning.prompt_warps} "
                 f"stages {tuning.prompt_stages}")  # fmt: skip
        plan = case.planner(tuning).plan(case.query_starts, case.context_lens, 1)
        scale = case.arguments(0)[-1] * LOG2_E
        show(f"pages, {words}", lambda: triton_prompt.prompt(
            case.q, *case.pages(0), case.block_tables, plan, scale, 1.0, out))  # noqa: B023  # fmt: skip
    plan = case.planner(None, True).plan(case.query_starts, case.context_lens, 1)
    show("deterministic", lambda: attention.paged_attention(*case.arguments(0), 0, out, plan=plan))
    tensors = [tensor[:length].transpose(0, 1).unsqueeze(0) for tensor in (case.q, *pieces)]
    for what, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash-attention 2", SDPBackend.FLASH_ATTENTION),
    ):
        with sdpa_kernel(backend):
            show(what, lambda: scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True))
    if length <= 8192:
        show("naive", lambda: naive_attention(case.q, *pieces))


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores in memory."""
    group = q.shape[1] // k.shape[1]
    heads = [tensor[: q.shape[0]].transpose(0, 1) for tensor in (q, k, v)]
    heads[1:] = [tensor.repeat_interleave(group, 0) for tensor in heads[1:]]
    scores = (heads[0] @ heads[1].transpose(1, 2)).mul_(q.shape[2] ** -0.5)
    hidden = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ heads[2]


def prompt() -> None:
    """Fresh prompts of two lengths and some shapes."""
    time_prompt(Heads(), 8192, PROMPT_TUNINGS)
    time_prompt(Heads(), 2048, PROMPT_TUNINGS[:3])
    time_prompt(Heads(32, 1), 8192, PROMPT_TUNINGS[:2])
    time_prompt(Heads(8, 4, 64), 8192, PROMPT_TUNINGS[:3])


# --- naive against tiled, paged against contiguous -----------------------------------------------------------------


def naive() -> None:
    """Time and peak memory from 512 to 64k tokens; the naive form up to what fits."""
    heads, length = Heads(), 512
    while length <= 65536:
        case = make_case(heads, [length], [length])
        out = torch.empty(length, heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
        plan = case.planner().plan(case.query_starts, case.context_lens, 1)
        k, v = (
            torch.randn(length, heads.kv_heads, heads.head_dim, device=DEVICE).to(heads.dtype) for _ in "kv"
        )
        forms: dict[str, Callable[[], object]] = {
            "tiled": lambda: attention.paged_attention(*case.arguments(0), 0, out, plan=plan)  # noqa: B023
        }
        if 2 * heads.num_heads * length * length * 2 < 60e9:
            forms["naive"] = lambda: naive_attention(case.q, k, v)  # noqa: B023
        for what, run in forms.items():
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
            record("naive", tokens=length, what=what, ms=graph_time(run) * 1e3, peak_mb=peak)
            torch.cuda.empty_cache()
        length *= 2


def paged() -> None:
    """Decodes over blocks of 1, 16 and 128 against one block as long as the context."""
    for rows, context in ((1, 2048), (16, 2048), (64, 512), (64, 2048), (64, 8192), (256, 512), (256, 2048)):
        times = {}
        for block_size in (1, 16, 128, context):
            heads = Heads(block_size=block_size)
            layers = max(1, min(16, -(-4 * CACHE_BYTES // (rows * context * heads.token_bytes()))))
            case = make_case(heads, [context] * rows, [1] * rows, layers)
            out = torch.empty(rows, heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
            plan = case.planner().plan(case.query_starts, case.context_lens, rows)

            def run() -> None:
                for layer in range(layers):  # noqa: B023
                    attention.paged_attention(*case.arguments(layer), 0, out, plan=plan, max_query_len=1)  # noqa: B023

            times[block_size] = graph_time(run, layers) * 1e6
        record("paged", rows=rows, context=context, contiguous_us=times[context],
               **{f"block_{size}_us": times[size] for size in (1, 16, 128)},
               cost_of_16_percent=100 * (times[16] / times[context] - 1))  # fmt: skip


def shared() -> None:
    """Decodes whose contexts begin with the same pages: read by each row, or once for several."""
    shapes = [Heads(), Heads(40, 1, 128)]
    for heads, rows, prefix in itertools.product(shapes, (4, 16, 64, 256), (512, 2048, 8192)):
        contexts = [prefix + 64 + 3 * (row % 40) for row in range(rows)]
        layers = max(1, min(8, int(20e9 / (sum(contexts) * heads.token_bytes()))))
        case = make_case(heads, contexts, [1] * rows, layers)
        case.block_tables[:, : prefix // heads.block_size] = case.block_tables[
            0, : prefix // heads.block_size
        ]
        out = torch.empty(rows, heads.num_heads * heads.head_dim, dtype=heads.dtype, device=DEVICE)
        tuning = next(tuning for most, tuning in TUNINGS if rows <= most)
        times, results = [], []
        for tables in (None, case.block_tables):
            plan = case.planner(tuning).plan(
                case.query_starts, case.context_lens, rows, block_tables=tables, block_size=heads.block_size
            )

            def run() -> None:
                for layer in range(layers):  # noqa: B023
                    attention.paged_attention(*case.arguments(layer), 0, out, plan=plan, max_query_len=1)  # noqa: B023

            times.append(graph_time(run, layers, 0.05) * 1e6)
            results.append(out.float().clone())
        record("shared", kv_heads=heads.kv_heads, group=heads.group, rows=rows, prefix=prefix, each_us=times[0],
               once_us=times[1], speed_up=times[0] / times[1],
               error=float((results[0] - results[1]).abs().max()))  # fmt: skip


SECTIONS: dict[str, Callable[[], None]] = {
    "check": check, "decode": decode, "served": served, "amid": amid, "prompt": prompt,
    "naive": naive, "paged": paged, "shared": shared,
}  # fmt: skip


def num_compiled() -> int:
    """Kernels that were compiled so far."""
    modules = (triton_plan, triton_decode, triton_prompt)
    kernels = [
        value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")
    ]
    return sum(len(cache[0]) for kernel in kernels for cache in getattr(kernel, "device_caches", {}).values())


def summary() -> None:
    """The best of each case, last."""
    print("\n== summary")
    bad = [line for line in REPORT.get("check", []) if not line["ok"]]
    if "check" in REPORT:
        print(
            f"check: {len(REPORT['check'])} cases, {len(bad)} wrong"
            + "".join(f"\n  WRONG {line}" for line in bad)
        )
    for section, key in (("decode", "percent"), ("prompt", "tflops")):
        for case in dict.fromkeys(line["case"] for line in REPORT.get(section, [])):
            lines = [line for line in REPORT[section] if line["case"] == case and key in line]
            for line in sorted(lines, key=lambda line: -line[key])[:3]:
                print(f"{section:7s} {case:45s} {line[key]:7.1f} {key}  {line['us']:9.1f} us  "
                      f"{line.get('tuning') or line.get('what')}")  # fmt: skip


def main() -> None:
    """Runs the chosen sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("OUT", ".")) / "attention_gpu.json"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one")
    torch.manual_seed(0)
    for name in arguments.sections.split(","):
        begin, compiled = time.perf_counter(), num_compiled()
        try:
            SECTIONS[name]()
            record("about", of=name, date=date.today().isoformat(), machine=torch.cuda.get_device_name(),
                   torch=torch.__version__, triton=triton.__version__)  # fmt: skip
        finally:
            arguments.output.write_text(json.dumps(REPORT, indent=1, default=str))
        print(
            f"== {name}: {time.perf_counter() - begin:.0f} s, {num_compiled() - compiled} kernels compiled",
            flush=True,
        )
    summary()


if __name__ == "__main__":
    main()
