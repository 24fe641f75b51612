"""What the engine's feed costs: tokens per second of n streams with three listeners, beside none.

    python -m quire_lab.benchmarks.feed_cost [--batches 4] [--n 64] [--output FILE.json]

How it is measured:
- One `quire serve` with the built-in model answers n streams at once, a batch of them after the other. While they run,
  three listeners are there for WINDOW seconds, then none for as long, and so on. Tokens are counted as they arrive,
  without the first SETTLE seconds of a window.
- A listener reads and drops: a page does its drawing on another machine.
- A window is compared with the mean of the windows before and after it, so that growing contexts cancel out. `share` is
  the median of these ratios; `standard_error` is that of their mean. On a machine that is not idle it is large.
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

from quire.bench.machine import describe_machine, describe_versions
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build_engine
from quire.link.feed import EngineFeed

LISTENERS, GOAL = 3, 0.99
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 280
WINDOW, SETTLE = 2.0, 0.3
SEQUENCES = (64, 256, 512)


class Connection:
    """One HTTP request whose answer is counted and dropped."""

    def __init__(self, url: str, path: str, body: dict[str, Any] | None = None) -> None:
        self.num_events = self.num_bytes = 0
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
                if b"[DONE]" in data:
                    return
        finally:
            writer.close()


async def batch(url: str, count: int, seed: int) -> list[dict[str, Any]]:
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
        windows.append(await window(url, streams, listens=len(windows) % 2 == 1))
    await asyncio.gather(*tasks)
    return windows[:-1]  # streams ended in the last one


async def window(url: str, streams: list[Connection], listens: bool) -> dict[str, Any]:
    listeners = [Connection(url, "/v1/engine/events") for _ in range(LISTENERS if listens else 0)]
    tasks = [asyncio.create_task(listener.run()) for listener in listeners]
    await asyncio.sleep(SETTLE)
    begin, before = time.perf_counter(), sum(stream.num_events for stream in streams)
    sizes = [(listener.num_events, listener.num_bytes) for listener in listeners[:1]]
    await asyncio.sleep(WINDOW - SETTLE)
    seconds = time.perf_counter() - begin
    result = {
        "listens": listens,
        "tokens_per_second": (sum(s.num_events for s in streams) - before) / seconds,
    }
    for (events, size), listener in zip(sizes, listeners, strict=False):
        result["records_per_second"] = (listener.num_events - events) / seconds
        result["bytes_per_second"] = (listener.num_bytes - size) / seconds
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


def shares(windows: list[dict[str, Any]]) -> list[float]:
    """Of each window between two others: its tokens per second over theirs, or the reverse if it has no listeners."""
    rates = [each["tokens_per_second"] for each in windows]
    made = []
    for at in range(1, len(windows) - 1):
        ratio = rates[at] / ((rates[at - 1] + rates[at + 1]) / 2)
        made.append(ratio if windows[at]["listens"] else 1 / ratio)
    return made


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


def measured(count: int, batches: int) -> list[list[dict[str, Any]]]:
    flags = ["--port", "0", "--max-num-seqs", str(count), "--kv-cache-memory-bytes", "512M"]
    command = [sys.executable, "-m", "quire", "serve", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = (re.search(r"serving\s+(\S+)/v1", line) for line in server.stderr)
        url = next(match[1] for match in lines if match)
        asyncio.run(batch(url, 2, 0))
        return [asyncio.run(batch(url, count, 1 + number)) for number in range(batches)]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/feed_cost.json"))
    arguments = parser.parse_args()
    batches = measured(arguments.n, arguments.batches)
    ratios = [ratio for windows in batches for ratio in shares(windows)]
    share, error = statistics.median(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"n": arguments.n, "listeners": LISTENERS, "window_seconds": WINDOW},
        "share": share,
        "standard_error": error,
        "record_milliseconds": {str(count): record_milliseconds(count) for count in SEQUENCES},
        "batches": batches,
    }
    print(
        f"{LISTENERS} listeners, {arguments.n} streams: {share:.1%} of the tokens per second over "
        f"{len(ratios)} windows, standard error {error:.1%} (goal: {GOAL:.0%})"
    )
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
