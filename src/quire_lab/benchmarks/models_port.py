"""Several models behind one port with memory for one: what a switch costs, and whether memory comes back.

    python -m quire_lab.benchmarks.models_port [--requests 200] [--encoder FOLDER] [--output FILE.json]

How it is measured:
- One `quire serve --models` has two chat models (the built-in one under two names, with settings of their own) and an
  encoder, and memory for one. Requests go to the three in turn, one after the other: each is a switch.
- `wait` is what the answer's header says a request waited for its model. `start` is the median of STARTS loads of that
  model while no other runs: from the begin of its process to its first readiness, as the front reports it.
  `beyond_start` is the difference: what stopping the model before adds to the wait.
- `memory` is the resident memory (RSS) of the front and all processes below it, with all models unloaded, before the
  first request and after the last. Shared pages count in each process.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from quire.bench.machine import describe_machine, describe_versions
from quire.fleet.model_set import STARTED

GOAL_BYTES = 50_000_000
CHAT = {"model": "builtin", "memory": 900_000_000}
SETTINGS = {"max-num-seqs": 4, "kv-cache-memory-bytes": "64M", "data-dir": "none", "no-embeddings": True}
KEY = "benchmark"
STARTS = 3  # of each model alone


class Front:
    """A `quire serve --models` process and its address."""

    def __init__(self, models: dict[str, Any], folder: Path) -> None:
        path = folder / "models.json"
        path.write_text(json.dumps({"memory": 1_000_000_000, "models": models}))
        flags = ["--models", str(path), "--port", "0", "--admin-key", KEY]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *flags], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.url = next(match[1] for line in self.process.stderr if (match := STARTED.search(line)))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def ask(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """The seconds that the request waited for its model, and the answer."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            return float(response.headers.get("x-quire-model-wait", 0)), json.load(response)

    def memory(self) -> int:
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        return sum(process.memory_info().rss for process in processes)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def models(encoder: str) -> dict[str, Any]:
    return {
        "one": {**CHAT, "settings": SETTINGS},
        "two": {**CHAT, "settings": {**SETTINGS, "max-num-seqs": 8}},
        "encoder": {"model": encoder, "memory": 900_000_000, "settings": {"data-dir": "none"}},
    }


def asked(front: Front, name: str) -> float:
    if name == "encoder":
        waited, answer = front.ask("/v1/embeddings", {"model": name, "input": "Hello"})
        assert answer["data"][0]["embedding"]
    else:
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        waited, answer = front.ask("/v1/chat/completions", body)
        assert answer["model"] == name
        assert answer["choices"][0]["message"]["content"]
    return waited


def started_alone(front: Front, name: str) -> float:
    seconds = front.ask("/v1/models/load", {"model": name})[1]["start_seconds"]
    front.ask("/v1/models/unload", {"model": name})
    return float(seconds)


def switches(encoder: str, num_requests: int, folder: Path) -> dict[str, Any]:
    front = Front(models(encoder), folder)
    try:
        names, waits, errors = list(models(encoder)), [], []
        for name in names:  # what is imported and cached once
            asked(front, name)
        front.ask("/v1/models/unload", {"model": names[-1]})
        alone = {name: statistics.median(started_alone(front, name) for _ in range(STARTS)) for name in names}
        before = front.memory()
        for number in range(num_requests):
            name = names[number % len(names)]
            try:
                waited = asked(front, name)
                if number:  # the first one stops no other
                    start = alone[name]
                    waits.append(
                        {"model": name, "wait": waited, "start": start, "beyond_start": waited - start}
                    )
            except (urllib.error.URLError, OSError, AssertionError, KeyError) as error:
                errors.append(f"request {number} to {name}: {error!r}")
        loaded = front.memory()
        for name in names:
            front.ask("/v1/models/unload", {"model": name})
        time.sleep(0.5)
        after = front.memory()
    finally:
        front.close()
    return {"errors": errors, "memory": {"before": before, "loaded": loaded, "after": after}, "waits": waits}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub id"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/models_port.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = switches(arguments.encoder, arguments.requests, Path(folder))
    beyond = sorted(wait["beyond_start"] for wait in measured["waits"])
    starts = [wait["start"] for wait in measured["waits"]]
    kept = measured["memory"]["after"] - measured["memory"]["before"]
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"requests": arguments.requests, "encoder": Path(arguments.encoder).name},
        "num_errors": len(measured["errors"]),
        "kept_bytes": kept,
        "start_seconds_median": statistics.median(starts),
        "beyond_start_seconds": {"median": statistics.median(beyond), "max": beyond[-1]},
        **measured,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{arguments.requests} requests, {len(measured['errors'])} errors")
    print(f"memory after unloading: {kept / 1e6:+.1f} MB (goal: within {GOAL_BYTES / 1e6:.0f})")
    print(
        f"wait for a switch: the start, {statistics.median(starts):.2f} s, and {statistics.median(beyond):.2f} s "
        f"beyond it, at the median ({beyond[-1]:.2f} s at most)"
    )


if __name__ == "__main__":
    main()
