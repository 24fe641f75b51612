"""Weights that stream to the GPU: the same tokens, and time per step against the link's floor.

    python -m quire_lab.benchmarks.weights_offload_gpu [--output FILE]

First a small model, deterministic: tokens with nothing offloaded, half, all, and half of it from disk must be equal.
Then llama8b's shape with random weights and half of them in pinned memory, 256 sequences: milliseconds per decode
step, bytes moved per step, and the rate that makes against the link's own, measured by one large pinned copy.
`--tiny` runs the same code with toy shapes, on a CPU from disk.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.request import Request
from quire_lab.benchmarks import workloads

GIB = 1 << 30
SMALL = workloads.SHAPES["llama1b"] | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
TINY = SMALL | {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL_LAYER = 2 * (1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 4096)  # bytes in bfloat16, norms aside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on a CPU")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one, or try the script itself with --tiny")
    began = time.perf_counter()
    record: dict[str, Any] = describe_origin()
    record["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        record["same_tokens"] = check_tokens(Path(folder), options.tiny)
        record["link_gb_s"] = None if options.tiny else link_rate()
        record["half"] = time_steps(Path(folder), options)
    record["seconds"] = time.perf_counter() - began
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    assert all(record["same_tokens"].values()), "tokens differ"


def check_tokens(folder: Path, tiny: bool) -> dict[str, bool]:
    """Whether each way of offloading gives the tokens that none gives."""
    layers = {"weights_offload_dir": str(folder / "layers")}
    ways: dict[str, dict[str, Any]] = {
        "half": {"cpu_offload_gb": 3.5 * SMALL_LAYER / GIB},
        "all": {"cpu_offload_gb": 1.0},
        "half, of it most on disk": {
            "cpu_offload_gb": 4.5 * SMALL_LAYER / GIB,
            "weights_memory_gb": 0.1,
            **layers,
        },
    }
    if tiny:
        ways = {"disk": {"weights_memory_gb": 0.0128, **layers}}
    shape = TINY if tiny else SMALL
    expected = small_tokens(folder, shape, {})
    return {way: small_tokens(folder, shape, settings) == expected for way, settings in ways.items()}


def small_tokens(folder: Path, shape: dict[str, Any], settings: dict[str, Any]) -> list[list[int]]:
    path = folder / "small"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape))
    fixed = {"deterministic": True, "enforce_eager": True, "num_blocks": 256, "max_model_len": 512}
    with LLM(str(path), load_format="dummy", use_tqdm=False, **fixed, **settings) as llm:
        print(*llm.report.lines(), sep="\n", flush=True)
        prompts = workloads.prompts([(5 + 7 * i, 24) for i in range(12)], shape["vocab_size"])
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        tokens = [
            list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)
        ]
    forget(llm)
    return tokens


def link_rate() -> float:
    """GB/s from pinned host memory, best of five copies of 1 GiB."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return GIB / best / 1e9


def time_steps(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of the large shape with half of its weights offloaded."""
    shape = TINY if options.tiny else workloads.SHAPES["llama8b"]
    path = folder / "large"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape))
    settings: dict[str, Any] = {"cpu_offload_gb": 16.06e9 / 2 / GIB}
    if options.tiny:
        settings = {"weights_memory_gb": 0.0128, "weights_offload_dir": str(folder / "layers")}
    began = time.perf_counter()
    llm = LLM(
        str(path), load_format="dummy", use_tqdm=False, enable_prefix_caching=False, max_model_len=1024,
        max_num_seqs=options.batch, **settings,
    )  # fmt: skip
    start_s = time.perf_counter() - began
    print(*llm.report.lines(), sep="\n", flush=True)
    streaming = llm.report.streaming
    assert streaming is not None
    decodes = decode_seconds(llm, options, shape["vocab_size"])
    step = statistics.median(decodes)
    rate = streaming.step_bytes / step
    result = {
        "start_s": start_s,
        "offloaded_layers": len(streaming.pinned) + len(streaming.on_disk),
        "num_layers": streaming.num_layers,
        "buffers": streaming.ring.num_buffers,
        "bytes_per_step": streaming.step_bytes,
        "measured_at_start_gb_s": streaming.bytes_per_second / 1e9,
        "batch": options.batch,
        "ms_per_step": 1e3 * step,
        "ms_of_each": [round(1e3 * seconds_each, 2) for seconds_each in decodes],
        "gb_s": rate / 1e9,
        "floor_ms_at_55.4_gb_s": 1e3 * streaming.step_bytes / 55.4e9,
        "over_floor": step / (streaming.step_bytes / 55.4e9),
        "output_tok_s": options.batch / step,
    }
    llm.close()
    forget(llm)
    return result


def decode_seconds(llm: LLM, options: argparse.Namespace, vocab_size: int) -> list[float]:
    """Of every step in which all sequences advanced by one token, but for the first two such."""
    engine = llm.engine
    prompts = workloads.prompts([(options.prompt, options.tokens)] * options.batch, vocab_size)
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(
            Request(str(i), prompt if isinstance(prompt, list) else prompt["prompt_token_ids"], sampling)
        )
    times = []
    last = time.perf_counter()
    while engine.has_work:
        updates = engine.step()
        now = time.perf_counter()
        if len(updates) == options.batch:
            times.append(now - last)
        last = now
    return times[2:]


def forget(llm: LLM) -> None:
    """What the next engine finds of the device must not depend on the last one."""
    llm.__dict__.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
