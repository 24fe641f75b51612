"""Times native operations at SmolLM2-135M's shapes, and a whole synthetic step on a tape.

    python -m quire_lab.benchmarks.native_kernels [--tokens 1,8,32,128,512,1024] [--only step|ops]

Times are the least and the median of repeated runs. A step at T tokens is T decodes with 160 tokens of context
each, or, as a prompt, one request of T tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import choose, huge_pages, native
from quire.kernels.native import Tape

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BLOCK_SIZE = 16
DECODE_CONTEXT = 160

Weight = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    norms: Tensor  # [2, WIDTH]


@dataclass(frozen=True, slots=True)
class Model:
    """A llama of SmolLM2's shapes, with random weights."""

    layers: list[Layer]
    embedding: Tensor  # [VOCABULARY, WIDTH] fp16
    head: Weight
    cos_sin: Tensor


@dataclass(frozen=True, slots=True)
class Requests:
    """A ragged batch and its pages."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    pool: Tensor  # [num_blocks, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM] fp16
    last: Tensor | None  # the last token of each request, where not every token is one


def random_weight(channels: int, columns: int) -> Weight:
    """A packed int8 weight, its scales and its sums."""
    linear = choose("int8_linear", "cpu")
    q = torch.randint(-127, 128, (channels, columns), dtype=torch.int8)
    return linear.pack(q), torch.rand(channels) * 1e-3, linear.row_sums(q)


def random_model() -> Model:
    """All layers with weights of their own: a step must stream all of them."""
    layers = [
        Layer(
            random_weight(QKV, WIDTH),
            random_weight(WIDTH, HEADS * HEAD_DIM),
            random_weight(2 * FEED_FORWARD, WIDTH),
            random_weight(WIDTH, FEED_FORWARD),
            torch.ones(2, WIDTH),
        )
        for _ in range(LAYERS)
    ]
    embedding = torch.randn(VOCABULARY, WIDTH).half()
    return Model(layers, embedding, random_weight(VOCABULARY, WIDTH), torch.rand(8192, HEAD_DIM))


def random_requests(contexts: list[int], queries: list[int]) -> Requests:
    """Requests whose last queries[r] tokens are computed."""
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(blocks)) + 1
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    positions, slots, start = [], [], 0
    for row, (context, count) in enumerate(zip(contexts, queries, strict=True)):
        tables[row, : blocks[row]] = order[start : start + blocks[row]].int()
        start += blocks[row]
        at = torch.arange(context - count, context)
        positions.append(at)
        slots.append(tables[row].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    total = int(starts[-1])
    pool = huge_pages.zeros(
        sum(blocks) + 1, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.float16
    ).normal_()
    return Requests(
        torch.randint(VOCABULARY, (total,)),
        torch.cat(positions).int(),
        torch.cat(slots),
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        tables,
        pool,
        starts[1:] - 1 if total != len(contexts) else None,
    )


def attend(qkv: Tensor, requests: Requests, layer: int) -> Tensor:
    """Attention of one layer over its pages."""
    pages = requests.pool[:, layer]
    q = qkv[:, : HEADS * HEAD_DIM].view(-1, HEADS, HEAD_DIM)
    return choose("attention", "cpu").paged_attention(
        q, pages[:, 0], pages[:, 1], requests.query_starts, requests.context_lens,
        requests.block_tables, HEAD_DIM**-0.5, 0,
    )  # fmt: skip


def forward(model: Model, requests: Requests) -> Tensor:
    """One step: logits of the last token of each request."""
    linear, norm, rotary = choose("int8_linear", "cpu"), choose("norm", "cpu"), choose("rotary", "cpu")
    hidden = choose("embedding", "cpu").gather(model.embedding, requests.token_ids)
    for index, layer in enumerate(model.layers):
        qkv = linear.linear(norm.rms_norm(hidden, layer.norms[0], 1e-5), *layer.qkv)
        pages = requests.pool[:, index]
        rotary.rotate_and_store(
            qkv, HEADS, KV_HEADS, HEAD_DIM, model.cos_sin, requests.positions, requests.slots,
            pages[:, 0], pages[:, 1],
        )  # fmt: skip
        attended = attend(qkv, requests, index)
        linear.linear(attended, *layer.output, residual=hidden, out=hidden)
        gated = linear.linear_silu_mul(norm.rms_norm(hidden, layer.norms[1], 1e-5), *layer.gate_up)
        linear.linear(gated, *layer.down, residual=hidden, out=hidden)
    if requests.last is not None:
        hidden = choose("embedding", "cpu").gather(hidden, requests.last)
    return linear.linear(norm.rms_norm(hidden, model.layers[0].norms[0], 1e-5), *model.head)


def measure(run: Callable[[], object], seconds: float = 0.5) -> tuple[float, float]:
    """(least, median) seconds of a call, over at least five calls."""
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def taped(run: Callable[[int], object], repeat: int = 1) -> Callable[[], None]:
    """Calls of run(0) .. run(repeat - 1) on a tape, so that Python is not what is measured."""
    with Tape() as tape:
        for index in range(repeat):
            run(index)
    return tape.replay


def time_operations(model: Model, tokens: int) -> None:
    """Each operation of a layer, over all layers so that weights come from memory as in a step."""
    linear, norm, layers = choose("int8_linear", "cpu"), choose("norm", "cpu"), model.layers
    x, wide, qkv = torch.randn(tokens, WIDTH), torch.randn(tokens, FEED_FORWARD), torch.randn(tokens, QKV)
    decodes = random_requests([DECODE_CONTEXT] * tokens, [1] * tokens) if tokens <= 128 else None
    prompt = random_requests([tokens], [tokens])
    cases: list[tuple[str, int, Callable[[int], object]]] = [
        ("qkv", QKV * WIDTH, lambda i: linear.linear(x, *layers[i].qkv)),
        ("output", WIDTH * WIDTH, lambda i: linear.linear(x, *layers[i].output)),
        ("gate_up", 2 * WIDTH * FEED_FORWARD, lambda i: linear.linear_silu_mul(x, *layers[i].gate_up)),
        ("down", WIDTH * FEED_FORWARD, lambda i: linear.linear(wide, *layers[i].down)),
        ("norm", 0, lambda i: norm.rms_norm(x, layers[i].norms[0], 1e-5)),
        ("attention (prompt)", 0, lambda i: attend(qkv, prompt, i)),
    ]
    if decodes is not None:
        cases.append(("attention (decode)", 0, lambda i: attend(qkv, decodes, i)))
    for name, weights, run in cases:
        least, median = measure(taped(run, LAYERS))
        print_line(f"{tokens:5d} {name}", least, median, weights * LAYERS, weights * LAYERS * tokens)
    rows = min(tokens, 128)
    least, median = measure(taped(lambda _: linear.linear(x[:rows], *model.head)))
    print_line(f"{rows:5d} head", least, median, VOCABULARY * WIDTH, VOCABULARY * WIDTH * rows)


def time_sampling(rows: int) -> None:
    """Sampling of `rows` sequences."""
    sample, logits = choose("sample", "cpu"), torch.randn(rows, VOCABULARY) * 3
    ones, zeros = torch.ones(rows), torch.zeros(rows)
    top_k, uniforms = torch.zeros(rows, dtype=torch.int32), torch.rand(rows, dtype=torch.float64)
    for name, run in (
        ("argmax", lambda: sample.argmax(logits)),
        ("draw", lambda: sample.sample_filtered(logits, ones, top_k, ones, zeros, uniforms)),
        ("top-p 0.95", lambda: sample.sample_filtered(logits, ones, top_k, ones * 0.95, zeros, uniforms)),
        ("top-k 50", lambda: sample.sample_filtered(logits, ones, top_k + 50, ones, zeros, uniforms)),
        ("log probability", lambda: sample.log_softmax_gather(logits, torch.zeros(rows, dtype=torch.int64))),
    ):
        print_line(f"{rows:5d} {name}", *measure(run, 0.3))


def time_steps(model: Model, counts: list[int]) -> None:
    """Whole steps: decodes, then prompts."""
    weights = sum(a.numel() for layer in model.layers for a in (layer.qkv[0], layer.output[0], layer.gate_up[0],
                  layer.down[0]))  # fmt: skip
    for tokens in counts:
        if tokens <= 256:
            requests = random_requests([DECODE_CONTEXT] * tokens, [1] * tokens)
            least, median = measure(taped(lambda _: forward(model, requests)), 2.0)  # noqa: B023
            head = model.head[0].numel()
            print_line(
                f"{tokens:5d} step (decode)", least, median, weights + head, (weights + head) * tokens, tokens
            )
        if tokens >= 64:
            requests = random_requests([tokens], [tokens])
            least, median = measure(taped(lambda _: forward(model, requests)), 2.0)  # noqa: B023
            print_line(f"{tokens:5d} step (prompt)", least, median, weights, weights * tokens, tokens)


def print_line(
    name: str, least: float, median: float, num_bytes: int = 0, products: int = 0, tokens: int = 0
) -> None:
    """One row: milliseconds, and rates at the least time."""
    rates = f"{num_bytes / least / 1e9:8.1f} GB/s {products / least / 1e9:8.0f} GMAC/s" if num_bytes else ""
    speed = f" {tokens / least:8.0f} tok/s (median {tokens / median:.0f})" if tokens else ""
    print(f"{name:28s} {least * 1e3:9.3f} ms (median {median * 1e3:9.3f}) {rates}{speed}", flush=True)


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", default="1,8,32,128,512,1024")
    parser.add_argument("--only", choices=("step", "ops", "sample"))
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.tokens.split(",")]
    print(f"{native.isa()}, {native.num_threads()} threads")
    torch.manual_seed(0)
    model = random_model()
    if arguments.only in (None, "ops"):
        for tokens in counts:
            time_operations(model, tokens)
    if arguments.only in (None, "sample"):
        for rows in (1, 32):
            time_sampling(rows)
    if arguments.only in (None, "step"):
        time_steps(model, counts)


if __name__ == "__main__":
    main()
