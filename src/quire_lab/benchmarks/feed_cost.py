"""What the engine's feed costs: tokens per second of n streams with three listeners, beside none.

    python -m quire_lab.benchmarks.feed_cost [--rounds 6] [--n 64] [--output FILE.json]

How it is measured:
- One `quire serve` with the built-in model answers n streams of 128 prompt tokens and 64 greedy tokens, as
  http_overhead does; a round measures them with three listeners and without, the other order each time.
- A listener is `curl`, which reads and drops: a page does its drawing on another machine.
- Tokens per second are from the first request sent to the last stream's end, less the load generator's own CPU time.
- The share is the median of the rounds' ratios. `bytes_per_second` and `records_per_second` are of one listener.
- `record_milliseconds` is the time that an engine needs for one record with that many sequences that all advance, on
  a simulated device: the engine thread does nothing else meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_machine, describe_versions
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.kernels import native
from quire.link.feed import EngineFeed
from quire_lab.benchmarks.http_overhead import OUTPUT_TOKENS, Served

LISTENERS = 3
GOAL = 0.99
SEQUENCES = (64, 256, 512)


class Listeners:
    """Three of them, as long as the context lasts; `sizes` has the bytes of one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.records = self.bytes = 0

    def __enter__(self) -> "Listeners":
        self._file = tempfile.TemporaryFile()
        command = ["curl", "-sN", f"{self._url}/v1/engine/events"]
        outputs: list[Any] = [self._file, *[subprocess.DEVNULL] * (LISTENERS - 1)]
        self._processes = [subprocess.Popen(command, stdout=output) for output in outputs]
        time.sleep(0.5)  # the first record is whole
        self._start = self._file.seek(0, 2)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        self._file.seek(self._start)
        data = self._file.read()
        self.records, self.bytes = data.count(b"data: "), len(data)
        self._file.close()


def served_round(served: Served, seed: int, listens: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if listens:
        with Listeners(served.url) as listeners:
            measured = served.run(seed)
        result = {
            "records_per_second": listeners.records / measured["seconds"],
            "bytes_per_second": listeners.bytes / measured["seconds"],
        }
    else:
        measured = served.run(seed)
    seconds = measured["seconds"] - measured["generator_cpu"]
    return {"seconds": seconds, "texts": measured["texts"], **result}


def run_rounds(served: Served, count: int, rounds: int) -> list[dict[str, Any]]:
    served.run(0)
    done = []
    for number in range(rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        results = {listens: served_round(served, 100 + number, listens) for listens in order}
        if results[True].pop("texts") != results[False].pop("texts"):
            raise SystemExit("the answers differ")
        rates = {listens: count * OUTPUT_TOKENS / results[listens]["seconds"] for listens in order}
        done.append(
            {
                **results[True],
                "without": rates[False],
                "with": rates[True],
                "share": rates[True] / rates[False],
            }
        )
        print(
            f"round {number + 1}: {rates[False]:.1f} tokens/s, with listeners {rates[True]:.1f}",
            file=sys.stderr,
        )
    return done


def record_milliseconds(count: int) -> float:
    """The median time of a record; each sequence has advanced by four tokens since the last."""
    from quire.core.config import EngineConfig
    from quire.engine.build import build_engine

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
        begin = time.perf_counter()
        feed.record(begin)
        times.append(time.perf_counter() - begin)
    engine.close()
    return 1e3 * statistics.median(times[20:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/feed_cost.json"))
    arguments = parser.parse_args()
    served = Served(arguments.n, native.default_num_threads(), "--max-num-seqs", str(arguments.n))
    try:
        rounds = run_rounds(served, arguments.n, arguments.rounds)
    finally:
        served.close()
    share = statistics.median(each["share"] for each in rounds)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"n": arguments.n, "output_tokens": OUTPUT_TOKENS, "listeners": LISTENERS},
        "share": share,
        "record_milliseconds": {str(count): record_milliseconds(count) for count in SEQUENCES},
        "rounds": rounds,
    }
    print(
        f"{LISTENERS} listeners, {arguments.n} streams: {share:.1%} of the tokens per second (goal: {GOAL:.0%})"
    )
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
