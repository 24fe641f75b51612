"""Training on one GPU: `python -m quire_lab.benchmarks.train_gpu [--parts attention,sparse,lora,qlora,tiles]`.

`attention`: the kernels' values and gradients beside the reference, their forward and backward passes beside cuDNN's
and FlashAttention-2's of PyTorch. `sparse`: time of block-sparse attention by the share of blocks. `lora` and `qlora`:
steps of the trainer on a published shape with random weights, packed sequences, every linear layer adapted. Model FLOPs
are what gradients of LoRA need: two products per weight and token, attention's without its recomputation.
`tiles` times the kernels with other tiles; `--profile` prints the kernels of a step by time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.packed_attention import cuda, reference, triton
from quire.models.registry import describe
from quire.train.frozen import FrozenFormat, keep, store_int8, store_nf4
from quire.train.lora import LoraParameters
from quire.train.model import Example, TrainedModel
from quire.train.settings import TrainSettings
from quire.train.trainer import TrainedStep, Trainer
from quire.weights.source import open_source
from quire_lab.benchmarks import workloads

PARTS = ("attention", "sparse", "lora", "qlora")
PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 and an H200 by the datasheet
HEADS, KV_HEADS, WIDTH = 32, 8, 128  # of llama8b
DENSITIES = (1.0, 0.5, 0.25, 0.1)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
# Tiles to compare: queries, keys, warps, stages.
SWEEP = {
    "FORWARD": ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3)),
    "QUERIES": ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (64, 128, 4, 2)),
    "KEYS": ((64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3), (64, 64, 8, 2)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a packed sequence")
    parser.add_argument("--sequences", type=int, default=2, help="of a batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in options.parts.split(","):
        for row in RUNS[part](options):
            rows.append({"part": part, **row})
            print(json.dumps(rows[-1]), flush=True)
            if options.output:
                record = {
                    "date": date.today().isoformat(),
                    "machine": torch.cuda.get_device_name(),
                    "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
                    "results": rows,
                }
                options.output.write_text(json.dumps(record, indent=1) + "\n")


def timed(run: Callable[[], object], repeats: int = 10) -> float:
    """Seconds, the median after a warm-up."""
    times = []
    for _ in range(3 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def drawn(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = sum(lengths)
    q = torch.randn(total, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, total, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return q, k, v, starts


def flops(lengths: list[int]) -> float:
    """Of the forward pass: two products of the causal half."""
    return sum(4.0 * HEADS * WIDTH * length * (length + 1) / 2 for length in lengths)


def attention(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kernel in (cuda, triton):
        for dtype in (torch.bfloat16, torch.float16):
            yield checked(kernel, [1000, 3, 500, 64, 130], None, dtype)
    yield checked(triton, [1000, 3, 500], random_mask(16, 0.4), torch.bfloat16)
    for lengths in ([8192], [4096, 4096], [1024] * 8, [300] * 27):
        q, k, v, starts = drawn(lengths)
        given = (starts, max(lengths), WIDTH**-0.5)
        out, sums = triton.forward(q, k, v, *given)
        grad = torch.randn_like(out)
        work = flops(lengths)
        forward = timed(partial(triton.forward, q, k, v, *given))
        row = {"lengths": f"{len(lengths)} x {lengths[0]}"}
        for name, kernel in (("triton", triton), ("cuda", cuda)):
            backward = timed(partial(kernel.backward, grad, q, k, v, out, sums, *given))
            row |= speeds(name, work, forward, backward)
        del row["cuda_forward"]  # Triton's
        if len(set(lengths)) == 1:
            for name, backend in BACKENDS.items():
                row |= speeds(name, work, *torch_times(backend, q, k, v, len(lengths)))
        yield row


def speeds(name: str, work: float, forward: float, backward: float) -> dict[str, float]:
    """TFLOP/s; the backward pass counts two and a half times the forward one, as FlashAttention's papers do."""
    return {
        f"{name}_forward": round(work / forward / 1e12, 1),
        f"{name}_backward": round(2.5 * work / backward / 1e12, 1),
    }


def torch_times(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[float, float]:
    """Of PyTorch's attention on sequences of equal length, keys repeated for the heads that share them."""
    q, k, v = (
        x.repeat_interleave(HEADS // x.shape[1], 1).unflatten(0, (count, -1)).transpose(1, 2).requires_grad_()
        for x in (q, k, v)
    )
    with sdpa_kernel(backend):
        forward = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        backward = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return forward, backward


def checked(kernel: Any, lengths: list[int], mask: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors beside the reference in float32 on the same 16-bit inputs."""
    q, k, v, starts = drawn(lengths)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    given = (starts, max(lengths), WIDTH**-0.5, mask)
    out, sums = kernel.forward(q, k, v, *given)
    grad = torch.randn_like(out)
    grads = kernel.backward(grad, q, k, v, out, sums, *given)
    wide = [x.float() for x in (q, k, v)]
    expected, right_sums = reference.forward(*wide, *given)
    wanted = reference.backward(grad.float(), *wide, expected, right_sums, *given)
    names = ("out", "dq", "dk", "dv")
    errors = {
        name: float((mine.float() - its).norm() / its.norm())
        for name, mine, its in zip(names, (out, *grads), (expected, *wanted), strict=True)
    }
    again = kernel.backward(grad, q, k, v, out, sums, *given)
    same = all(torch.equal(first, second) for first, second in zip(grads, again, strict=True))
    good = same and max(errors.values()) < 0.01
    name = kernel.__name__.rpartition(".")[2]
    return {
        "check": "ok" if good else "FAIL",
        "kernel": name,
        "dtype": str(dtype),
        "sparse": mask is not None,
        "same_again": same,
        "errors": errors,
    }


def random_mask(blocks: int, density: float) -> Tensor:
    seen = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < density
    return (seen | torch.eye(blocks, dtype=torch.bool)).to(device="cuda", dtype=torch.uint8)


def replayed(run: Callable[[], object]) -> float:
    """As `timed`, as a CUDA graph: launching takes longer than few blocks."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return timed(graph.replay)


def sparse(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    length = 16384
    blocks = length // reference.BLOCK
    q, k, v, starts = drawn([length])
    causal = torch.ones(blocks, blocks, device="cuda").tril()
    whole = {}
    for density in DENSITIES:
        mask = random_mask(blocks, density)
        given = (starts, length, WIDTH**-0.5, mask)
        out, sums = triton.forward(q, k, v, *given)
        times = {
            "forward": replayed(partial(triton.forward, q, k, v, *given)),
            "backward": replayed(partial(triton.backward, out, q, k, v, out, sums, *given)),
        }
        times["both"] = times["forward"] + times["backward"]
        whole = whole or times
        share = float((mask * causal).sum() / causal.sum())
        relative = {name: seconds / whole[name] / share for name, seconds in times.items()}
        yield {
            "density": density,
            "share": round(share, 4),
            **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in times.items()},
            **{f"{name}_over_share": round(value, 3) for name, value in relative.items()},
        }


def tiles(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    q, k, v, starts = drawn([8192])
    given = (starts, 8192, WIDTH**-0.5)
    usual = {name: getattr(triton, name) for name in SWEEP}
    for name, candidates in SWEEP.items():
        for sizes in candidates:
            setattr(triton, name, triton.TileSizes(*sizes))
            try:
                out, sums = triton.forward(q, k, v, *given)
                run = partial(triton.backward, out, q, k, v, out, sums, *given)
                if name == "FORWARD":
                    run = partial(triton.forward, q, k, v, *given)
                yield {"kernel": name, "tiles": sizes, "ms": round(1e3 * timed(run, 6), 3)}
            except Exception as error:
                yield {"kernel": name, "tiles": sizes, "error": str(error).splitlines()[0][:100]}
        setattr(triton, name, usual[name])


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from train(options, Path(folder), qlora=False)


def quantized_steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from train(options, Path(folder), qlora=True)


def train(options: argparse.Namespace, folder: Path, qlora: bool) -> Iterator[dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(workloads.SHAPES[options.shape]))
    source = open_source(folder, load_format="dummy")
    config = describe(source.config)
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    stores = (store_nf4, store_int8) if qlora else (keep, keep)
    model = TrainedModel(config, FrozenFormat(torch.bfloat16, device, *stores), device, options.length)
    model.load(source)
    loaded = time.monotonic() - began
    length, count = options.length, options.sequences
    generator = torch.Generator().manual_seed(0)
    items = []
    for _ in range(count * options.steps):
        ids = torch.randint(5, config.vocab_size, (length + 1,), generator=generator).tolist()
        items.append((Example(tuple(ids[:-1]), tuple(ids[1:])),))
    settings = TrainSettings(
        epochs=1, batch_size=count, batch_tokens=length * count, max_length=length, rank=16, clip=1.0,
        checkpoint_steps=10**6, qlora=qlora,
    )  # fmt: skip
    settings = settings.resolved(len(items), 8 * 10**9, on_gpu=True)
    parameters = LoraParameters(settings.rank, settings.alpha or 1.0)
    model.adapt(parameters, settings.targets)
    trainer = Trainer(model, settings, items, [], folder / "out", {"r": settings.rank})
    done: list[TrainedStep] = []
    profiler = Profile(options.profile)
    for _ in range(trainer.num_steps):
        with profiler(trainer.step == trainer.num_steps - 2):
            done.append(trainer._one_step())
            torch.cuda.synchronize()
    seconds = statistics.median(step.seconds for step in done[2:])
    work = needed(model, [length] * count)
    yield {
        "shape": options.shape,
        "tokens": length * count,
        "seconds": round(seconds, 4),
        "all_seconds": [round(step.seconds, 4) for step in done],
        "tokens_per_second": round(length * count / seconds),
        "model_tflops": round(work / seconds / 1e12, 1),
        "share_of_peak": round(work / seconds / PEAK, 4),
        "base_gb": round(model.base_bytes / 1e9, 3),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "load_s": round(loaded, 1),
        "losses": [round(step.loss, 4) for step in done],
    }


def needed(model: TrainedModel, lengths: list[int]) -> float:
    """FLOPs of forward and backward pass: frozen weights have gradients to activations only."""
    config = model.config
    layers = [matrix.num_rows * matrix.num_columns for matrix in model.number_format.matrices]
    adapters = len(model.parameters.flat)
    per_token = 4.0 * sum(layers) + 6.0 * adapters
    seen = sum(length * (length + 1) / 2 for length in lengths)
    return sum(lengths) * per_token + 12.0 * config.num_layers * config.num_heads * config.head_dim * seen


class Profile:
    """Prints the kernels of one step by their time."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._running: Any = None

    def __call__(self, now: bool) -> "Profile":
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._running = torch.profiler.profile(activities=activities) if self._wanted and now else None
        return self

    def __enter__(self) -> None:
        if self._running is not None:
            self._running.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._running is not None:
            self._running.__exit__(*error)
            events = self._running.key_averages()
            rows = sorted(events, key=lambda event: -event.self_device_time_total)
            total = sum(event.self_device_time_total for event in rows)
            print(f"kernels of a step: {total / 1e3:.1f} ms")
            for event in rows[:24]:
                print(f"{event.self_device_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:110]}")


RUNS = {"attention": attention, "sparse": sparse, "tiles": tiles, "lora": steps, "qlora": quantized_steps}


if __name__ == "__main__":
    main()
