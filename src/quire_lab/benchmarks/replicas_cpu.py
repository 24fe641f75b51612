"""Throughput of two replicas of one thread over one of one thread, on two CPU cores; or what routing costs.

    python -m quire_lab.benchmarks.replicas_cpu --rounds 3 --output FILE
    python -m quire_lab.benchmarks.replicas_cpu --rounds 0 --output FILE

Both servers run; each gets the same load in turn: whole answers of the built-in model, all requests at once. Without
rounds no server runs, and the router's time for a request is measured.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_origin
from quire.fleet.policies import POLICIES
from quire.fleet.prefixes import prefix_of
from quire.fleet.router import Router
from quire.link.http_client import HttpClient
from quire_lab.benchmarks.serve_latency import serving

COUNTS = (1, 2)
FLAGS = "--num-threads 1 --kv-cache-memory-bytes 1G --max-num-seqs 32"


def main() -> None:
    options = _options()
    record = {
        "benchmark": "replicas_cpu",
        **describe_origin(),
        "settings": {**vars(options), "flags": FLAGS},
        "results": throughput(options) if options.rounds else routing(),
    }
    del record["settings"]["output"]
    print(json.dumps(record["results"], indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    source = str(Path(__file__).parents[2])
    with serving("builtin", source, FLAGS) as single, serving("builtin", source, f"{FLAGS} -dp 2") as double:
        urls = dict(zip(COUNTS, (single.url, double.url), strict=True))
        rates = asyncio.run(measure(urls, options))
    ratios = [rate[1] / rate[0] for rate in zip(rates[1], rates[2], strict=True)]
    return {
        "tokens_per_second": {str(count): rates[count] for count in COUNTS},
        "ratio": statistics.median(ratios),
    }


def routing() -> dict[str, Any]:
    return {"routing_microseconds": {str(size): routing_cost(size) for size in (128, 512, 2048, 8192)}}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=96, help="tokens")
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args()


async def measure(urls: dict[int, str], options: argparse.Namespace) -> dict[int, list[float]]:
    """Output tokens per second of each server, one number for each round."""
    rates: dict[int, list[float]] = {count: [] for count in urls}
    clients = {count: HttpClient(url) for count, url in urls.items()}
    for count in urls:
        await load(clients[count], 4, options.prompt, 8)
    for turn in range(options.rounds):
        for count in sorted(urls, reverse=bool(turn % 2)):
            started = time.perf_counter()
            num_tokens = await load(clients[count], options.requests * count, options.prompt, options.answer)
            rates[count].append(num_tokens / (time.perf_counter() - started))
    for client in clients.values():
        await client.close()
    return rates


async def load(client: HttpClient, num_requests: int, num_prompt: int, num_answer: int) -> int:
    drawn = random.Random(num_requests)

    async def ask() -> int:
        body: dict[str, Any] = {
            "prompt": drawn.choices(range(1000, 40_000), k=num_prompt),
            "max_tokens": num_answer,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with client.send("POST", "/v1/completions", json.dumps(body).encode()) as response:
            return int(json.loads(await response.read())["usage"]["completion_tokens"])

    return sum(await asyncio.gather(*(ask() for _ in range(num_requests))))


def routing_cost(num_tokens: int, num_replicas: int = 8) -> float:
    """Of one prompt, median, in microseconds: its hashes, the choice and the accounts."""
    router = Router(POLICIES["prefix-work"], [200_000] * num_replicas)
    drawn = random.Random(0)
    groups = [drawn.choices(range(50_000), k=num_tokens * 3 // 4) for _ in range(64)]
    seconds = []
    for number in range(1000):
        prompt = [*drawn.choice(groups), *drawn.choices(range(50_000), k=num_tokens // 4)]
        data = array("i", prompt).tobytes()
        started = time.perf_counter()
        prefix = prefix_of(data)
        router.sent(str(number), prefix, router.order(prefix, range(num_replicas))[0])
        seconds.append(time.perf_counter() - started)
        router.ended(str(number - 64))
    return 1e6 * statistics.median(seconds)


if __name__ == "__main__":
    main()
