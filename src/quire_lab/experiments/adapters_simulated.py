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

from quire.bench.workload import Lengths, arrival_times
from quire_lab.measure.replay import Arrival, Replay
from quire_lab.measure.simulated_runs import basis, build_simulated, side_by_side, simulated_settings
from quire_lab.report.experiment import Check, Finding, Setup, Size, Table
from quire_lab.report.figure import GREY, Picture, line_style, plain_log
from quire_lab.simulate.adapters import DISK_BANDWIDTH
from quire_lab.simulate.devices import find_device

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
FEW = (5, 100)  # adapters of PEFT's published numbers
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
class SimulatedCase:
    """One simulation."""

    mode: str
    num_adapters: int
    ranks: tuple[int, ...]
    rate: float = RATE  # infinite: all at once
    exponent: float = 1.0  # of the power law that adapters are drawn by
    device: str | None = None  # None: the experiment's own


@dataclass(frozen=True, slots=True)
class Simulated:
    case: SimulatedCase
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
class SimulatedJob:
    case: SimulatedCase
    settings: Mapping[str, Any]
    num_requests: int
    seed: int


def simulate_adapters(setup: Setup) -> tuple[list[Simulated], dict[str, Any], tuple[int, int]]:
    """What came of every case, the engine's settings, and how many requests each had, batched and merged.

    Merging has more than it can do from the first second on and takes the longest to simulate: it gets fewer requests.
    """
    settings = simulated_settings(setup, BASE)
    counts = setup.pick((30, 10), (600, 150), (1200, 600))
    jobs = [
        SimulatedJob(case, settings, counts[case.mode in MERGING], setup.seed) for case in cases(setup.size)
    ]
    with setup.progress(len(jobs), "simulated runs") as bar:
        return side_by_side(setup, simulate, jobs, bar), settings, counts


def cases(size: Size) -> Iterator[SimulatedCase]:
    counts = COUNTS[1::2] if size is Size.QUICK else COUNTS
    mixes = (MIXED,) if size is Size.QUICK else (ONE_RANK, MIXED)
    for ranks in mixes:
        for num_adapters in counts:
            for mode in MODES:
                if mode != "merge, static" or num_adapters in FEW:
                    yield SimulatedCase(mode, num_adapters, ranks)
            for mode in ("unified", "separate"):
                yield SimulatedCase(mode, num_adapters, ranks, rate=math.inf)
    for mode in ("unified", "separate"):
        for num_adapters in FEW[1:] if size is Size.QUICK else COUNTS[1::2]:
            yield SimulatedCase(mode, num_adapters, MIXED, rate=math.inf, device=SMALLER)
        for exponent in () if size is Size.QUICK else (0.0, 0.5, 2.0):
            yield SimulatedCase(mode, COUNTS[-1], MIXED, exponent=exponent)


def simulate(job: SimulatedJob) -> Simulated:
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
    waits = [request.time_to_first for request in replayed.served]
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


def _arrivals(case: SimulatedCase, names: Sequence[str], count: int, seed: int) -> list[Arrival]:
    chance = random.Random(f"lengths {seed}")
    times = arrival_times(count, case.rate, 1.0, random.Random(f"arrivals {seed}"))
    drawn = draw(list(names), count, case.exponent, seed)
    return [
        Arrival(at, Lengths(chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST)), name)
        for at, name in zip(times, drawn, strict=True)
    ]


def draw(names: list[str], count: int, exponent: float, seed: int) -> list[str]:
    """A name for each request: the i-th is drawn in proportion to i ** -exponent."""
    weights = [(place + 1) ** -exponent for place in range(len(names))]
    return random.Random(seed).choices(names, weights, k=count)


# What the simulated part of `adapters` found: tables, a picture, ratios beside the published ones.

SimulatedByCase = Mapping[SimulatedCase, Simulated]
COUNTERPART = {"unified": "S-LoRA", "merge, static": "PEFT"}  # the published system beside each mode
FLAT = 0.8  # of the throughput with few adapters: what is called flat here


def simulated_finding(
    setup: Setup, simulated: Sequence[Simulated], settings: Mapping[str, Any], num_requests: tuple[int, int]
) -> Finding:
    by_case = {run.case: run for run in simulated}
    counts = sorted({case.num_adapters for case in by_case if case.rate == RATE})
    few, many = (by_case[SimulatedCase("unified", count, MIXED)] for count in (counts[0], counts[-1]))
    merged = by_case[SimulatedCase("merge", counts[-1], MIXED)]
    flat = many.requests_per_second / few.requests_per_second
    times = many.requests_per_second / merged.requests_per_second
    where = f"{settings['model']} on {find_device(str(settings['device'])).title}, simulated"
    take_away = (
        f"{where}: {many.case.num_adapters:,} adapters are served at {flat:.0%} of the throughput of "
        f"{few.case.num_adapters} (published: 90 to 95 % of 5), {times:.0f} × as much as by merging one after another "
        "(published, over PEFT: up to 30 ×)."
    )
    return Finding(
        take_away,
        [_at_rate(by_case), _at_once(by_case), _ratios(by_case, counts), *_skew(by_case)],
        [_picture(by_case, counts, where)],
        {"runs": [run.as_dict() for run in simulated]},
        {"seed": setup.seed, "engine": dict(settings), "num_requests": num_requests},
        [
            Check(
                f"simulated: throughput stays nearly flat, {FLAT:.0%} or more from {counts[0]} adapters to "
                f"{counts[-1]:,}",
                f"{few.requests_per_second:.2f} and {many.requests_per_second:.2f} requests a second",
                flat >= FLAT,
            ),
            Check(
                "simulated: batched adapters serve more than merged ones, however many there are",
                f"{times:.0f} × with {counts[-1]:,}",
                all(
                    run.requests_per_second
                    > by_case[SimulatedCase("merge", case.num_adapters, case.ranks)].requests_per_second
                    for case, run in by_case.items()
                    if case == SimulatedCase("unified", case.num_adapters, case.ranks)
                ),
            ),
        ],
        [*basis(settings), *_notes(settings, num_requests)],
    )


def _notes(settings: Mapping[str, Any], num_requests: tuple[int, int]) -> list[str]:
    fit = find_device(str(settings["device"])).lora_fit
    fitted = (
        f"products of adapters: four factors fitted on {fit['on']} to {fit['num_samples']} shapes of their kernels; "
        f"relative error held out: median {fit['held_out_median_error']:.0%}, p90 {fit['held_out_p90_error']:.0%}"
        if fit
        else "products of adapters: no factor was fitted, they are charged as dense layers"
    )
    return [
        fitted,
        "assumed, not fitted: loads at the host link's rate beside the pass; a merge reads and writes the touched "
        f"weights once to take an adapter out and once to put one in; disks at {DISK_BANDWIDTH / 1e9:g} GB/s (here all "
        "adapters are in host memory, as in the paper)",
        f"{num_requests[0]} requests of {SHORTEST} to {LONGEST} tokens in and out, {num_requests[1]} where adapters "
        f"are merged, which has too much to do from the first second on; Poisson arrivals, {RATE:g} a second; adapters "
        f"on q, k, v and o, drawn in proportion to i^-x; in time: a first token within {IN_TIME:g} s",
        "separate: a quarter of the pool is adapters' alone; merge: one adapter in the weights at a time, its requests "
        "batched continuously; merge, static: the same in static batches of 32, the nearest here to the paper's PEFT; "
        "vLLM-packed, a whole copy of the model for each adapter, is not simulated",
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _published(case: SimulatedCase) -> str:
    name = COUNTERPART.get(case.mode, "")
    value = PUBLISHED.get(name, {}).get(case.ranks, {}).get(case.num_adapters)
    return "" if value is None else f"{name} {value:.2f}"


def _at_rate(by_case: SimulatedByCase) -> Table:
    rows = [
        [
            _ranks(case.ranks),
            f"{case.num_adapters:,}",
            case.mode,
            f"{run.requests_per_second:.2f}",
            _published(case),
            f"{run.tokens_per_second:,.0f}",
            f"{run.first_token:,.2f}",
            f"{run.attained:.0%}",
            f"{run.mean_running:.0f}",
            f"{run.loads:,}",
        ]
        for case, run in by_case.items()
        if case.rate == RATE and case.exponent == 1.0
    ]
    head = ["ranks", "adapters", "adapters are", "requests/s", "published", "tokens/s"]
    head += ["first token, s", "in time", "running", "loads"]
    return Table(f"Simulated: {RATE:g} requests a second", head, rows, left=3)


def _at_once(by_case: SimulatedByCase) -> Table:
    rows = [
        [
            (case.device or "").removeprefix("simulated:"),
            _ranks(case.ranks),
            f"{case.num_adapters:,}",
            case.mode,
            f"{run.requests_per_second:.2f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.mean_running:.0f}",
            f"{run.loads:,}",
            f"{run.evictions:,}",
            f"{run.num_preemptions:,}",
        ]
        for case, run in by_case.items()
        if math.isinf(case.rate)
    ]
    head = ["other device", "ranks", "adapters", "adapters are", "requests/s", "tokens/s"]
    head += ["running", "loads", "evictions", "preempted"]
    return Table("Simulated: all at once, what the device can do", head, rows, left=4)


def _ratios(by_case: SimulatedByCase, counts: Sequence[int]) -> Table:
    """Throughputs, beside those of the paper wherever it has both."""
    rows = []
    for ranks in dict.fromkeys(case.ranks for case in by_case):
        published = PUBLISHED["S-LoRA"].get(ranks, {})
        few, many = (by_case[SimulatedCase("unified", count, ranks)] for count in (counts[0], counts[-1]))
        ours = many.requests_per_second / few.requests_per_second
        theirs = f"{published[counts[-1]] / published[counts[0]]:.2f}"
        rows.append([_ranks(ranks), f"{counts[-1]:,} adapters ÷ {counts[0]}", f"{ours:.2f}", theirs])
        for mode in MERGING:
            for count in counts:
                other = by_case.get(SimulatedCase(mode, count, ranks))
                if other is None:
                    continue
                ours = (
                    by_case[SimulatedCase("unified", count, ranks)].requests_per_second
                    / other.requests_per_second
                )
                peft = PUBLISHED["PEFT"][ranks].get(count) if mode == "merge, static" else None
                theirs = "" if peft is None else f"{published[count] / peft:.1f} over PEFT"
                rows.append([_ranks(ranks), f"unified ÷ {mode}, {count:,} adapters", f"{ours:.1f}", theirs])
    rows.append(["", "over vLLM-packed, as many adapters as fit", "not simulated", "up to 4"])
    return Table("Simulated: ratios of throughput", ["ranks", "ratio", "here", "published"], rows, left=2)


def _skew(by_case: SimulatedByCase) -> list[Table]:
    cases = [case for case in by_case if case.rate == RATE and case.mode in ("unified", "separate")]
    exponents = sorted({case.exponent for case in cases})
    if len(exponents) == 1:
        return []
    rows = []
    for exponent in exponents:
        for mode in ("unified", "separate"):
            run = by_case[SimulatedCase(mode, COUNTS[-1], MIXED, exponent=exponent)]
            rows.append(
                [
                    f"i^-{exponent:g}",
                    mode,
                    f"{run.requests_per_second:.2f}",
                    f"{run.first_token:.2f}",
                    f"{run.attained:.0%}",
                    f"{run.loads:,}",
                    f"{run.evictions:,}",
                ]
            )
    head = ["drawn by", "adapters are", "requests/s", "first token, s", "in time", "loads", "evictions"]
    title = f"Simulated: skew, {COUNTS[-1]:,} adapters of ranks {_ranks(MIXED)}"
    return [Table(title, head, rows, left=2)]


def _picture(found: SimulatedByCase, counts: Sequence[int], where: str) -> Picture:
    most = found[SimulatedCase("unified", counts[-1], MIXED)]
    return Picture(
        "adapters-simulated",
        f"Many adapters: {where}",
        f"{counts[-1]:,} adapters of ranks {_ranks(MIXED)}: {most.requests_per_second:.1f} requests a second, "
        f"{most.attained:.0%} of first tokens within {IN_TIME:g} s.",
        lambda figure: _draw(figure, found, counts),
        width=11.0,
    )


def _draw(figure: Any, by_case: SimulatedByCase, counts: Sequence[int]) -> None:
    panels = figure.subplots(1, 3)
    values = (
        ("requests per second", lambda run: run.requests_per_second),
        ("first token, s (mean)", lambda run: run.first_token),
        ("first tokens in time, %", lambda run: 100 * run.attained),
    )
    for panel, (label, value) in zip(panels, values, strict=True):
        for series, mode in enumerate(MODES):
            line = [
                by_case[case] for count in counts if (case := SimulatedCase(mode, count, MIXED)) in by_case
            ]
            at = [run.case.num_adapters for run in line]
            panel.plot(at, [value(run) for run in line], label=mode, **line_style(series))
        panel.set(xlabel="adapters", ylabel=label)
        plain_log(panel, "x")
    for name, marker in (("S-LoRA", "*"), ("PEFT", "x")):
        published = {n: value for n, value in PUBLISHED[name][MIXED].items() if n in counts}
        panels[0].plot(
            list(published), list(published.values()), marker, color=GREY, label=f"{name}, published"
        )
    plain_log(panels[1], "y")
    panels[0].set_ylim(bottom=0)
    panels[2].set_ylim(0, 105)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
