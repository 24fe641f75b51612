"""A large adapter is loaded over HTTP beside a stream: `python -m quire_lab.benchmarks.adapter_load --output FILE`.

A real `quire serve` with the built-in model streams one answer. In the middle of it POST /v1/load_lora_adapter loads an
adapter of `--rank` on every linear layer (rank 256 in float32 is a file of 312 MB), and then one whose config takes
`--slow` seconds to come, as from a slow disk: it is a pipe. Prints the longest gap between two tokens before each load
and during it, and how long the load took. The machine's other work makes gaps too: compare with those before.
"""

import argparse
import http.client
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_machine

ADMIN_KEY = "operator"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYERS, HIDDEN, KEYS, WIDE = 30, 576, 192, 1536  # of the built-in model
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KEYS), "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, WIDE), "mlp.up_proj": (HIDDEN, WIDE),
    "mlp.down_proj": (WIDE, HIDDEN),
}  # fmt: skip
QUIET_TOKENS = 64  # that are timed before each load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument(
        "--slow", type=float, default=2.0, help="seconds that the slow adapter's config takes"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = _write(Path(folder), options.rank)
        server, port = _serve(Path(folder))
        try:
            large = [_load_beside_a_stream(port, "large") for _ in range(options.repeats)]
            with _slow(Path(folder) / "slow" / CONFIG, config, options.slow):
                slow = _load_beside_a_stream(port, "slow")
        finally:
            server.terminate()
            server.wait()
        num_bytes = (Path(folder) / "large" / WEIGHTS).stat().st_size
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "rank": options.rank,
        "file_mb": round(num_bytes / 1e6),
        "large": large,
        "slow": slow,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def _write(folder: Path, rank: int) -> str:
    """The two adapters; the config of both. The slow one is small: nothing but its config is slow."""
    import torch
    from safetensors.torch import save_file

    config = json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in WIDTHS],
    })  # fmt: skip
    for name, layers in (("large", LAYERS), ("slow", 1)):
        tensors = {}
        for layer, (module, (num_in, num_out)) in itertools.product(range(layers), WIDTHS.items()):
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = 0.01 * torch.randn(rank, num_in)
            tensors[f"{prefix}.lora_B.weight"] = 0.01 * torch.randn(num_out, rank)
        (folder / name).mkdir()
        save_file(tensors, folder / name / WEIGHTS)
    (folder / "large" / CONFIG).write_text(config)
    return config


@contextmanager
def _slow(path: Path, text: str, seconds: float) -> Iterator[None]:
    """A pipe instead of a file: its reader waits until data is written."""
    os.mkfifo(path)

    def feed() -> None:
        with open(path, "w") as pipe:  # returns when a reader opens it
            time.sleep(seconds)
            pipe.write(text)

    threading.Thread(target=feed, daemon=True).start()
    yield


def _serve(folder: Path) -> tuple[subprocess.Popen[str], int]:
    flags = (
        "--port",
        "0",
        "--admin-key",
        ADMIN_KEY,
        "--lora-dir",
        str(folder),
        "--kv-cache-memory-bytes",
        "1G",
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *flags], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    for line in server.stderr:
        address = re.search(r"serving\s+http://[^:]+:(\d+)", line)
        if address:
            threading.Thread(target=server.stderr.read, daemon=True).start()  # or the pipe fills up
            return server, int(address[1])
    raise SystemExit("the server did not start")


def _load_beside_a_stream(port: int, path: str) -> dict[str, float]:
    loaded = threading.Event()
    spent: list[float] = []

    def load() -> None:
        started = time.monotonic()
        status, said = _post(port, "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path})
        spent.append(time.monotonic() - started)
        loaded.set()
        if status != 200:
            raise SystemExit(f"the load was refused: {said}")

    before: list[float] = []
    during: list[float] = []
    last = None
    loading = threading.Thread(target=load)
    for now in _tokens(port):
        if last is not None:
            (before if loading.ident is None else during).append(now - last)
        last = now
        if len(before) == QUIET_TOKENS and loading.ident is None:
            loading.start()
        if loaded.is_set():
            break
    loading.join()
    return {
        "load_seconds": round(spent[0], 3),
        "tokens_during_load": len(during),
        "median_gap_before_ms": round(1e3 * statistics.median(before), 1),
        "longest_gap_before_ms": round(1e3 * max(before), 1),
        "median_gap_during_ms": round(1e3 * statistics.median(during), 1),
        "longest_gap_during_ms": round(1e3 * max(during), 1),
    }


def _tokens(port: int) -> Iterator[float]:
    """When each token came."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    try:
        while line := response.readline():
            if line.startswith(b"data: {"):
                yield time.monotonic()
    finally:
        connection.close()


def _post(port: int, path: str, body: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


if __name__ == "__main__":
    main()
