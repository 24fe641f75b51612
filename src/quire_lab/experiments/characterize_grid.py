"""The grid of `characterize`: which runs there are, and one run of it."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.bench.arrivals import arrival_times
from quire.bench.lengths import Lengths
from quire.core.errors import ConfigError
from quire_lab.experiments.experiment import Size
from quire_lab.experiments.simulated import Run, build_simulated, replayed
from quire_lab.replay import Arrival, Replay

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
class Cell:
    """One run of the grid."""

    part: str  # grid | devices | blocks
    model: str
    device: str
    batching: str
    num_outputs: int
    rate: float
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    cell: Cell
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
class Job:
    cell: Cell
    settings: Mapping[str, Any]
    num_requests: int
    seed: int


def cells(size: Size, settings: Mapping[str, Any]) -> Iterator[Cell]:
    """The whole product where time does not matter; else its faces: one model, one length, one device at a time."""
    model, device = str(settings["model"]), str(settings["device"])
    outputs = OUTPUTS[1::2] if size is Size.QUICK else OUTPUTS
    rates = RATES[::2] if size is Size.QUICK else RATES
    yield from (
        Cell("grid", model, device, batching, num_outputs, rate)
        for num_outputs in outputs
        for rate in rates
        for batching in BATCHING
    )
    everything = size is Size.THOROUGH
    yield from (
        Cell("devices", one, where, batching, num_outputs, rate)
        for one in MODELS[:: 2 if size is Size.QUICK else 1]
        for where in DEVICES
        for num_outputs in ((128,) if size is Size.QUICK else OUTPUTS)
        for rate in (RATES if everything else (math.inf,))
        for batching in (BATCHING if everything else ("paged", "unpaged"))
    )
    yield from (
        Cell("blocks", model, device, batching, 128, math.inf, num_blocks)
        for num_blocks in (BLOCKS[1::2] if size is Size.QUICK else BLOCKS)
        for batching in ("paged", "unpaged")
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """The same requests on the same device, with paging and otherwise."""

    paged: Measured
    other: Measured

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


def gains(found: Iterable[Measured], over: str) -> list[Gain]:
    """Of paging over another way to batch, the largest first, wherever both served anything."""
    served = {one.cell: one for one in found if not one.fault}
    pairs = [
        Gain(one, served[other])
        for cell, one in served.items()
        if cell.batching == "paged" and (other := replace(cell, batching=over)) in served
    ]
    return sorted(pairs, key=lambda gain: -gain.ratio)


def measure(job: Job) -> Measured:
    cell = job.cell
    settings = {**job.settings, **BATCHING[cell.batching], "model": cell.model, "device": cell.device}
    if cell.num_blocks is not None:
        # memory that is reserved counts tokens: as many of them as the blocks hold
        settings["num_blocks"] = cell.num_blocks * (1 if cell.batching == "paged" else BLOCK_SIZE)
    lengths = [Lengths(INPUT, cell.num_outputs)] * job.num_requests
    try:
        if cell.batching == "none":
            return _alone(cell, settings, lengths, job.seed)
        found = replayed(Run(settings, lengths, cell.rate, job.seed))
    except ConfigError as fault:  # a model that no such device holds
        return Measured(cell, fault=str(fault))
    served = found.served
    if not served:
        return Measured(cell, fault="no request fits the pool")
    return Measured(
        cell,
        found.output_rate,
        found.normalised,
        sum(one.per_token for one in served) / len(served),
        found.waiting.mean or found.arriving.mean,
        found.num_preemptions,
    )


def _alone(cell: Cell, settings: Mapping[str, Any], lengths: list[Lengths], seed: int) -> Measured:
    """Equal requests that never share a step take equally long: a few are simulated, the queue of all is worked out."""
    few = Replay(build_simulated(settings), [Arrival(0.0, lengths[0])] * SERVED_ALONE).run()
    each = few.seconds / SERVED_ALONE
    now, delays, busy = 0.0, 0.0, 0.0
    for arrival in arrival_times(len(lengths), cell.rate, 1.0, random.Random(f"arrivals {seed}")):
        now = max(now, arrival) + each
        delays += now - arrival
        busy += each
    per_token = sum(one.per_token for one in few.served) / len(few.served)
    return Measured(
        cell,
        len(lengths) * cell.num_outputs / now,
        delays / len(lengths) / cell.num_outputs,
        per_token,
        busy / now,
    )
