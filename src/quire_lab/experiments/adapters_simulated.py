"""The simulated part of `adapters`: S-LoRA's own setting, llama-7b on an A100 with up to thousands of adapters.

"S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (Sheng et al., 2023): adapters on q, k, v and o, all in host
memory at the start; requests of 8 to 512 tokens in and out, Poisson arrivals, adapters drawn by a power law; a request
is in time when its first token comes within 6 s.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.arrivals import arrival_times
from quire.bench.lengths import Lengths
from quire_lab.experiments.adapter_files import draw
from quire_lab.experiments.experiment import Setup, Size
from quire_lab.experiments.simulated import build_simulated, side_by_side, simulated_settings
from quire_lab.replay import Arrival, Replay

BASE: dict[str, Any] = {"model": "llama-7b", "device": "simulated:a100-80g", "enable_prefix_caching": False}
SMALLER = "simulated:a100-40g"  # where memory is what there is too little of
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MODES: dict[str, dict[str, Any]] = {
    "unified": {},
    "separate": {"lora_memory": "separate"},
    "merge": {"lora_mode": "merge"},
    "merge, static": {"lora_mode": "merge", "batching": "static", "batch_size": 32},
}
MERGING = ("merge", "merge, static")
COUNTS = (5, 100, 1000, 2000)
FEW = (5, 100)  # adapters that PEFT's published figures have
ONE_RANK, MIXED = (8,), (64, 32, 16, 8)
RATE = 10.0  # requests per second
IN_TIME = 6.0  # seconds to a first token
SHORTEST, LONGEST = 8, 512  # tokens, in and out
# Requests per second on one A100-80G at this rate, by ranks and number of adapters: the paper's table of throughputs,
# from the results that its authors published with their code
PUBLISHED: dict[str, dict[tuple[int, ...], dict[int, float]]] = {
    "S-LoRA": {
        ONE_RANK: {5: 8.05, 100: 7.99, 1000: 7.64, 2000: 7.61},
        MIXED: {5: 7.48, 100: 7.29, 1000: 6.69, 2000: 6.73},
    },
    "PEFT": {ONE_RANK: {5: 0.88, 100: 0.25}, MIXED: {5: 0.87, 100: 0.24}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation."""

    mode: str
    num_adapters: int
    ranks: tuple[int, ...]
    rate: float = RATE  # infinite: all at once
    exponent: float = 1.0  # of the power law that adapters are drawn by
    device: str | None = None  # None: the experiment's own


@dataclass(frozen=True, slots=True)
class Simulated:
    case: Case
    requests_per_second: float
    tokens_per_second: float
    first_token: float  # seconds, mean
    attained: float  # share of requests whose first token was in time
    mean_running: float
    loads: int  # into pages
    evictions: int
    num_preemptions: int

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        case = found.pop("case")
        case["rate"] = "inf" if math.isinf(self.case.rate) else self.case.rate
        return {**case, **found}


@dataclass(frozen=True, slots=True)
class Job:
    case: Case
    settings: Mapping[str, Any]
    num_requests: int
    seed: int


def simulate_adapters(setup: Setup) -> tuple[list[Simulated], dict[str, Any], tuple[int, int]]:
    """What came of every case, the engine's settings, and how many requests each had, batched and merged.

    Merging has more than it can do from the first second on and takes the longest to simulate: it gets fewer requests.
    """
    settings = simulated_settings(setup, BASE)
    counts = setup.pick((30, 10), (600, 150), (1200, 600))
    jobs = [Job(case, settings, counts[case.mode in MERGING], setup.seed) for case in cases(setup.size)]
    with setup.progress(len(jobs), "simulated runs") as bar:
        return side_by_side(setup, simulate, jobs, bar), settings, counts


def cases(size: Size) -> Iterator[Case]:
    counts = COUNTS[1::2] if size is Size.QUICK else COUNTS
    mixes = (MIXED,) if size is Size.QUICK else (ONE_RANK, MIXED)
    for ranks in mixes:
        for num_adapters in counts:
            for mode in MODES:
                if mode != "merge, static" or num_adapters in FEW:
                    yield Case(mode, num_adapters, ranks)
            for mode in ("unified", "separate"):
                yield Case(mode, num_adapters, ranks, rate=math.inf)
    for mode in ("unified", "separate"):
        for num_adapters in FEW[1:] if size is Size.QUICK else COUNTS[1::2]:
            yield Case(mode, num_adapters, MIXED, rate=math.inf, device=SMALLER)
        for exponent in () if size is Size.QUICK else (0.0, 0.5, 2.0):
            yield Case(mode, COUNTS[-1], MIXED, exponent=exponent)


def simulate(job: Job) -> Simulated:
    case = job.case
    device = {} if case.device is None else {"device": case.device}
    built = build_simulated({**job.settings, **MODES[case.mode], **device, "enable_lora": True})
    engine = built.engine
    assert engine.adapters is not None
    names = [f"adapter-{index}" for index in range(case.num_adapters)]
    for index, name in enumerate(names):
        rank = case.ranks[index % len(case.ranks)]
        engine.adapters.add(name, {}, {"r": rank, "target_modules": TARGETS})
    replayed = Replay(built, _arrivals(case, names, job.num_requests, job.seed)).run()
    engine.check_integrity()
    waits = [one.time_to_first for one in replayed.served]
    stats = engine.memory.adapter_pages.stats
    return Simulated(
        case,
        len(replayed.served) / replayed.seconds,
        replayed.output_rate,
        sum(waits) / len(waits),
        sum(wait <= IN_TIME for wait in waits) / len(waits),
        replayed.waiting.mean or replayed.arriving.mean,
        stats.num_loads,
        stats.num_evictions,
        replayed.num_preemptions,
    )


def _arrivals(case: Case, names: Sequence[str], count: int, seed: int) -> list[Arrival]:
    chance = random.Random(f"lengths {seed}")
    times = arrival_times(count, case.rate, 1.0, random.Random(f"arrivals {seed}"))
    drawn = draw(list(names), count, case.exponent, seed)
    return [
        Arrival(at, Lengths(chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST)), name)
        for at, name in zip(times, drawn, strict=True)
    ]
