"""What the simulated experiments share: the papers' setting, policies by name, workloads, and runs side by side."""

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from quire.bench.workload import Lengths, arrival_times
from quire.core.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine.build import Built, build
from quire.engine.build.resolve import is_simulated
from quire_lab.measure.replay import Arrival, Replay, Replayed, plain
from quire_lab.measure.sharing import sampling_for
from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Bar, Setup, Size
from quire_lab.simulate.devices import find_device

# OPT-13B on one A100-40G, 12 GiB of KV: "Efficient Memory Management for Large Language Model Serving with
# PagedAttention" (Kwon et al., 2023), table 1
PAPER: dict[str, Any] = {
    "model": "opt-13b",
    "device": "simulated:a100-40g",
    "kv_cache_memory_bytes": 12 << 30,
    "enable_prefix_caching": False,
}
BATCH_SIZE = 32  # of static and dynamic batches over paged memory
POLICIES: dict[str, dict[str, Any]] = {
    "paged": {},
    "oracle": {"reservation": "oracle"},
    "pow2": {"reservation": "pow2"},
    "max": {"reservation": "max"},
    # FasterTransformer's: request-level batches, as large as memory reserved to the maximum allows
    "ft": {"reservation": "max", "batching": "static"},
    "static": {"batching": "static", "batch_size": BATCH_SIZE},
    "dynamic": {"batching": "dynamic", "batch_size": BATCH_SIZE},
}
RESERVATIONS = ("max", "pow2", "oracle", "paged")
CHAT_PROMPT = 1024  # tokens of a conversation that are kept, as in the paper's chatbot
CHAT_TURNS = 8
J = TypeVar("J")
R = TypeVar("R")


def simulated_settings(setup: Setup, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment's own setting. Engine settings of the user count where he simulates as well."""
    device = str(setup.engine.get("device", ""))
    return {**defaults, **setup.engine} if is_simulated(device) else dict(defaults)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by their lengths, and where those come from in words."""

    name: str
    source: str
    lengths: Sequence[Lengths]

    @property
    def in_words(self) -> str:
        count = len(self.lengths)
        prompt = sum(one.num_prompt_tokens for one in self.lengths) / count
        output = sum(one.num_output_tokens for one in self.lengths) / count
        return f"{self.source}; {count:,} of them, {prompt:.0f} tokens in and {output:.0f} out on the average"


def workload(name: str, data: DataFolder, count: int, seed: int) -> Workload:
    """`sharegpt`, `alpaca`, or `chatbot`: ShareGPT's turns with the history before them."""
    if name != "chatbot":
        drawn = data.lengths(name, count, seed)
        return Workload(name, drawn.source, drawn.lengths)
    drawn = data.lengths("sharegpt", count, seed)
    source = (
        f"chatbot: conversations of 1 to {CHAT_TURNS} turns with the lengths of {drawn.source}, of which each prompt "
        f"holds the last {CHAT_PROMPT} tokens"
    )
    return Workload(name, source, _conversations(drawn.lengths, seed))


def _conversations(turns: Sequence[Lengths], seed: int) -> list[Lengths]:
    chance = random.Random(f"turns {seed}")
    conversations: list[Lengths] = []
    history = num_left = 0
    for turn in turns:
        if not num_left:
            history, num_left = 0, chance.randint(1, CHAT_TURNS)
        prompt = min(CHAT_PROMPT, history + turn.num_prompt_tokens)
        conversations.append(Lengths(prompt, min(turn.num_output_tokens, CHAT_PROMPT)))
        history += turn.total
        num_left -= 1
    chance.shuffle(conversations)  # conversations run beside each other
    return conversations


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. `rate` in requests per second; infinite: all at once."""

    settings: Mapping[str, Any]
    lengths: Sequence[Lengths]
    rate: float
    seed: int
    method: str = "one"  # or parallel or beam
    width: int = 1


@dataclass(frozen=True, slots=True)
class Point:
    """What one simulation showed."""

    rate: float
    normalised: float  # mean seconds per output token, from arrival to the last
    mean_running: float  # requests, until the last one came
    mean_full: float  # the same while requests waited, so that memory or rows set the batch
    capacity: float  # requests per second that are served while requests wait
    output_rate: float  # tokens per second
    num_preemptions: int
    num_refused: int
    num_steps: int
    seconds: float  # virtual


def simulate(run: Run) -> Point:
    """The same run gives the same point."""
    replay = replayed(run)
    return Point(
        rate=run.rate,
        normalised=replay.normalised,
        mean_running=replay.arriving.mean,
        mean_full=replay.waiting.mean,
        capacity=replay.capacity,
        output_rate=replay.output_rate,
        num_preemptions=replay.num_preemptions,
        num_refused=replay.num_refused,
        num_steps=replay.num_steps,
        seconds=replay.seconds,
    )


def replayed(run: Run) -> Replayed:
    built = build_simulated(run.settings)
    times = arrival_times(len(run.lengths), run.rate, 1.0, random.Random(f"arrivals {run.seed}"))
    arrivals = [Arrival(at, lengths) for at, lengths in zip(times, run.lengths, strict=True)]
    return Replay(built, arrivals, _sampling(run)).run()


def build_simulated(settings: Mapping[str, Any]) -> Built:
    return build(EngineConfig.of(**settings))


def _sampling(run: Run) -> Callable[[int], SamplingParams]:
    if run.method == "one":
        return plain
    return lambda num_tokens: sampling_for(run.method, run.width, num_tokens)


def side_by_side(setup: Setup, work: Callable[[J], R], jobs: Sequence[J], bar: Bar) -> list[R]:
    """Results in the order of the jobs. Each core takes the next one; a quick look starts no processes."""
    num_workers = min(os.cpu_count() or 1, len(jobs))
    if setup.size is Size.QUICK or num_workers == 1:
        return list(_in_turn(work, jobs, bar))
    results: dict[int, R] = {}
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            bar()
    return [results[index] for index in range(len(jobs))]


def _in_turn(work: Callable[[J], R], jobs: Sequence[J], bar: Bar) -> Iterator[R]:
    for job in jobs:
        yield work(job)
        bar()


def basis(settings: Mapping[str, Any]) -> list[str]:
    """The notes under every simulated figure: what was simulated, and on what ground."""
    device = find_device(str(settings["device"]))
    fit = device.fit
    derived = (
        f"{device.title} was not measured: its data sheet ({device.source}) with the factors fitted on {fit['on']}"
        if device.derived_from
        else f"{device.title}: factors fitted on {fit['on']}"
    )
    error = (
        f"{derived}, {fit['num_samples']:.0f} samples measured {fit['measured']}; relative error held out: median "
        f"{fit['held_out_median_error']:.0%}, p90 {fit['held_out_p90_error']:.0%}"
    )
    if "checked_median_error" in fit:
        error += f"; whole runs that it was not fitted to: median {fit['checked_median_error']:.0%}"
    return [
        f"simulated: {settings['model']} on {device.in_words}; scheduler and memory are real, times are charged",
        error,
        "no cost factor was fitted to a published figure: where they differ, they differ",
    ]


def in_rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.3g}"
