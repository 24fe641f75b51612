"""What a fine-tuning job costs the requests beside it: tokens per second of n streams, with and without the job.

    python -m quire_lab.benchmarks.train_beside [--seconds 180] [--n 8] [--output FILE.json]

One `quire serve` with the built-in model answers n streams at once, a batch of them after the other, and a job of
`/v1/fine_tuning/jobs` trains the same model at its default priority. Windows follow each other in the order stopped,
running, running, stopped: the job's process gets SIGSTOP and SIGCONT. Four windows make one pair, the inner
two beside the outer two.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from quire.bench.machine import describe_origin
from quire_lab.benchmarks.feed_cost import Connection, estimate
from quire_lab.benchmarks.serve_latency import serving

GOAL = 0.9
WINDOW, SETTLE, OUTPUT_TOKENS = 1.0, 0.25, 900
PATTERN = (False, True, True, False)


def start_job(url: str, folder: Path) -> int:
    """The pid of a job's process that trains already, and will for long."""
    words = ["river", "stone", "window", "paper", "garden", "winter", "harbour", "market", "letter", "bridge"]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Say {a} {b}."},
                {"role": "assistant", "content": f"{a} {b} " * 40},
            ]
        }
        for a in words
        for b in words
    ]
    data = "".join(json.dumps(chat) + "\n" for chat in chats).encode()
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as client:
        files = {"file": ("train.jsonl", data)}
        file_id = (
            client.post("/files", files=files, data={"purpose": "fine-tune"}).raise_for_status().json()["id"]
        )
        method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 50}}}
        model = client.get("/models").json()["data"][0]["id"]
        body = {"model": model, "training_file": file_id, "method": method}
        job = client.post("/fine_tuning/jobs", json=body).raise_for_status().json()
        path = folder / "fine_tuning" / job["id"] / "job.json"
        while True:
            events = client.get(f"/fine_tuning/jobs/{job['id']}/events").json()["data"]
            if any(event["type"] == "metrics" for event in events):
                return int(json.loads(path.read_text())["pid"])
            state = client.get(f"/fine_tuning/jobs/{job['id']}").json()
            if state["status"] in ("failed", "succeeded", "cancelled"):
                raise SystemExit(
                    f"the job ended before it was measured: {state['status']}, {state.get('error')}"
                )
            time.sleep(0.2)


async def batch(url: str, pid: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Windows of one batch, from the first token of all streams to the end of the first of them."""
    draw = random.Random(seed)
    fields = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    streams = [
        Connection(
            url, "/v1/completions", {"prompt": [draw.randint(100, 49_000) for _ in range(32)], **fields}
        )
        for _ in range(count)
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    while not all(stream.num_events for stream in streams):
        await asyncio.sleep(0.05)
    windows: list[dict[str, Any]] = []
    job = psutil.Process(pid)
    while not any(task.done() for task in tasks):
        trains = PATTERN[len(windows) % len(PATTERN)]
        os.kill(pid, signal.SIGCONT if trains else signal.SIGSTOP)
        await asyncio.sleep(SETTLE)
        begin, before, cpu = time.perf_counter(), sum(s.num_events for s in streams), sum(job.cpu_times()[:2])
        await asyncio.sleep(WINDOW - SETTLE)
        seconds = time.perf_counter() - begin
        tokens = sum(stream.num_events for stream in streams) - before
        used = (sum(job.cpu_times()[:2]) - cpu) / seconds
        windows.append({"trains": trains, "tokens_per_second": tokens / seconds, "job_cores": used})
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*tasks)
    return windows[:-1]  # streams ended in the last one


def shares(batches: list[list[dict[str, Any]]]) -> list[float]:
    """Tokens per second of each four windows: the inner two, beside the job, over the outer two.

    A step's time t grows by as much with every token, so t * dt is constant in time and t squared grows steadily.
    """
    ratios = []
    for windows in batches:
        for at in range(0, len(windows) - len(PATTERN) + 1, len(PATTERN)):
            speeds = [each["tokens_per_second"] for each in windows[at : at + len(PATTERN)]]
            if min(speeds) > 0:
                first, second, third, last = (speed**-2 for speed in speeds)
                ratios.append(((first + last) / (second + third)) ** 0.5)
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="after which no batch begins")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--output", type=Path, help="a file for the record")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--enable-lora --data-dir {folder} --no-embeddings"
        with serving("builtin", str(Path(__file__).parents[2]), flags) as server:
            pid = start_job(server.url, Path(folder))
            deadline, batches = time.monotonic() + options.seconds, []
            while not batches or time.monotonic() < deadline:
                batches.append(asyncio.run(batch(server.url, pid, options.n, len(batches))))
            psutil.Process(pid).kill()
    share = estimate(shares(batches))
    low, high = share["interval"]
    print(
        f"{options.n} streams beside a job: {share['share']:.1%} of the tokens per second ({low:.1%} to {high:.1%})"
    )
    if options.output:
        settings = {"n": options.n, "window_seconds": WINDOW, "goal": GOAL}
        record = {**describe_origin(), "settings": settings, **share, "batches": batches}
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    return share["share"] < GOAL


if __name__ == "__main__":
    sys.exit(main())
