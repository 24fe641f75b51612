"""Decode attention between a model's products, for `attention_gpu.py --sections amid`.

Alone, attention runs at the chip's highest clock. In a model, products take all the power there is and the clock falls,
for attention too: tiles that win alone may lose there. Contexts are those of a `sharegpt` run of llama8b at some of its
steps, and all four products of a layer run between two layers' attention.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import workloads
from attention_cases import DEVICE, READ_CEILING, Case, Heads, label, make_case, record
from torch.profiler import ProfilerActivity, profile

from quire.kernels.attention import triton as attention
from quire.kernels.attention.tuning import AttentionTuning

STEPS = (40, 140, 250, 500, 760, 960)  # of a run that admits 50 prompts a step
ADMITTED = 50
LAYERS = 32
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # rows and columns, in a layer's order
WARM_SECONDS = 0.35  # the clock has fallen by then
TUNINGS = [
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
    like = {"dtype": torch.bfloat16, "device": DEVICE}
    return [[torch.randn(*shape, **like) / 64 for shape in PRODUCTS] for _ in range(4)]


def time_amid(case: Case, weights: list[list[torch.Tensor]], tuning: AttentionTuning) -> tuple[float, float]:
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
    kernel = next(one for one in seen.key_averages() if "_decode_kernel" in one.key)
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
        for tuning in TUNINGS:
            seconds, whole = time_amid(case, weights, tuning)
            record("amid", case=name, tuning=label(tuning), us=seconds * 1e6, tb_s=num_bytes / seconds / 1e12,
                   percent=100 * num_bytes / seconds / READ_CEILING, step_ms=whole * 1e3)  # fmt: skip
        del case
        torch.cuda.empty_cache()
