"""What the engine's feed costs: tokens per second of n streams with three listeners, beside none.

    python -m quire_lab.benchmarks.feed_cost [--seconds 480] [--n 64] [--output FILE.json]

How it is measured:
- One `quire serve` with the built-in model answers n streams at once. Each group is three batches with the same
  prompts: one with listeners for its whole length and two without. Their order changes from group to group.
- Tokens are counted from the moment when all streams and listeners have begun to the end of the first stream, from
  last arrival to last arrival: a step's tokens arrive together.
- A listener reads and drops: a page does its drawing on another machine.
- `share` is the mean of the groups' ratios of tokens per second, with listeners over the mean of the two without,
  leaving out the lowest and the highest tenth; `interval` has 95 %. `null` is the same of the two batches without
  listeners, one over the other: what the method says of no difference.
- `cpu_share` is the same of tokens per CPU second of the server and its engine. Programs beside it disturb it less.
- `bytes_per_second` and `records_per_second` are of one listener.
- `record_milliseconds` is the CPU time that an engine's thread needs for one record with that many sequences that all
  advance, on a simulated device.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from quire.bench.machine import describe_machine, describe_versions
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build_engine
from quire.link.feed import EngineFeed

LISTENERS, GOAL = 3, 0.99
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 400
SETTLE = 0.5
ORDERS = tuple(itertools.permutations(("without", "with", "again")))
TRIMMED, RESAMPLES = 0.1, 2000
SEQUENCES = (64, 256, 512)


class Connection:
    """One HTTP request whose answer is counted and dropped."""

    def __init__(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        self.num_events = self.num_bytes = 0
        self.last = 0.0  # when data came
        self._address = urlsplit(url)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._request = head.encode() + data

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        writer.write(self._request)
        try:
            while data := await reader.read(65536):
                self.num_events += data.count(b"data: ")
                self.num_bytes += len(data)
                self.last = time.perf_counter()
                if b"[DONE]" in data:
                    return
        finally:
            writer.close()


async def batch(url: str, pid: int, count: int, seed: int, listens: bool) -> dict[str, float]:
    """The speed of one batch, from the first token of all streams to the end of the first of them."""
    draw = random.Random(seed)
    bodies = [
        {
            "prompt": [draw.randint(100, 49_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(count)
    ]
    listeners = [Connection(url, "/v1/engine/events") for _ in range(LISTENERS if listens else 0)]
    listening = [asyncio.create_task(listener.run()) for listener in listeners]
    streams = [Connection(url, "/v1/completions", body) for body in bodies]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    while not all(each.num_events for each in (*streams, *listeners)):
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE)
    begin, cpu, before = _now(streams), cpu_seconds(pid), sum(stream.num_events for stream in streams)
    sizes = [(listener.num_events, listener.num_bytes) for listener in listeners]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tokens, seconds = sum(stream.num_events for stream in streams) - before, _now(streams) - begin
    result = {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / (cpu_seconds(pid) - cpu),
    }
    if listeners:
        events, size = sizes[0]
        result["records_per_second"] = (listeners[0].num_events - events) / seconds
        result["bytes_per_second"] = (listeners[0].num_bytes - size) / seconds
    for task in listening:
        task.cancel()
    await asyncio.gather(*tasks)
    await asyncio.gather(*listening, return_exceptions=True)
    return result


def _now(streams: list[Connection]) -> float:
    return max(stream.last for stream in streams)


def cpu_seconds(pid: int) -> float:
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def estimate(ratios: list[float]) -> dict[str, Any]:
    """The trimmed mean, and its 95 % interval by resampling."""
    draw = random.Random(0)
    means = sorted(_trimmed(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    interval = [means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]]
    return {"share": _trimmed(ratios), "interval": interval, "groups": len(ratios)}


def _trimmed(ratios: list[float]) -> float:
    cut = int(TRIMMED * len(ratios))
    return statistics.fmean(sorted(ratios)[cut : len(ratios) - cut])


def record_milliseconds(count: int) -> float:
    """The median time of a record; each sequence has advanced by four tokens since the last."""
    config = EngineConfig.of(model="llama-8b", device="simulated:h200", max_num_seqs=count, num_blocks=40_000)
    engine: Any = build_engine(config).engine
    feed = EngineFeed(engine, lambda data: None)
    feed.start()
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
    for number in range(count):
        engine.add(Request(f"request {number}", [100 + number] * 64, sampling))
    times = []
    for _ in range(60):
        for _ in range(4):
            engine.step()
        begin = time.thread_time()
        feed.record(begin)
        times.append(time.thread_time() - begin)
    engine.close()
    return 1e3 * statistics.median(times[20:])


def measured(count: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    flags = f"--port 0 --max-num-seqs {count} --kv-cache-memory-bytes 1G --data-dir none"
    command = [sys.executable, "-m", "quire", "serve", *flags.split()]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = (re.search(r"serving\s+(\S+)/v1", line) for line in server.stderr)
        url = next(match[1] for match in lines if match)
        asyncio.run(batch(url, server.pid, count, 0, listens=False))
        deadline, groups = time.monotonic() + seconds, []
        while not groups or time.monotonic() < deadline or len(groups) % len(ORDERS):
            seed, group = 1 + len(groups), {}
            for which in ORDERS[len(groups) % len(ORDERS)]:
                group[which] = asyncio.run(batch(url, server.pid, count, seed, which == "with"))
            groups.append(group)
            print(
                seed,
                {which: round(each["tokens_per_second"]) for which, each in group.items()},
                file=sys.stderr,
            )
        return groups
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def ratios(groups: list[dict[str, dict[str, float]]], what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """With listeners over without, and without over without."""
    speeds = [{which: each[what] for which, each in group.items()} for group in groups]
    shares = [2 * each["with"] / (each["without"] + each["again"]) for each in speeds]
    return estimate(shares), estimate([each["again"] / each["without"] for each in speeds])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no six groups begin")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/feed_cost.json"))
    arguments = parser.parse_args()
    groups = measured(arguments.n, arguments.seconds)
    by_time, null = ratios(groups, "tokens_per_second")
    by_cpu, cpu_null = ratios(groups, "tokens_per_cpu_second")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"n": arguments.n, "listeners": LISTENERS, "output_tokens": OUTPUT_TOKENS},
        **by_time,
        "null": null,
        "cpu_share": by_cpu["share"],
        "cpu_interval": by_cpu["interval"],
        "cpu_null": cpu_null,
        "record_milliseconds": {str(count): record_milliseconds(count) for count in SEQUENCES},
        "groups": groups,
    }
    for what, ratio, none in (("second", by_time, null), ("CPU second of the server", by_cpu, cpu_null)):
        (low, high), (least, most) = ratio["interval"], none["interval"]
        print(
            f"{LISTENERS} listeners, {arguments.n} streams: {ratio['share']:.2%} of the tokens per {what} "
            f"({low:.2%} to {high:.2%}, {ratio['groups']} groups; goal: {GOAL:.0%}); "
            f"no listeners: {none['share']:.2%} ({least:.2%} to {most:.2%})"
        )
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
