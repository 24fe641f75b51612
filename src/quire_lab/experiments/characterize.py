"""`characterize`: a grid of 500 equal requests over batching, paging, output lengths, rates, models and devices."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.bench.workload import Lengths, arrival_times
from quire.core.errors import ConfigError
from quire_lab.measure.replay import Arrival, Replay
from quire_lab.measure.simulated_runs import (
    Run,
    basis,
    build_simulated,
    in_rate,
    replayed,
    side_by_side,
    simulated_settings,
)
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Size, Table
from quire_lab.report.figure import Picture, bar_style, line_style, plain_log
from quire_lab.simulate.devices import find_device

# The grid of `characterize`: which runs there are, and one run of it.

INPUT = 512
OUTPUTS = (32, 64, 128, 256)
RATES = (math.inf, 100.0, 10.0)
MODELS = ("opt-125m", "opt-6.7b", "opt-13b")
DEVICES = ("simulated:v100", "simulated:a100-40g", "simulated:2xa100-40g", "simulated:4xa100-40g")
BATCHING: dict[str, dict[str, Any]] = {
    "paged": {},
    "unpaged": {"reservation": "max"},
    "dynamic": {"batching": "dynamic", "batch_size": 16, "reservation": "max"},
    "none": {"batching": "static", "batch_size": 1, "reservation": "max"},
}
BLOCKS = (128, 256, 512, 1024, 2048, 4096)
BLOCK_SIZE = 16
POSITIONS = 2048  # of every model: what is reserved for a request without paging
SERVED_ALONE = 3  # requests that are simulated where none shares a step: all others are the same


@dataclass(frozen=True, slots=True)
class GridCell:
    """One run of the grid."""

    part: str  # grid | devices | blocks
    model: str
    device: str
    batching: str
    num_outputs: int
    rate: float
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class GridResult:
    cell: GridCell
    output_rate: float = 0.0  # tokens per second
    normalised: float = 0.0  # mean seconds per output token, from arrival
    per_token: float = 0.0  # mean seconds between tokens
    mean_running: float = 0.0
    num_preemptions: int = 0
    fault: str = ""  # why there is nothing

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["cell"]["rate"] = "inf" if math.isinf(self.cell.rate) else self.cell.rate
        return found


@dataclass(frozen=True, slots=True)
class GridJob:
    cell: GridCell
    settings: Mapping[str, Any]
    num_requests: int
    seed: int


def cells(size: Size, settings: Mapping[str, Any]) -> Iterator[GridCell]:
    """The whole product where time does not matter; else its faces: one model, one length, one device at a time."""
    model, device = str(settings["model"]), str(settings["device"])
    outputs = OUTPUTS[1::2] if size is Size.QUICK else OUTPUTS
    rates = RATES[::2] if size is Size.QUICK else RATES
    yield from (
        GridCell("grid", model, device, batching, num_outputs, rate)
        for num_outputs in outputs
        for rate in rates
        for batching in BATCHING
    )
    everything = size is Size.THOROUGH
    yield from (
        GridCell("devices", model_name, where, batching, num_outputs, rate)
        for model_name in MODELS[:: 2 if size is Size.QUICK else 1]
        for where in DEVICES
        for num_outputs in ((128,) if size is Size.QUICK else OUTPUTS)
        for rate in (RATES if everything else (math.inf,))
        for batching in (BATCHING if everything else ("paged", "unpaged"))
    )
    yield from (
        GridCell("blocks", model, device, batching, 128, math.inf, num_blocks)
        for num_blocks in (BLOCKS[1::2] if size is Size.QUICK else BLOCKS)
        for batching in ("paged", "unpaged")
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """The same requests on the same device, with paging and otherwise."""

    paged: GridResult
    other: GridResult

    @property
    def ratio(self) -> float:
        """Of tokens per second."""
        return self.paged.output_rate / self.other.output_rate

    @property
    def in_words(self) -> str:
        """Where it was found."""
        cell = self.paged.cell
        where = f"{cell.model} on {cell.device.removeprefix('simulated:')}"
        blocks = "" if cell.num_blocks is None else f", {cell.num_blocks:,} blocks"
        rate = "all at once" if math.isinf(cell.rate) else f"{cell.rate:g} requests/s"
        return f"{where}{blocks}, {cell.num_outputs} out, {rate}"


def gains(found: Iterable[GridResult], over: str) -> list[Gain]:
    """Of paging over another way to batch, the largest first, wherever both served anything."""
    served = {one.cell: one for one in found if not one.fault}
    pairs = [
        Gain(one, served[other])
        for cell, one in served.items()
        if cell.batching == "paged" and (other := replace(cell, batching=over)) in served
    ]
    return sorted(pairs, key=lambda gain: -gain.ratio)


def measure(job: GridJob) -> GridResult:
    cell = job.cell
    settings = {**job.settings, **BATCHING[cell.batching], "model": cell.model, "device": cell.device}
    if cell.num_blocks is not None:
        # memory that is reserved counts tokens: as many of them as the blocks hold
        settings["num_blocks"] = cell.num_blocks * (1 if cell.batching == "paged" else BLOCK_SIZE)
    lengths = [Lengths(INPUT, cell.num_outputs)] * job.num_requests
    try:
        if cell.batching == "none":
            return _alone(cell, settings, lengths, job.seed)
        replay = replayed(Run(settings, lengths, cell.rate, job.seed))
    except ConfigError as fault:  # a model that no such device holds
        return GridResult(cell, fault=str(fault))
    served = replay.served
    if not served:
        return GridResult(cell, fault="no request fits the pool")
    return GridResult(
        cell,
        replay.output_rate,
        replay.normalised,
        sum(request.per_token for request in served) / len(served),
        replay.waiting.mean or replay.arriving.mean,
        replay.num_preemptions,
    )


def _alone(cell: GridCell, settings: Mapping[str, Any], lengths: list[Lengths], seed: int) -> GridResult:
    """Equal requests that never share a step take equally long: a few are simulated, the queue of all is worked out."""
    few = Replay(build_simulated(settings), [Arrival(0.0, lengths[0])] * SERVED_ALONE).run()
    each = few.seconds / SERVED_ALONE
    now, delays, busy = 0.0, 0.0, 0.0
    for arrival in arrival_times(len(lengths), cell.rate, 1.0, random.Random(f"arrivals {seed}")):
        now = max(now, arrival) + each
        delays += now - arrival
        busy += each
    per_token = sum(request.per_token for request in few.served) / len(few.served)
    return GridResult(
        cell,
        len(lengths) * cell.num_outputs / now,
        delays / len(lengths) / cell.num_outputs,
        per_token,
        busy / now,
    )


# Tables and pictures of `characterize`.

WORDS = {"paged": "continuous, paged", "unpaged": "continuous, unpaged", "dynamic": "dynamic", "none": "none"}
MOST = 6  # gains that the table lists
LOOKS: dict[str, int | str] = {"paged": "paged", "unpaged": "max", "dynamic": "dynamic", "none": "none"}


def tables(found: Sequence[GridResult], devices: Sequence[str]) -> list[Table]:
    return [_gains(found), _grid(found), _devices(found, devices), _blocks(found)]


def pictures(results: Sequence[GridResult], model: str) -> list[Picture]:
    return [
        Picture(
            "characterize",
            f"Throughput by batching, {model}",
            "The longer the answers and the higher the load, the more it matters who may join a batch, and when.",
            lambda figure: _draw_grid(figure, results),
            width=11.0,
        ),
        Picture(
            "characterize-blocks",
            f"Throughput and latency against the number of blocks, {model}",
            "More memory means larger batches, until the device's arithmetic is what is left.",
            lambda figure: _draw_blocks(figure, results),
        ),
    ]


def _gains(results: Sequence[GridResult]) -> Table:
    """Where paging pays most, and what bounds it: how many more requests the same memory holds."""
    rows = [
        [
            gain.in_words,
            f"{gain.paged.output_rate:,.0f}",
            f"{gain.other.output_rate:,.0f}",
            f"{gain.ratio:.2f}",
            f"{gain.paged.mean_running:.1f}",
            f"{gain.other.mean_running:.1f}",
            f"{POSITIONS / (INPUT + gain.paged.cell.num_outputs):.1f}",
        ]
        for gain in gains(results, "unpaged")[:MOST]
    ]
    head = [
        "where",
        "tokens/s, paged",
        "unpaged",
        "ratio",
        "running, paged",
        "unpaged",
        "memory allows, about",
    ]
    return Table("Where paging pays most (published: up to 4 ×)", head, rows)


def _part(found: Sequence[GridResult], part: str) -> list[GridResult]:
    return [one for one in found if one.cell.part == part]


def _grid(results: Sequence[GridResult]) -> Table:
    rows = [
        [
            f"{result.cell.num_outputs}",
            in_rate(result.cell.rate),
            WORDS[result.cell.batching],
            f"{result.output_rate:,.0f}",
            f"{1e3 * result.normalised:,.1f}",
            f"{1e3 * result.per_token:.1f}",
            f"{result.mean_running:.1f}",
        ]
        for result in _part(results, "grid")
    ]
    head = [
        "outputs",
        "requests/s",
        "batching",
        "tokens/s",
        "latency, ms per token",
        "between tokens, ms",
        "running",
    ]
    return Table("Batching, output lengths and rates", head, rows, left=3)


def _devices(results: Sequence[GridResult], devices: Sequence[str]) -> Table:
    cells = {
        (result.cell.model, result.cell.device, result.cell.batching): result
        for result in _part(results, "devices")
        if result.cell.num_outputs == 128 and math.isinf(result.cell.rate)
    }
    models = list(dict.fromkeys(model for model, _, _ in cells))
    rows = []
    for model in models:
        of_part = {
            batching: [cells[model, device, batching] for device in devices]
            for batching in ("paged", "unpaged")
        }
        for batching, line in of_part.items():
            shown = ["does not fit" if result.fault else f"{result.output_rate:,.0f}" for result in line]
            rows.append([model, WORDS[batching], *shown])
        ratios = [
            "" if paged.fault or other.fault else f"{paged.output_rate / other.output_rate:.2f}"
            for paged, other in zip(of_part["paged"], of_part["unpaged"], strict=True)
        ]
        rows.append([model, "ratio", *ratios])
    names = [device.removeprefix("simulated:") for device in devices]
    return Table(
        "Models and devices, 128 out, all at once: tokens per second",
        ["model", "batching", *names],
        rows,
        left=2,
    )


def _blocks(results: Sequence[GridResult]) -> Table:
    rows = [
        [
            f"{result.cell.num_blocks:,}",
            WORDS[result.cell.batching],
            *(
                ("no request fits", "", "", "", "")
                if result.fault
                else (
                    f"{result.output_rate:,.0f}",
                    f"{1e3 * result.normalised:,.1f}",
                    f"{1e3 * result.per_token:.1f}",
                    f"{result.mean_running:.1f}",
                    f"{result.num_preemptions:,}",
                )
            ),
        ]
        for result in _part(results, "blocks")
    ]
    head = ["blocks of 16", "batching", "tokens/s", "latency, ms per token", "between tokens, ms", "running"]
    return Table(
        "The number of blocks, 128 out, all at once: the same memory", [*head, "preempted"], rows, left=2
    )


def _draw_grid(figure: Any, results: Sequence[GridResult]) -> None:
    of_part = _part(results, "grid")
    rates = list(dict.fromkeys(result.cell.rate for result in of_part))
    outputs = list(dict.fromkeys(result.cell.num_outputs for result in of_part))
    for axis, rate in zip(figure.subplots(1, len(rates), sharey=True), rates, strict=True):
        for index, batching in enumerate(WORDS):
            values = [
                result.output_rate
                for result in of_part
                if result.cell.rate == rate and result.cell.batching == batching
            ]
            axis.bar(
                [x + 0.2 * (index - 1.5) for x in range(len(outputs))],
                values,
                0.19,
                label=WORDS[batching],
                **bar_style(LOOKS[batching]),
            )
        axis.set_xticks(range(len(outputs)), [str(num_outputs) for num_outputs in outputs])
        title = "all at once" if math.isinf(rate) else f"{rate:g} requests per second"
        axis.set(title=title, xlabel="output tokens")
        plain_log(axis, "y")
        axis.grid(axis="x", visible=False)
        if rate == rates[0]:
            axis.set_ylabel("tokens per second")
            handles, labels = axis.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_blocks(figure: Any, results: Sequence[GridResult]) -> None:
    left, right = figure.subplots(1, 2)
    series = {
        batching: [
            result
            for result in _part(results, "blocks")
            if result.cell.batching == batching and not result.fault
        ]
        for batching in ("paged", "unpaged")
    }
    for batching, of_part in series.items():
        blocks = [result.cell.num_blocks for result in of_part]
        look = line_style(LOOKS[batching])
        left.plot(blocks, [result.output_rate for result in of_part], label=WORDS[batching], **look)
        arrived = [1e3 * result.normalised for result in of_part]
        right.plot(blocks, arrived, label=f"from arrival, {batching}", **look)
        between = [1e3 * result.per_token for result in of_part]
        right.plot(blocks, between, label=f"between tokens, {batching}", **look, alpha=0.45)
    left.set(title="throughput", xlabel="blocks of 16 tokens", ylabel="tokens per second")
    right.set(title="latency", xlabel="blocks of 16 tokens", ylabel="ms per token")
    plain_log(right, "y")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            [result.cell.num_blocks for result in series["paged"]],
            [f"{result.cell.num_blocks:,}" for result in series["paged"]],
        )
    left.legend(loc="upper left")
    right.legend(loc="upper right")


NUM_REQUESTS = 500
BASE: dict[str, Any] = {
    "model": "opt-6.7b",
    "device": "simulated:a100-40g",
    "enable_prefix_caching": False,
}

BOUND = (
    f"what bounds paging's gain: the same memory holds about {POSITIONS / (INPUT + 32):.1f} (32 out) to "
    f"{POSITIONS / (INPUT + 256):.1f} (256 out) times as many requests as where {POSITIONS:,} positions are reserved "
    "for each; prompts cost the same arithmetic either way, and every request of a larger batch reads its own K and V: "
    "most is gained where memory holds few requests and weights are most of what a step reads"
)


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, BASE)
    num_requests = setup.pick(60, NUM_REQUESTS, NUM_REQUESTS)
    jobs = [GridJob(cell, settings, num_requests, setup.seed) for cell in cells(setup.size, settings)]
    with setup.progress(len(jobs), "runs") as bar:
        found = side_by_side(setup, measure, jobs, bar)
    return _finding(setup, settings, found, num_requests)


def _largest(found: list[GridResult]) -> str:
    """What paging gave at most, and where, beside what was published."""
    most = gains(found, "unpaged")[0]
    others = ", ".join(
        f"{gain.ratio:.1f} × {words} ({gain.in_words})"
        for words, gain in (("over dynamic", _first(found, "dynamic")), ("over none", _first(found, "none")))
        if gain is not None
    )
    return f"At most it gives {most.ratio:.1f} × ({most.in_words}; published: up to 4 ×), and {others}."


def _first(found: list[GridResult], over: str) -> Gain | None:
    return next(iter(gains(found, over)), None)


def _finding(
    setup: Setup, settings: Mapping[str, Any], results: list[GridResult], num_requests: int
) -> Finding:
    grid = {
        (result.cell.num_outputs, result.cell.rate, result.cell.batching): result
        for result in results
        if result.cell.part == "grid"
    }
    longest = max(outputs for outputs, _, _ in grid)
    at_once = {name: grid[longest, math.inf, name] for name in BATCHING}
    rates = {name: result.output_rate for name, result in at_once.items()}
    take_away = (
        f"{num_requests} requests of {INPUT} in, {longest} out, all at once: {rates['paged']:,.0f} tokens/s with "
        f"paging, {rates['unpaged']:,.0f} without, {rates['dynamic']:,.0f} in dynamic batches and "
        f"{rates['none']:,.0f} one by one: paging gives {rates['paged'] / rates['unpaged']:.1f} ×. {_largest(results)}"
    )
    ordered = (
        rates["none"] < rates["dynamic"] <= rates["unpaged"] * 1.02 and rates["unpaged"] < rates["paged"]
    )
    check = Check(
        "all at once: none < dynamic ≤ continuous without paging < with paging, in tokens per second",
        " < ".join(f"{rates[name]:,.0f}" for name in ("none", "dynamic", "unpaged", "paged")),
        ordered,
    )
    return Finding(
        take_away,
        tables(results, DEVICES),
        pictures(results, str(settings["model"])),
        {
            "runs": [result.as_dict() for result in results],
            "largest": [
                {"over": over, "ratio": gain.ratio, "where": gain.in_words}
                for over in BATCHING
                if (gain := _first(results, over)) is not None and over != "paged"
            ],
        },
        {"seed": setup.seed, "engine": dict(settings), "num_requests": num_requests, "input": INPUT},
        [check],
        [
            *basis(settings),
            "without paging: memory reserved to the model's 2,048 positions; dynamic: batches of 16 over it and a "
            "window of 50 ms; none: one request at a time",
            BOUND,
            *(f"{find_device(device).in_words}" for device in DEVICES),
            "several devices: weights, KV and products split evenly; two ring all-reduces per layer at the link's data "
            "sheet rate and 10 µs each, which is an assumption",
        ],
    )


EXPERIMENT = Experiment(
    "characterize",
    "Batching and paging over models, devices and loads",
    "When do continuous batching and paging pay, and when does it not matter?",
    run,
)
