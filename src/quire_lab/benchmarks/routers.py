"""`quire route` beside sglang-router, before the same two `quire serve` replicas of one thread each. On two CPU cores.

    python -m quire_lab.benchmarks.routers --router-python PATH [--rounds 5] [--output FILE]

PATH is the Python of an environment that has sglang-router. How it is measured:
- `shared`: groups of prompts that begin with the same 512 tokens, 32 tokens of their own, 16 to answer. `mixed`:
  lengths as in ShareGPT, at most 1,024 and 64 tokens. Requests are streamed and arrive as a Poisson process.
- A round sends the same prompts at the same times through both routers, the other order each time; each round has other
  prompts and times. Before each turn the replicas drop their prefix caches, and the router is a new process.
- TTFT p50 and p99 are of all rounds' requests together. `ratio` is the median over rounds of our TTFT p50 divided by
  sglang-router's. `hit_rate` is what the replicas found in their prefix caches, `router_cpu_ms` the router's CPU time
  for each request.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_origin
from quire.bench.report import percentile
from quire.bench.serve import ServePlan, run_serve
from quire.bench.workload import DISTRIBUTIONS, WorkloadPlan, arrival_times
from quire.link.http_client import ConnectionLost, HttpClient
from quire_lab.benchmarks.serve_latency import Server, serving

ADMIN_KEY = "operator"
FLAGS = f"--num-threads 1 --kv-cache-memory-bytes 1G --max-num-seqs 32 --enable-prefix-caching --admin-key {ADMIN_KEY}"
GROUP_SIZE, SHARED_TOKENS, OWN_TOKENS, SHARED_ANSWER, MIXED_ANSWER = 8, 512, 32, 16, 64
START_SECONDS = 60


@dataclass(frozen=True, slots=True)
class RouterKind:
    command: tuple[str, ...]
    state: str  # path that lists the servers
    up: bytes  # once in that list for each server that answers


def main() -> None:
    options = _options()
    python = options.router_python
    kinds = {
        "quire": RouterKind((sys.executable, "-m", "quire", "route"), "/servers", b'"status":"ready"'),
        "sglang-router": RouterKind(
            (python, "-m", "sglang_router.launch_router", "--policy", "cache_aware", "--log-level", "warn")
            + ("--host", "127.0.0.1", "--worker-urls"),
            "/workers",
            b'"is_healthy":true',
        ),
    }
    version = "import importlib.metadata as m; print(m.version('sglang-router'))"
    installed = subprocess.run([python, "-c", version], capture_output=True, text=True, check=False)
    if installed.returncode:
        raise SystemExit(f"--router-python {python} has no sglang-router: pip install sglang-router there")
    source = str(Path(__file__).parents[2])
    with (
        tempfile.TemporaryDirectory() as name,
        serving("builtin", source, FLAGS) as first,
        serving("builtin", source, FLAGS) as second,
    ):
        turns = asyncio.run(measure(kinds, (first, second), Path(name), options))
    record = {"benchmark": "routers", **describe_origin(), "settings": {**vars(options), "flags": FLAGS}}
    record["versions"] |= {"sglang-router": installed.stdout.strip()}
    record["results"] = {workload: summary(of) for workload, of in turns.items()}
    for name in ("output", "router_python"):
        del record["settings"][name]
    print(json.dumps(record["results"], indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router-python", required=True, help="of an environment with sglang-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of each workload, in one round")
    parser.add_argument("--workloads", default="shared,mixed")
    parser.add_argument("--shared-rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--mixed-rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args()


# ---------------------------------------------------------------------- workloads, as traces of `bench serve`


def _shared(folder: Path, options: argparse.Namespace, seed: int) -> Path:
    drawn = random.Random(seed)
    groups = [number // GROUP_SIZE for number in range(options.requests)]
    drawn.shuffle(groups)
    times = arrival_times(options.requests, options.shared_rate, 1.0, drawn)
    sizes = {"input_length": SHARED_TOKENS + OWN_TOKENS, "output_length": SHARED_ANSWER}
    rows = [
        {"timestamp": 1e3 * at, **sizes, "hash_ids": [group]} for at, group in zip(times, groups, strict=True)
    ]
    return _write(folder / "shared.jsonl", rows)


def _mixed(folder: Path, options: argparse.Namespace, seed: int) -> Path:
    drawn = random.Random(seed)
    prompt, answer = DISTRIBUTIONS["sharegpt"]
    rows = [
        {
            "timestamp": 1e3 * at,
            "input_length": prompt.draw(drawn),
            "output_length": min(MIXED_ANSWER, answer.draw(drawn)),
        }
        for at in arrival_times(options.requests, options.mixed_rate, 1.0, random.Random(f"times {seed}"))
    ]
    return _write(folder / "mixed.jsonl", rows)


WORKLOADS = {"shared": _shared, "mixed": _mixed}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------------- turns


@dataclass(frozen=True, slots=True)
class RouterTurn:
    """One workload through one router."""

    first_tokens: list[float]  # TTFT of each request, seconds
    tokens_per_second: float
    hit_rate: float
    router_cpu_ms: float  # per request


async def measure(
    kinds: dict[str, RouterKind], replicas: tuple[Server, ...], folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, list[RouterTurn]]]:
    """By workload and router: a turn for each round."""
    turns: dict[str, dict[str, list[RouterTurn]]] = {
        workload: {name: [] for name in kinds} for workload in options.workloads.split(",")
    }
    for number in range(-1, options.rounds):  # the first is a warm-up
        for workload in turns:
            trace = WORKLOADS[workload](folder, options, 1 + number)
            for name in sorted(kinds, reverse=bool(number % 2)):
                turn = await take_turn(kinds[name], replicas, trace, 1 + number)
                print(
                    f"round {number + 1} {workload} {name}: TTFT p50 {1e3 * statistics.median(turn.first_tokens):.1f} "
                    f"ms, {turn.tokens_per_second:.1f} tok/s, hit rate {turn.hit_rate:.3f}, "
                    f"{turn.router_cpu_ms:.2f} ms of CPU a request",
                    file=sys.stderr,
                )
                if number >= 0:
                    turns[workload][name].append(turn)
    return turns


async def take_turn(kind: RouterKind, replicas: tuple[Server, ...], trace: Path, seed: int) -> RouterTurn:
    urls = [replica.url for replica in replicas]
    for url in urls:
        await _ask(url, "POST", "/reset_prefix_cache")
    model = json.loads(await _ask(urls[0], "GET", "/v1/models"))["data"][0]["id"]
    num_requests = len(trace.read_text().splitlines())
    workload = WorkloadPlan("trace", str(trace), num_requests, seed=seed)
    with started(kind, urls) as router:
        await _until_up(router.url, kind, len(urls))
        plan = ServePlan(router.url, workload, model=model, rates=(None,), num_warm_ups=4, extra=EXTRA)
        before, cpu = [await _prefix_counts(url) for url in urls], router.cpu_seconds()["http"]
        (run,) = (await run_serve(plan)).rounds
        after, cpu = [await _prefix_counts(url) for url in urls], router.cpu_seconds()["http"] - cpu
    failed = [outcome.error for outcome in run.outcomes if outcome.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {num_requests} requests failed: {failed[0]}")
    looked, hits = (
        sum(end[i] - start[i] for start, end in zip(before, after, strict=True)) for i in range(2)
    )
    return RouterTurn(
        [outcome.to_first for outcome in run.outcomes],
        sum(outcome.num_output_tokens for outcome in run.outcomes) / run.seconds,
        hits / max(1.0, looked),
        1e3 * cpu / num_requests,
    )


EXTRA = {"temperature": 0, "ignore_eos": True}


@contextmanager
def started(kind: RouterKind, urls: list[str]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*kind.command, *urls, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", 0.0)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def _until_up(url: str, kind: RouterKind, num_servers: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if (await _ask(url, "GET", kind.state)).count(kind.up) == num_servers:
                return
        except ConnectionLost:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"{' '.join(kind.command)} did not start within {START_SECONDS} s")


async def _prefix_counts(url: str) -> tuple[float, float]:
    """Tokens looked up in the prefix cache, and tokens found."""
    lines = (await _ask(url, "GET", "/metrics")).decode().splitlines()
    counts = [
        sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"quire_prefix_cache_{name}_total")
        )
        for name in ("queries", "hits")
    ]
    return counts[0], counts[1]


async def _ask(url: str, method: str, path: str) -> bytes:
    client = HttpClient(url, {"Authorization": f"Bearer {ADMIN_KEY}"})
    try:
        async with client.send(method, path) as response:
            body = await response.read()
    finally:
        await client.close()
    if response.status != 200:
        raise SystemExit(f"{url}{path} answers {response.status}: {body[:200]!r}")
    return body


# ---------------------------------------------------------------------- results


def summary(turns: dict[str, list[RouterTurn]]) -> dict[str, Any]:
    p50s = {name: [1e3 * statistics.median(turn.first_tokens) for turn in of] for name, of in turns.items()}
    ratios = [ours / theirs for ours, theirs in zip(p50s["quire"], p50s["sglang-router"], strict=True)]
    results: dict[str, Any] = {"ratio": statistics.median(ratios)}
    for name, of in turns.items():
        ordered = sorted(1e3 * seconds for turn in of for seconds in turn.first_tokens)
        results[name] = {
            "ttft_ms": {
                "p50": percentile(ordered, 50),
                "p99": percentile(ordered, 99),
                "p50_rounds": p50s[name],
            },
            "tokens_per_second": statistics.median(turn.tokens_per_second for turn in of),
            "hit_rate": statistics.median(turn.hit_rate for turn in of),
            "router_cpu_ms": statistics.median(turn.router_cpu_ms for turn in of),
        }
    return results


if __name__ == "__main__":
    main()
