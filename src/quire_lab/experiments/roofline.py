"""`roofline`: what this machine reads and computes in a second, and which of the two bounds a decode step."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quire.bench.drive import Bench
from quire.bench.machine import cpu_read_rate
from quire.bench.table import in_bytes
from quire.models.weight_shape import WeightShape, weight_shape
from quire_lab.measure.compare import Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, prompt_rate, step_seconds, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, error_bars, line_style, look, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, all_held
from quire_lab.report.regression import Line, fit_line

CONTEXT = 32  # tokens of each sequence: short, so that weights are nearly all that a step reads
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PRODUCT = 1024  # rows and columns of the matrix whose products measure computing
PRODUCT_ROWS = 512
KNEE_WIDTH = 3.0  # a knee whose interval ends this many times as high as it begins is not resolved


@dataclass(frozen=True, slots=True)
class Machine:
    read_rate: float  # bytes a second
    compute_rate: float  # operations a second, in the model's own products

    def step_floor(self, weights: WeightShape, num_sequences: int) -> tuple[float, float]:
        """Seconds that a step needs at least: to read the weights, and to multiply with them."""
        operations = 2 * weights.read_parameters * num_sequences
        return weights.bytes_read(num_sequences) / self.read_rate, operations / self.compute_rate


@dataclass(frozen=True, slots=True)
class Decoded:
    num_sequences: int
    step: Interval  # seconds

    @property
    def seconds(self) -> float:
        return self.step.median

    @property
    def tokens_per_second(self) -> float:
        return self.num_sequences / self.seconds


Rounds = Interleaved[int | str, float]  # seconds of a step by sequences, and the machine's rates


def run(setup: Setup) -> Finding:
    with opened(setup, enable_prefix_caching=False, steps_in_flight=0) as bench:
        warm_up(bench)
        report = bench.built.report
        weights = weight_shape(bench.built.model, report.precision.format)
        # a batch's prompts are computed before it is timed: as many as take no longer than its steps
        prompts = prompt_rate(bench) * setup.pick(1.0, 6.0, 20.0) / CONTEXT
        most = min(
            setup.pick(8, 256, 512), report.limits.max_num_seqs, report.pool.num_tokens // (2 * CONTEXT)
        )
        batches = [n for n in BATCHES if n <= min(most, max(8, prompts))]
        num_steps = setup.pick(4, 8, 32)
        variants: dict[int | str, Callable[[], float]] = {
            count: partial(_step, bench, count, num_steps) for count in batches
        }
        variants |= {"reading": partial(_read_rate, bench), "computing": partial(_compute_rate, bench)}
        rounds = interleave(setup, variants, float, "decode steps and rates")
        words = in_words(bench)
    return _finding(setup, rounds, batches, weights, words)


def _step(bench: Bench, num_sequences: int, num_steps: int) -> float:
    return statistics.median(step_seconds(bench, num_sequences, CONTEXT, num_steps))


def _read_rate(bench: Bench) -> float:
    device = bench.built.report.precision.device
    if device.type == "cpu":
        threads = torch.get_num_threads()  # torch keeps to one where native kernels do the model's work
        torch.set_num_threads(bench.built.report.start.num_threads)
        try:
            return cpu_read_rate()
        finally:
            torch.set_num_threads(threads)
    source = torch.ones(1 << 28, dtype=torch.float32, device=device)
    return source.numel() * 4 / _best(lambda: source.sum(), device)


def _compute_rate(bench: Bench) -> float:
    """Of a product in the model's own number format, with as many rows as a long prompt has."""
    numbers = bench.built.report.precision
    on_gpu = numbers.device.type == "cuda"
    side, rows = (8192, 8192) if on_gpu else (PRODUCT, PRODUCT_ROWS)
    dtype = numbers.format.activation_dtype
    matrix = numbers.format.matrix(side, side)
    matrix.load_rows(0, torch.randn(side, side, device=numbers.device).to(dtype))
    x = torch.randn(rows, side, device=numbers.device).to(dtype)
    return 2 * rows * side * side / _best(lambda: matrix.linear(x, None, None), numbers.device)


def _best(work: Callable[[], object], device: torch.device, seconds: float = 0.4) -> float:
    """The least time of a call, over many: a rate is what the machine can do undisturbed."""
    work()
    best, ends = float("inf"), time.perf_counter() + seconds
    while (started := time.perf_counter()) < ends:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def _fit(counts: Sequence[int], seconds: Sequence[float]) -> Line:
    return fit_line(counts, seconds, [1 / value for value in seconds])


def _knee(line: Line) -> float:
    """Sequences at which the fixed time and that of the sequences are equal; infinite: beyond what was measured."""
    return max(0.0, line.intercept / line.slope) if line.slope > 0 else math.inf


def _finding(setup: Setup, rounds: Rounds, counts: list[int], weights: WeightShape, words: str) -> Finding:
    machine = Machine(max(rounds.runs["reading"]), max(rounds.runs["computing"]))
    decoded = [Decoded(count, rounds.interval(count, float)) for count in counts]
    line = _fit(counts, [point.seconds for point in decoded])
    steps = zip(*(rounds.runs[count] for count in counts), strict=True)  # of each round
    knee = Interval.of([_knee(_fit(counts, seconds)) for seconds in steps])
    reading, computing = machine.step_floor(weights, 1)
    ideal_knee = reading / computing
    single, largest = decoded[0], decoded[-1]
    gain = rounds.ratio(counts[0], counts[-1], float)  # of the steps' times
    gain = replace(gain, interval=gain.interval.scaled(counts[-1] / counts[0]))
    free, bound = _knee_in_words(knee, counts[-1], rounds)
    take_away = (
        f"{bound}. One sequence gets {single.tokens_per_second:.0f} tokens/s, {largest.num_sequences} together: "
        f"{gain.claim('times as many')}. From {in_bytes(machine.read_rate)}/s and "
        f"{machine.compute_rate / 1e9:,.0f} GOP/s alone the knee would be at {ideal_knee:.0f}."
    )
    results = {
        "read_bytes_per_second": machine.read_rate,
        "operations_per_second": machine.compute_rate,
        "weights_read_bytes": weights.read_bytes,
        "weights_read_parameters": weights.read_parameters,
        "knee_measured": knee.record(),
        "gain_of_the_largest_batch": gain.record(),
        "knee_from_rates": ideal_knee,
        "fixed_seconds": line.intercept,
        "seconds_per_sequence": line.slope,
        "fit_r_squared": line.r_squared,
        "steps": [
            {
                "num_sequences": point.num_sequences,
                "seconds": point.seconds,
                "seconds_interval": point.step.record(),
                "tokens_per_second": point.tokens_per_second,
            }
            for point in decoded
        ],
    }
    picture = Picture(
        "roofline",
        "What bounds decoding",
        f"{free} a larger batch is nearly free: its weights are read anyway.",
        lambda figure: _draw(figure, machine, weights, decoded, line, knee.median),
    )
    share = reading / single.seconds
    checks = [
        Check(
            "no step is faster than the machine's own rates allow",
            f"one sequence reaches {100 * share:.0f} % of the reading floor",
            all_held(
                point.step.is_above(0.8 * max(machine.step_floor(weights, point.num_sequences)))
                for point in decoded
            ),
        ),
        Check(
            "more sequences give more tokens a second",
            gain.text(),
            gain.interval.is_above(1.0),
        ),
    ]
    return Finding(
        take_away,
        [_table(machine, weights, decoded)],
        [picture],
        results,
        {"seed": setup.seed, "context": CONTEXT, "batches": counts, "model": words},
        checks,
        (
            f"{words}; decode steps with {CONTEXT} tokens of context and more, all batches in turns, "
            f"{rounds.num_rounds} rounds; medians with {CONFIDENCE_WORDS} intervals",
            f"a step reads {in_bytes(weights.read_bytes)} of weights and computes "
            f"{2 * weights.read_parameters / 1e6:,.0f} million operations for each sequence",
            "reading: a matrix-vector product larger than the caches; computing: a product in the model's own "
            "number format; the best of many",
            f"measured knee: seconds of a step = {1e3 * line.intercept:.1f} ms + {1e3 * line.slope:.2f} ms × "
            f"sequences (R² {line.r_squared:.3f}), where both terms are equal",
        ),
    )


def _knee_in_words(knee: Interval, largest: int, rounds: Rounds) -> tuple[str, str]:
    """How far a larger batch is free, and where it stops being so."""
    if knee.low > largest:
        return (
            "In every batch measured here",
            f"Up to {largest} sequences decoding stays bound by memory here",
        )
    if knee.high > KNEE_WIDTH * knee.low:
        return (
            "Up to the knee (not resolved on this machine)",
            f"Where decoding stops being bound by memory is not resolved on this machine: {knee.text(0)} sequences "
            f"after {rounds.seconds:.0f} s ({rounds.num_rounds} rounds)",
        )
    return (
        f"Up to about {knee.median:.0f} sequences",
        f"Decoding stops being bound by memory at about {knee.text(0)} sequences here",
    )


def _table(machine: Machine, weights: WeightShape, decoded: list[Decoded]) -> Table:
    rows = []
    for point in decoded:
        reading, computing = machine.step_floor(weights, point.num_sequences)
        rows.append([
            f"{point.num_sequences}",
            point.step.scaled(1e3).text(1),
            f"{1e3 * reading:.1f}",
            f"{1e3 * computing:.1f}",
            "reading" if reading > computing else "computing",
            f"{point.tokens_per_second:,.0f}",
        ])  # fmt: skip
    head = ["sequences", "a step, ms", "to read, ms", "to compute, ms", "the higher floor", "tokens/s"]
    return Table("Decode steps and their floors", head, rows, left=0)


def _draw(
    figure: Any,
    machine: Machine,
    weights: WeightShape,
    decoded: list[Decoded],
    line: Line,
    knee: float,
) -> None:
    left, right = figure.subplots(1, 2)
    counts = [point.num_sequences for point in decoded]
    floors = [machine.step_floor(weights, count) for count in counts]
    left.plot(counts, [point.tokens_per_second for point in decoded], label="measured", **line_style(0))
    for series, column, words in ((1, 0, "bound of reading weights"), (2, 1, "bound of computing")):
        style = {**line_style(series), "marker": ""}
        left.plot(
            counts, [n / floor[column] for n, floor in zip(counts, floors, strict=True)], label=words, **style
        )
    steps = [point.step.scaled(1e3) for point in decoded]
    right.errorbar(
        counts,
        [i.median for i in steps],
        yerr=error_bars(steps),
        capsize=2,
        label="measured",
        **line_style(0),
    )
    right.plot(
        counts,
        [1e3 * line.at(n) for n in counts],
        color=GREY,
        linestyle=":",
        label=f"{1e3 * line.intercept:.1f} ms + {1e3 * line.slope:.2f} ms each",
    )
    for axis in (left, right):
        plain_log(axis, "x")
        plain_log(axis, "y")
        if counts[0] <= knee <= counts[-1]:
            axis.axvline(knee, color=look(3).color, linewidth=1.2, label=f"knee: {knee:.0f} sequences")
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.minorticks_off()
        axis.set_xlabel("sequences in the batch")
        axis.legend(loc="best")
    left.set(title="speed", ylabel="tokens per second, all sequences")
    right.set(title="one step", ylabel="milliseconds")


EXPERIMENT = Experiment(
    "roofline",
    "What bounds decoding",
    "A step reads all weights once, however many sequences share it. When does computing take over?",
    run,
)
