"""Nothing leaks: 10,000 short requests in a pool of a quarter of their demand, in every preemption mode.

usage: python -m quire_lab.benchmarks.leaks [--requests N] [--tiny] [--output FILE]

The real runner and kernels, on the built-in model, or with `--tiny` on a small one with random weights. A fixed number
of requests is open at any time: single answers, two samples, and beams; one in ten is aborted on its way. Each mode has
a process of its own. A request that is not aborted must get the tokens of a large pool; at the end every block must be
free, here and in host memory, the books must agree, and the process's own memory must not have grown from the
run's third quarter to its last by more than GROWTH bytes a request. It is noted twenty times, when
all requests so far are over, and after a warm-up with as many sequences as the engine runs at once.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
import zlib
from array import array
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin, resident_bytes
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.observe.heap import release_freed

# OwnMemory: how much of a process is its own, noted along a run, and whether that grows.

POINTS = 20  # of a run
NOISE = 1 << 20  # bytes from one quarter to the next, however few requests there are
GROWTH = 1024  # bytes a request that may be chance; a request that is left behind takes several times as much


class OwnMemory:
    """What was freed goes back to the system before each point: memory that waits to be used again is no leak."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, int]] = []  # requests so far, bytes

    @property
    def num_points(self) -> int:
        return len(self._noted)

    @property
    def last_mb(self) -> float:
        return self._noted[-1][1] / 1e6

    def note(self, num_requests: int) -> None:
        gc.collect()
        release_freed()
        self._noted.append((num_requests, resident_bytes().get("anonymous", 0)))

    def grown_per_request(self) -> float:
        """Bytes, from the run's third quarter to its last, by the medians of each: all was met before by then."""
        quarter = len(self._noted) // 4
        early, late = self._noted[-2 * quarter : -quarter], self._noted[-quarter:]
        (first, before), (last, after) = (
            map(statistics.median, zip(*part, strict=True)) for part in (early, late)
        )
        return (after - before) / (last - first)

    @property
    def has_grown(self) -> bool:
        grown = self.grown_per_request()
        return grown > GROWTH and grown * self._noted[-1][0] / 4 > NOISE

    def record(self) -> dict[str, Any]:
        return {
            "own_mb": [[requests, round(size / 1e6, 1)] for requests, size in self._noted],
            "grown_bytes_per_request": self.grown_per_request(),
            "has_grown": self.has_grown,
        }


LARGE = "recompute, large pool"
MODES = (LARGE, "recompute", "swap", "auto")
OPEN = 32  # requests that are in the engine at once
MAX_SEQUENCES = 64
BLOCK_SIZE = 4
PROMPT, OUTPUT = (4, 36), (2, 12)  # tokens, least and most
ABORTED = 0.1
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, the same in every mode."""

    prompt: list[int]
    sampling: SamplingParams
    aborted_after: int | None  # steps

    @property
    def num_blocks(self) -> int:
        """What it ends with, were nothing shared."""
        length = len(self.prompt) + (self.sampling.max_tokens or 0)
        return self.sampling.num_sequences * -(-length // BLOCK_SIZE)


def asked(number: int) -> Asked:
    chosen = random.Random(number)
    prompt = [chosen.randrange(10, 500) for _ in range(chosen.randint(*PROMPT))]
    kind: dict[str, Any] = chosen.choice([{}, {}, {}, {}, {"n": 2}, {"n": 2, "use_beam_search": True}])
    if "use_beam_search" not in kind:
        kind = {**kind, "temperature": 0.8, "seed": number}
    sampling = SamplingParams(max_tokens=chosen.randint(*OUTPUT), ignore_eos=True, **kind)
    return Asked(prompt, sampling, chosen.randrange(1, 12) if chosen.random() < ABORTED else None)


def demand() -> int:
    """Blocks that the open requests ask for together, on the average."""
    return round(OPEN * sum(asked(number).num_blocks for number in range(1000)) / 1000)


class Traffic:
    """Keeps requests open, aborts some, and remembers what each of the others was told."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self._engine, self._num_requests = engine, num_requests
        self._sent = self._step = 0
        self._open: dict[str, dict[int, list[int]]] = {}
        self._left: dict[str, int] = {}  # answers that are still to end
        self._aborts: dict[int, list[str]] = {}  # by step
        self.told = array("q", [-1]) * num_requests  # checksums; whole from the start, so that it never grows
        self.num_aborted = 0

    def run_until(self, num_sent: int) -> None:
        """Runs until `num_sent` requests were sent and all have finished."""
        while self._sent < num_sent or self._open:
            while self._sent < num_sent and len(self._open) < OPEN:
                self._send()
            for request_id in self._aborts.pop(self._step, ()):
                if request_id in self._open and self._engine.abort(request_id):
                    del self._open[request_id], self._left[request_id]
                    self.num_aborted += 1
            self._take()
            self._step += 1

    def _send(self) -> None:
        one, request_id = asked(self._sent), str(self._sent)
        self._engine.add(Request(request_id, one.prompt, one.sampling))
        self._open[request_id], self._left[request_id] = {}, one.sampling.num_answers
        if one.aborted_after is not None:
            self._aborts.setdefault(self._step + one.aborted_after, []).append(request_id)
        self._sent += 1

    def _take(self) -> None:
        for update in self._engine.step():
            answers = self._open.get(update.request_id)
            if answers is None:
                continue
            answers.setdefault(update.index, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self._left[update.request_id] -= 1
                if not self._left[update.request_id]:
                    text = json.dumps(sorted(self._open.pop(update.request_id).items()))
                    self.told[int(update.request_id)] = zlib.crc32(text.encode())
                    del self._left[update.request_id]


def warm_up(engine: Engine) -> None:
    """The largest batch there may be, and all smaller ones as it ends: memory for steps of every size is there then."""
    for number in range(MAX_SEQUENCES):
        sampling = SamplingParams(temperature=0, max_tokens=4 + number // 4, ignore_eos=True)
        engine.add(Request(f"warm-up-{number}", [10 + number] * 8, sampling))
    while engine.has_work:
        engine.step()


def measure(mode: str, num_requests: int, model: str | None) -> dict[str, Any]:
    blocks = 2 * demand() if mode == LARGE else demand() // 4
    settings: dict[str, Any] = {"load_format": "dummy"} if model else {}
    with LLM(
        model,
        use_tqdm=False,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQUENCES,
        max_model_len=128,
        preemption_mode=mode.split(",")[0],
        swap_space=0.25,
        **settings,
    ) as llm:
        engine, memory = llm.engine, llm.engine.memory
        warm_up(engine)
        before = replace(engine.scheduler.stats)
        traffic, own, started = Traffic(engine, num_requests), OwnMemory(), time.perf_counter()
        for number in range(1, POINTS + 1):
            num_sent = number * num_requests // POINTS
            traffic.run_until(num_sent)
            own.note(num_sent)
            took = time.perf_counter() - started
            print(f"{mode}: {num_sent} requests, {own.last_mb:.0f} MB of its own, {took:.0f} s", flush=True)
        engine.check_integrity()
        stats = engine.scheduler.stats
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "pool_blocks": blocks,
            **own.record(),
            "free_blocks_at_end": memory.num_free,
            "swap_blocks_at_end": memory.swap.hosts.num_used,
            "integrity": "checked",
            "aborted": traffic.num_aborted,
            "preemptions": stats.num_preemptions - before.num_preemptions,
            "swaps_out": stats.num_swaps_out - before.num_swaps_out,
            "swaps_in": stats.num_swaps_in - before.num_swaps_in,
            "told": traffic.told,
        }


def faults(name: str, record: dict[str, Any], large: Sequence[int]) -> list[str]:
    """What is wrong with a mode, in words."""
    pairs = zip(record["told"], large, strict=True)
    other = [number for number, (here, there) in enumerate(pairs) if min(here, there) >= 0 and here != there]
    words = [
        (bool(other), f"{len(other)} requests got other tokens than in a large pool, {other[:3]} among them"),
        (record["free_blocks_at_end"] != record["pool_blocks"], "blocks of the pool are not free at the end"),
        (record["swap_blocks_at_end"] != 0, "blocks of host memory are not free at the end"),
        (record["has_grown"], f"memory grew by more than {GROWTH} bytes a request"),
        (name != LARGE and not record["preemptions"], "no request was preempted: the run shows nothing"),
    ]
    return [text for wrong, text in words if wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.requests < POINTS:
        parser.error(f"--requests: at least {POINTS}, memory is noted as often")
    modes = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        for mode in MODES:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                modes[mode] = apart.submit(
                    measure, mode, options.requests, folder if options.tiny else None
                ).result()
    large = modes[MODES[0]]["told"]
    wrong = {name: faults(name, record, large) for name, record in modes.items()}
    for record in modes.values():
        record["compared"] = sum(min(pair) >= 0 for pair in zip(record.pop("told"), large, strict=True))
    result = {
        **describe_origin(),
        "model": "tiny, random weights" if options.tiny else "built-in",
        "requests": options.requests,
        "open_at_once": OPEN,
        "demand_blocks": demand(),
        "block_size": BLOCK_SIZE,
        "modes": modes,
        "faults": wrong,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({name: result[name] for name in ("model", "demand_blocks", "modes", "faults")}, indent=1)
    )
    if any(wrong.values()):
        raise SystemExit("something leaked or went wrong: see faults")


if __name__ == "__main__":
    main()
