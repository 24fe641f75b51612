"""Adapters come and go while they serve, for thousands of requests.

    python -m quire_lab.benchmarks.adapter_soak --output FILE

The built-in model in a pool that is always too small; adapters of ranks 4 to 64 from files are loaded, unloaded, loaded
again under the same name, evicted and served at random, and some requests are aborted. Every page is counted often.
At the end all blocks are free, and from the run's third quarter to its last the process's own memory has not grown by
more than GROWTH bytes a request.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.errors import AdapterError
from quire.core.request import Request
from quire_lab.benchmarks.leaks import GROWTH, POINTS, OwnMemory
from quire_lab.benchmarks.lora_cpu import write_adapters

ADAPTERS, RUNNING, LIVE = 48, 16, 40
POOL_BLOCKS, HOST_BYTES = 150, 24 << 20
LOAD, UNLOAD, ABORT, COUNT = 0.3, 0.2, 0.1, 0.05  # how often in a step


class Soak:
    def __init__(self, llm: LLM, num_requests: int, seed: int) -> None:
        self._engine, self._num_requests = llm.engine, num_requests
        self._random = random.Random(seed)
        self._names: set[str] = set()  # loaded, or being loaded
        self._live: set[str] = set()
        self._num_sent = 0
        self.counts = dict.fromkeys(
            ("loads", "unloads", "aborts", "integrity_checks", "answers", "refused", "tokens"), 0
        )
        self.own = OwnMemory()

    def run(self) -> None:
        with tqdm(total=self._num_requests, unit="req", file=sys.stderr) as bar:
            while self._num_sent < self._num_requests or self._engine.has_work:
                self._disturb()
                self._send()
                for update in self._engine.step():
                    self.counts["tokens"] += len(update.token_ids)
                    if update.finish_reason is not None:
                        self._live.discard(update.request_id)
                        self.counts["refused" if update.error else "answers"] += 1
                bar.update(self._num_sent - bar.n)
                if self._num_sent * POINTS // self._num_requests > self.own.num_points:
                    self.own.note(self._num_sent)
        for name in sorted(self._names):
            self._engine.adapters.remove(name)
        self._engine.check_integrity()

    def _disturb(self) -> None:
        drawn, engine = self._random, self._engine
        if drawn.random() < LOAD:
            name = f"mine-{drawn.randrange(ADAPTERS)}"
            engine.adapters.load(name, f"adapter-{drawn.randrange(ADAPTERS)}")
            self._names.add(name)
            self.counts["loads"] += 1
        if drawn.random() < UNLOAD and self._names:
            name = drawn.choice(sorted(self._names))
            self._names.remove(name)
            engine.adapters.remove(name)
            self.counts["unloads"] += 1
        if drawn.random() < ABORT and self._live:
            request = drawn.choice(sorted(self._live))
            self._live.remove(request)
            self.counts["aborts"] += bool(engine.abort(request))
        if drawn.random() < COUNT:
            engine.check_integrity()
            self.counts["integrity_checks"] += 1

    def _send(self) -> None:
        while self._num_sent < self._num_requests and len(self._live) < LIVE:
            prompt = [self._random.randrange(100, 40_000) for _ in range(self._random.randrange(1, 30))]
            sampling = SamplingParams(temperature=0, max_tokens=self._random.randrange(1, 8), ignore_eos=True)
            name = self._random.choice([None, *sorted(self._names)])
            request = str(self._num_sent)
            self._num_sent += 1
            try:
                self._engine.add(Request(request, prompt, sampling, adapter=name))
            except AdapterError:  # it is being loaded for the first time
                self.counts["refused"] += 1
                continue
            self._live.add(request)


def measure(num_requests: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), ADAPTERS, ADAPTERS)
        began = time.perf_counter()
        with LLM(
            use_tqdm=False, max_num_seqs=RUNNING, max_model_len=512, num_blocks=POOL_BLOCKS, lora_dir=folder,
            max_cpu_lora_bytes=HOST_BYTES,
        ) as llm:  # fmt: skip
            soak = Soak(llm, num_requests, seed)
            soak.run()
            engine, pages = llm.engine, llm.engine.memory.adapter_pages
            left = {
                "blocks_not_free": engine.memory.num_blocks - engine.memory.num_free,
                "adapters_in_use": pages.num_in_use,
                "requests": len(engine.adapters.stats().running) + len(engine.adapters.stats().waiting),
            }
            stats = engine.adapters.stats()
    return {
        "requests": num_requests,
        "seconds": round(time.perf_counter() - began, 1),
        **soak.counts,
        "reads": stats.num_reads,
        "evictions": stats.num_evictions,
        "preemptions": engine.scheduler.stats.num_preemptions,
        "left": left,
        **soak.own.record(),
        "pool_blocks": POOL_BLOCKS,
        "host_mb": HOST_BYTES >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    if options.requests < POINTS * LIVE:
        parser.error(f"--requests: at least {POINTS * LIVE}, memory is noted {POINTS} times along the way")
    record = {**describe_origin(), **measure(options.requests, options.seed)}
    if options.output:
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key not in ("machine", "versions")}))
    if any(record["left"].values()):
        sys.exit("something was left behind")
    if record["has_grown"]:
        sys.exit(f"memory grew by more than {GROWTH} bytes a request")


if __name__ == "__main__":
    main()
