"""What the engine's feed costs: tokens per second of n streams with three listeners, beside none.

    python -m quire_lab.benchmarks.feed_cost [--seconds 480] [--n 64] [--output FILE.json]

How it is measured:
- One `quire serve` with the built-in model answers n streams at once, a batch of them after the other. While they run,
  windows of WINDOW seconds follow each other in the order without, with, with, without listeners. Tokens are counted
  as they arrive, without the first SETTLE seconds of a window, from the last arrival before its begin to the last one
  before its end: a step's tokens arrive together, and part of a step would be an error of several percent.
  Opening a page, which sends a whole record, is over by then.
- A listener reads and drops: a page does its drawing on another machine.
- Four windows make one pair, the inner two beside the outer two: what growing contexts cost cancels out. `share` is the
  mean of the pairs' ratios of tokens per second without the lowest and the highest tenth; `interval` has 95 %.
- `cpu_share` is the same of tokens per CPU second of the server and its engine. Programs beside it disturb it less.
- Batches go on until both intervals are narrower than PRECISION on each side, or the time is over.
- `bytes_per_second` and `records_per_second` are of one listener.
- `record_milliseconds` is the CPU time that an engine's thread needs for one record with that many sequences that all
  advance, on a simulated device.
"""

import argparse
import asyncio
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
WINDOW, SETTLE = 2.0, 0.5
PATTERN = (False, True, True, False)
PRECISION, TRIMMED, RESAMPLES = 0.0025, 0.1, 2000
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


async def batch(url: str, pid: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Windows of one batch, from the first token of all streams to the end of the first of them."""
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
    streams = [Connection(url, "/v1/completions", body) for body in bodies]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    while not all(stream.num_events for stream in streams):
        await asyncio.sleep(0.05)
    windows: list[dict[str, Any]] = []
    while not any(task.done() for task in tasks):
        windows.append(await window(url, pid, streams, listens=PATTERN[len(windows) % len(PATTERN)]))
    await asyncio.gather(*tasks)
    return windows[:-1]  # streams ended in the last one


def cpu_seconds(pid: int) -> float:
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def window(url: str, pid: int, streams: list[Connection], listens: bool) -> dict[str, Any]:
    listeners = [Connection(url, "/v1/engine/events") for _ in range(LISTENERS if listens else 0)]
    tasks = [asyncio.create_task(listener.run()) for listener in listeners]
    await asyncio.sleep(SETTLE)
    begin, before = time.perf_counter(), sum(stream.num_events for stream in streams)
    arrived = max(stream.last for stream in streams)
    cpu = cpu_seconds(pid)
    sizes = [(listener.num_events, listener.num_bytes) for listener in listeners[:1]]
    await asyncio.sleep(WINDOW - SETTLE)
    seconds = time.perf_counter() - begin
    tokens = sum(stream.num_events for stream in streams) - before
    result = {
        "listens": listens,
        "tokens_per_second": tokens / max(1e-3, max(stream.last for stream in streams) - arrived),
        "tokens_per_cpu_second": tokens / max(1e-3, cpu_seconds(pid) - cpu),
    }
    for (events, size), listener in zip(sizes, listeners, strict=False):
        result["records_per_second"] = (listener.num_events - events) / seconds
        result["bytes_per_second"] = (listener.num_bytes - size) / seconds
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


def shares(batches: list[list[dict[str, Any]]], what: str) -> list[float]:
    """Of each four windows: the inner two, with listeners, over the outer two.

    A step's time t grows by as much with every token, so t * dt is constant in time and t squared grows steadily.
    """
    ratios = []
    for windows in batches:
        for at in range(0, len(windows) - len(PATTERN) + 1, len(PATTERN)):
            speeds = [each[what] for each in windows[at : at + len(PATTERN)]]
            if min(speeds) > 0:
                first, second, third, last = (speed**-2 for speed in speeds)
                ratios.append(((first + last) / (second + third)) ** 0.5)
    return ratios


def estimate(ratios: list[float]) -> dict[str, Any]:
    """The trimmed mean, and its 95 % interval by resampling."""
    draw = random.Random(0)
    means = sorted(_trimmed(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    interval = [means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]]
    return {"share": _trimmed(ratios), "interval": interval, "pairs": len(ratios)}


def _trimmed(ratios: list[float]) -> float:
    cut = int(TRIMMED * len(ratios))
    return statistics.fmean(sorted(ratios)[cut : len(ratios) - cut])


def is_sharp(batches: list[list[dict[str, Any]]]) -> bool:
    for what in ("tokens_per_second", "tokens_per_cpu_second"):
        if len(ratios := shares(batches, what)) < 12:
            return False
        low, high = estimate(ratios)["interval"]
        if high - low > 2 * PRECISION:
            return False
    return True


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


def measured(count: int, seconds: float) -> list[list[dict[str, Any]]]:
    flags = [
        "--port",
        "0",
        "--max-num-seqs",
        str(count),
        "--kv-cache-memory-bytes",
        "1G",
        "--data-dir",
        "none",
    ]
    command = [sys.executable, "-m", "quire", "serve", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = (re.search(r"serving\s+(\S+)/v1", line) for line in server.stderr)
        url = next(match[1] for match in lines if match)
        asyncio.run(batch(url, server.pid, 2, 0))
        deadline, batches = time.monotonic() + seconds, []
        while not batches or (time.monotonic() < deadline and not is_sharp(batches)):
            batches.append(asyncio.run(batch(url, server.pid, count, 1 + len(batches))))
        return batches
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no batch begins")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/feed_cost.json"))
    arguments = parser.parse_args()
    batches = measured(arguments.n, arguments.seconds)
    by_time = estimate(shares(batches, "tokens_per_second"))
    by_cpu = estimate(shares(batches, "tokens_per_cpu_second"))
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"n": arguments.n, "listeners": LISTENERS, "window_seconds": WINDOW},
        **by_time,
        "cpu_share": by_cpu["share"],
        "cpu_interval": by_cpu["interval"],
        "record_milliseconds": {str(count): record_milliseconds(count) for count in SEQUENCES},
        "batches": batches,
    }
    for what, ratio in (("second", by_time), ("CPU second of the server", by_cpu)):
        low, high = ratio["interval"]
        print(
            f"{LISTENERS} listeners, {arguments.n} streams: {ratio['share']:.2%} of the tokens per {what} "
            f"({low:.2%} to {high:.2%}, {ratio['pairs']} pairs; goal: {GOAL:.0%})"
        )
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
