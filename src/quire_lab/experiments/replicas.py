"""`replicas`: several GPUs as replicas of a model, or as ranks of one? By the model's size and the number of blocks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any

from quire.bench.workload import Lengths
from quire_lab.measure.simulated_runs import Run, basis, build_simulated, side_by_side, simulate
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, line_style, plain_log

MODELS = ("opt-125m", "opt-6.7b", "opt-13b")
NUM_GPUS = (1, 2, 4)
DEVICE = "a100-40g"
LENGTHS = Lengths(512, 128)
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the blocks that fit
TENSOR, REPLICAS = "tensor parallel", "replicas"


@dataclass(frozen=True, slots=True)
class ReplicasJob:
    model: str
    num_gpus: int
    scheme: str
    share: float
    num_requests: int

    @property
    def num_engines(self) -> int:
        return self.num_gpus if self.scheme == REPLICAS else 1

    @property
    def settings(self) -> dict[str, Any]:
        ranks = self.num_gpus // self.num_engines
        device = f"simulated:{ranks}x{DEVICE}" if ranks > 1 else f"simulated:{DEVICE}"
        return {"model": self.model, "device": device, "enable_prefix_caching": False}


@dataclass(frozen=True, slots=True)
class ReplicasResult:
    model: str
    num_gpus: int
    scheme: str
    share: float
    num_blocks: int  # of all engines together
    output_rate: float  # tokens per second of all engines together
    num_preemptions: int


def measure(job: ReplicasJob) -> ReplicasResult:
    """All requests at once, divided evenly: replicas of one kind with equal shares need equal time."""
    fitting = build_simulated(job.settings).report.pool.num_blocks
    num_blocks = max(LENGTHS.total // 16 + 1, int(fitting * job.share))
    requests = [LENGTHS] * -(-job.num_requests // job.num_engines)
    point = simulate(Run({**job.settings, "num_blocks": num_blocks}, requests, inf, 0))
    total = job.num_requests * LENGTHS.num_output_tokens
    return ReplicasResult(
        job.model,
        job.num_gpus,
        job.scheme,
        job.share,
        num_blocks * job.num_engines,
        total / point.seconds,
        point.num_preemptions * job.num_engines,
    )


def run(setup: Setup) -> Finding:
    shares = setup.pick((1.0,), SHARES, SHARES)
    num_requests = setup.pick(40, 500, 500)
    jobs = [
        ReplicasJob(model, num_gpus, scheme, share, num_requests)
        for model in MODELS
        for num_gpus in NUM_GPUS
        for scheme in ((TENSOR, REPLICAS) if num_gpus > 1 else (REPLICAS,))
        for share in shares
    ]
    with setup.progress(len(jobs), "runs") as bar:
        results = side_by_side(setup, measure, jobs, bar)
    return _finding(setup, results, num_requests)


def _finding(setup: Setup, results: Sequence[ReplicasResult], num_requests: int) -> Finding:
    full = {(m.model, m.num_gpus, m.scheme): m for m in results if m.share == 1.0}
    ratios = {
        (model, count): full[model, count, TENSOR].output_rate / full[model, count, REPLICAS].output_rate
        for model in MODELS
        for count in NUM_GPUS[1:]
    }
    small, large = MODELS[0], MODELS[-1]
    take_away = (
        f"Tensor parallelism over replicas on 2 and 4 GPUs, tokens per second: {small} {ratios[small, 2]:.2f} and "
        f"{ratios[small, 4]:.2f}, {large} {ratios[large, 2]:.2f} and {ratios[large, 4]:.2f}. Small models are "
        "replicated; a model whose weights leave little room for blocks is split."
    )
    checks = [
        Check(
            f"{small}: replicas give more than tensor parallelism, more so with more GPUs",
            f"{1 / ratios[small, 2]:.2f} × on 2, {1 / ratios[small, 4]:.2f} × on 4",
            1 < 1 / ratios[small, 2] < 1 / ratios[small, 4],
        ),
        Check(
            f"{large}: tensor parallelism gives more, since the weights are held once",
            f"{ratios[large, 2]:.2f} × on 2, {ratios[large, 4]:.2f} × on 4",
            min(ratios[large, count] for count in NUM_GPUS[1:]) > 1,
        ),
    ]
    picture = Picture(
        "replicas",
        "Replicas or tensor parallelism",
        f"{small}: {ratios[small, 4]:.2f} × the tokens of replicas with 4 ranks; {large}: {ratios[large, 4]:.2f} ×.",
        partial(_draw, results=results),
        height=3.6,
    )
    return Finding(
        take_away,
        [_table(results, ratios)],
        [picture],
        {"runs": [asdict(measured) for measured in results]},
        {"seed": setup.seed, "device": DEVICE, "num_requests": num_requests, "lengths": asdict(LENGTHS)},
        checks,
        [
            *basis({"model": ", ".join(MODELS), "device": f"simulated:{DEVICE}"}),
            f"{num_requests} requests at once, {LENGTHS.num_prompt_tokens} tokens in and {LENGTHS.num_output_tokens} "
            "out; replicas get equal shares",
            "an all-reduce is charged 10 µs and half of NVLink's bandwidth, which was not measured here",
        ],
    )


def _table(results: Sequence[ReplicasResult], ratios: dict[tuple[str, int], float]) -> Table:
    rows = [
        [
            measured.model,
            measured.scheme if measured.num_gpus > 1 else "one engine",
            f"{measured.num_gpus}",
            f"{measured.share:.0%}",
            f"{measured.num_blocks:,}",
            f"{measured.output_rate:,.0f}",
            f"{ratios[measured.model, measured.num_gpus]:.2f}"
            if measured.scheme == TENSOR and measured.share == 1.0
            else "",
            f"{measured.num_preemptions:,}",
        ]
        for measured in results
    ]
    head = ["model", "as", "GPUs", "memory used", "blocks", "tokens/s", "÷ replicas", "preempted"]
    return Table("Replicas and tensor parallelism", head, rows, left=2)


MAX_TICKS = 3  # of an axis: more numbers of six digits lie on each other


def _draw(figure: Any, results: Sequence[ReplicasResult]) -> None:
    for axis, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        series = [(TENSOR, 2), (REPLICAS, 2), (TENSOR, 4), (REPLICAS, 4)]
        for index, (scheme, count) in enumerate(series):
            runs = [m for m in results if (m.model, m.scheme, m.num_gpus) == (model, scheme, count)]
            axis.plot(
                [m.num_blocks for m in runs],
                [m.output_rate for m in runs],
                label=f"{count} {'ranks' if scheme == TENSOR else 'replicas'}",
                **line_style(index),
            )
        axis.set(title=model, xlabel="blocks of all engines", ylabel="tokens/s", ylim=(0, None))
        plain_log(axis, "x")
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        axis.set_xticks(ticks[:: -(-len(ticks) // MAX_TICKS)])
        axis.legend(loc="lower right")


EXPERIMENT = Experiment(
    "replicas",
    "Replicas or tensor parallelism",
    "Several GPUs: should each serve the whole model, or should they share one? By model size and number of blocks.",
    run,
)
