"""What every worker shares: the prompts, the clock, the counting, the one line of JSON.

A worker is a process that loads one engine, warms it up, measures it at one number of requests and ends.
This file runs under both environments (Quire's and the peers'), so it needs the standard library only.
"""

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# Ids below are special tokens, ids above may not exist in a smaller vocabulary than SmolLM2's 49152.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 49_000
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What one worker is asked to measure."""

    model: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    threads: int
    repeats: int
    spawned_at: float  # the parent's time.time() just before it started this process
    options: dict[str, str]


class Engine(Protocol):
    """An engine that is ready: it answers a batch and says how it was set up."""

    versions: dict[str, str]
    settings: dict[str, Any]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        """Greedy, EOS ignored, all prompts at once; returns how many tokens each answer has."""
        ...


def prompts_of(job: WorkerJob, seed: int) -> list[list[int]]:
    """The same prompts in every engine, and other ones for every seed, so that no cache could help."""
    chance = random.Random(seed)
    ids = range(job.num_requests)
    return [[chance.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(job.prompt_tokens)] for _ in ids]


def timed(engine: Engine, job: WorkerJob, seed: int, max_tokens: int) -> float:
    """Seconds from handing over the batch to having every answer; every answer must be of full length."""
    prompts = prompts_of(job, seed)
    begin = time.perf_counter()
    counts = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - begin
    if counts != [max_tokens] * job.num_requests:
        raise RuntimeError(f"asked {job.num_requests} times for {max_tokens} tokens, got {counts}")
    return seconds


def cpu_seconds_of_all() -> float | None:
    """CPU time that everything on this machine has used so far, or None where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(field) for field in stat.readline().split()[1:]]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def peak_rss_mb() -> float:
    """This process's own peak. ru_maxrss would do, but on Linux it starts at the parent's size."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kib = peak // 1024 if sys.platform == "darwin" else peak
    return kib / 1024


def measure(engine: Engine, job: WorkerJob) -> dict[str, Any]:
    """Prefill, decode and end-to-end rates, as the docstring of compare_cpu.py defines them."""
    timed(engine, job, seed=0, max_tokens=WARM_UP_TOKENS)
    all_before, own_before, begin = cpu_seconds_of_all(), sum(os.times()[:4]), time.perf_counter()
    one_token, full = [], []
    for repeat in range(job.repeats):
        one_token.append(timed(engine, job, 2 * repeat + 1, max_tokens=1))
        full.append(timed(engine, job, 2 * repeat + 2, job.output_tokens))
    elapsed = time.perf_counter() - begin
    all_after, own_after = cpu_seconds_of_all(), sum(os.times()[:4])
    others = None
    if all_before is not None and all_after is not None:
        others = max(0.0, (all_after - all_before) - (own_after - own_before)) / elapsed
    # The fastest of each: a disturbance makes a run slower, never faster.
    first, whole, count = min(one_token), min(full), job.num_requests
    later = count * (job.output_tokens - 1)
    return {
        "prefill_tok_s": count * job.prompt_tokens / first,
        # A run that was disturbed enough to end before its own first token has no decode rate.
        "decode_tok_s": later / (whole - first) if whole > first else None,
        "e2e_tok_s": count * job.output_tokens / whole,
        "seconds_one_token": one_token,
        "seconds_full": full,
        "cores_used_by_others": others,
    }


def parse_job() -> WorkerJob:
    """The job from the command line, which compare_cpu.py writes as one JSON argument."""
    parser = argparse.ArgumentParser(description="one worker of compare_cpu.py; started by it")
    parser.add_argument("job", help="a WorkerJob as JSON")
    return WorkerJob(**json.loads(parser.parse_args().job))


def run_worker(start: Callable[[WorkerJob], Engine]) -> None:
    """Starts the engine, measures it and prints the result as one line of JSON on stdout."""
    # Engines print what they like, also from C++: all of it goes to stderr, stdout stays ours.
    result_fd = os.dup(1)
    os.dup2(2, 1)
    job = parse_job()
    engine = start(job)
    start_seconds = time.time() - job.spawned_at
    result = measure(engine, job)
    result |= {"start_s": start_seconds, "peak_rss_mb": peak_rss_mb()}
    result |= {"versions": engine.versions, "settings": engine.settings}
    os.write(result_fd, (json.dumps(result) + "\n").encode())
