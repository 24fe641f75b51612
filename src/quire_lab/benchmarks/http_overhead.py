"""What HTTP with streaming adds to the offline engine's time for the same work, n requests at once.

    python -m quire_lab.benchmarks.http_overhead [--rounds 9] [--n 32] [--threads N] [--output FILE.json]

How it is measured:
- Offline is `LLM.generate` in a process of its own; served is `quire serve` with every answer streamed to this process,
  the load generator. Both engines have the same settings and thread counts, the built-in model in int8.
- The work is the same: n prompts of 128 random token ids, 64 greedy tokens each, EOS ignored, other prompts in each
  round; answers are compared, token counts too.
- A round measures both, one after the other, the other order each time, while the other engine idles.
- Served time is from the first request sent to the last stream's end, less the load generator's own CPU time in that
  span (its getrusage): on a machine of its own it would cost the server nothing.
- The overhead is the median of the rounds' ratios; both medians are given as well. `cores_used_by_others` is CPU time
  that processes outside this benchmark took meanwhile: above 0.1 the results are doubtful, and a warning says so.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.bench.http_client import HttpClient
from quire.bench.machine import describe_machine, describe_versions
from quire.bench.serve import Outcome, StreamedCall, make_call
from quire.kernels import native

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 49_000
GOAL = 1.10
TICKS = os.sysconf("SC_CLK_TCK")


def prompts_of(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(PROMPT_TOKENS)] for _ in range(count)
    ]


# ---------------------------------------------------------------------- offline


def offline_worker(count: int, threads: int) -> None:
    """Reads a seed a line, answers with the seconds and the texts: the process that has the engine inside."""
    from quire import LLM, SamplingParams

    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with LLM(num_threads=threads, kv_cache_memory_bytes=512 << 20, use_tqdm=False) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for line in sys.stdin:
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(count, int(line))]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            seconds = time.perf_counter() - begin
            print(
                json.dumps({"seconds": seconds, "texts": [output.outputs[0].text for output in outputs]}),
                file=result,
            )
            result.flush()


class Offline:
    def __init__(self, count: int, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "quire_lab.benchmarks.http_overhead",
            "--n",
            str(count),
            "--threads",
            str(threads),
            "--offline-worker",
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids = (self._process.pid,)

    def run(self, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


# ---------------------------------------------------------------------- served


class Served:
    def __init__(self, count: int, threads: int, *flags: str) -> None:
        self._count = count
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--num-threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--kv-cache-memory-bytes", "512M", *flags], stderr=subprocess.PIPE, text=True
        )
        self.url = self._wait()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        workers = [int(p) for p in children if "quire.link.worker" in Path(f"/proc/{p}/cmdline").read_text()]
        self.pids = (self._process.pid, *workers)

    def _wait(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"serving\s+(\S+)/v1", line):
                return found[1]
        raise SystemExit("the server did not start")

    def run(self, seed: int) -> dict[str, Any]:
        outcomes, seconds, cpu = asyncio.run(self._ask(seed))
        wrong = [one.error for one in outcomes if one.error is not None]
        counts = {one.num_output_tokens for one in outcomes}
        if wrong or counts != {OUTPUT_TOKENS}:
            raise SystemExit(f"not every answer is complete: {wrong[:3]}, tokens {counts}")
        return {"seconds": seconds, "generator_cpu": cpu, "texts": [one.text for one in outcomes]}

    async def _ask(self, seed: int) -> tuple[list[Outcome], float, float]:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        greedy = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        calls = [
            StreamedCall("/v1/completions", {"prompt": prompt, **greedy, **stream})
            for prompt in prompts_of(self._count, seed)
        ]
        client = HttpClient(self.url)
        cpu, begin = cpu_seconds_here(), time.perf_counter()
        outcomes = await asyncio.gather(*(make_call(client, call) for call in calls))
        seconds, cpu = time.perf_counter() - begin, cpu_seconds_here() - cpu
        await client.close()
        return outcomes, seconds, cpu

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


# ---------------------------------------------------------------------- clocks


def cpu_seconds_here() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cpu_seconds_of_all() -> float:
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS


def measured(one: Offline | Served, seed: int) -> dict[str, Any]:
    """A run, with what it and everyone else took of the CPU."""
    before, all_before, here = [cpu_seconds_of(p) for p in one.pids], cpu_seconds_of_all(), cpu_seconds_here()
    begin = time.perf_counter()
    found = one.run(seed)
    elapsed = time.perf_counter() - begin
    own = [cpu_seconds_of(pid) - start for pid, start in zip(one.pids, before, strict=True)]
    others = cpu_seconds_of_all() - all_before - sum(own) - (cpu_seconds_here() - here)
    return {**found, "cpu_seconds": own, "cores_used_by_others": max(0.0, others) / elapsed}


# ---------------------------------------------------------------------- rounds


def run_rounds(offline: Offline, served: Served, rounds: int) -> list[dict[str, Any]]:
    for seed in (0, 1):  # kernels are chosen, memory is touched, passes are recorded
        offline.run(seed)
        served.run(seed)
    rounds_done = []
    for number in range(rounds):
        pair = (offline, served) if number % 2 == 0 else (served, offline)
        results = {type(each).__name__.lower(): measured(each, 100 + number) for each in pair}
        off, on = results["offline"], results["served"]
        if off.pop("texts") != on.pop("texts"):
            raise SystemExit("the server's answers are not the offline engine's")
        on["seconds_without_generator"] = on["seconds"] - on["generator_cpu"]
        rounds_done.append({**results, "ratio": on["seconds_without_generator"] / off["seconds"]})
        print(
            f"round {number + 1}: offline {off['seconds']:.2f} s, served {on['seconds']:.2f} s "
            f"(generator {on['generator_cpu']:.2f} s, HTTP side {on['cpu_seconds'][0]:.2f} s of CPU): "
            f"{rounds_done[-1]['ratio'] - 1:+.1%}",
            file=sys.stderr,
        )
    return rounds_done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/http_overhead.json"))
    parser.add_argument("--offline-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline_worker:
        offline_worker(arguments.n, arguments.threads)
        return
    offline, served = Offline(arguments.n, arguments.threads), Served(arguments.n, arguments.threads)
    try:
        rounds = run_rounds(offline, served, arguments.rounds)
    finally:
        offline.close()
        served.close()
    report(arguments, rounds)


def report(arguments: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    ratio = statistics.median(each["ratio"] for each in rounds)
    offline = statistics.median(each["offline"]["seconds"] for each in rounds)
    served = statistics.median(each["served"]["seconds_without_generator"] for each in rounds)
    others = max(each[side]["cores_used_by_others"] for each in rounds for side in ("offline", "served"))
    print(
        f"n = {arguments.n}, {PROMPT_TOKENS} in, {OUTPUT_TOKENS} out, {arguments.threads} engine threads: offline "
        f"{offline:.2f} s, served {served:.2f} s, overhead {ratio - 1:+.1%} (goal: at most {GOAL - 1:.0%})"
    )
    if others > 0.1:
        print(f"warning: others used up to {others:.2f} cores meanwhile: the results are doubtful")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "n": arguments.n,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "engine_threads": arguments.threads,
        },
        "overhead": ratio - 1,
        "offline_seconds": offline,
        "served_seconds_without_generator": served,
        "max_cores_used_by_others": others,
        "rounds": rounds,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
