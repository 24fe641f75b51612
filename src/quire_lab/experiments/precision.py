"""`precision`: what every number format costs in quality and gains in memory and speed, on the user's model."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.drive import Bench
from quire.bench.table import in_bytes
from quire.bench.workload import Lengths
from quire.core.errors import ConfigError
from quire.engine.build import set_threads
from quire.models.model import DecoderModel
from quire.models.weight_shape import VECTORS, WeightGroup, weight_groups
from quire.weights.source import Source
from quire_lab.experiments.precision_claims import Claims, claims_of
from quire_lab.measure.compare import interleave
from quire_lab.measure.engines import in_words, opened_in, step_seconds, warm_up
from quire_lab.measure.formats import FORMATS, check_formats, decoded_matrices, format_named, relative_error
from quire_lab.measure.quality import (
    MAX_TOKENS,
    KeptLogits,
    Quality,
    each_logits,
    kv_dtype_of,
    quality_of,
    texts,
    total,
)
from quire_lab.report.experiment import Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, error_bars, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, Ratio

REFERENCE = "none"
CONTEXT = 16  # tokens before the decode steps that are timed


@dataclass(frozen=True, slots=True)
class FormatSpeed:
    """Tokens a second."""

    decode: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One number format on the model."""

    name: str
    weight_error: float  # relative, over the linear layers
    quality: Quality
    groups: tuple[WeightGroup, ...]
    decode: Interval
    prefill: Interval
    decode_ratio: Ratio | None  # over the reference; None: this is the reference
    prefill_ratio: Ratio | None

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def linear_bits(self) -> float:
        """Bits per weight of the layers' matrices, without embedding and head."""
        inner = [group for group in self.groups if group.part in ("attention", "MLP")]
        return 8 * sum(group.num_bytes for group in inner) / sum(group.num_weights for group in inner)

    @property
    def precise(self) -> str:
        return ", ".join(g.part for g in self.groups if g.is_precise and g.part != VECTORS) or "–"

    def record(self) -> dict[str, Any]:
        return {
            "weight_error": self.weight_error,
            **self.quality.record(),
            "resident_bytes": self.num_bytes,
            "bits_per_linear_weight": self.linear_bits,
            "groups": [
                {"part": g.part, "scheme": g.scheme, "bits": g.bits, "bytes": g.num_bytes}
                for g in self.groups
            ],
            "decode_tokens_per_second": self.decode.record(),
            "prefill_tokens_per_second": self.prefill.record(),
            "decode_over_none": self.decode_ratio.record() if self.decode_ratio else None,
            "prefill_over_none": self.prefill_ratio.record() if self.prefill_ratio else None,
        }


class _Reference:
    """The model in full precision: open while every other format is measured beside it."""

    def __init__(self, setup: Setup, bench: Bench, model: DecoderModel, folder: Path) -> None:
        self.bench, self.model = bench, model
        self.kept = KeptLogits(folder)
        self.sequences, self.origin = _sequences(setup, bench)
        self.speeds: list[FormatSpeed] = []  # of all rounds

    def quality(self, model: DecoderModel, kv_dtype: str) -> Quality:
        return total(quality_of(self.kept, each_logits(model, self.sequences, kv_dtype), self.sequences))


def run(setup: Setup) -> Finding:
    names = _names(setup)
    settings = {"device": "cpu", "enable_prefix_caching": False, "steps_in_flight": 0, "quantization": "none"}
    with (
        tempfile.TemporaryDirectory() as folder,
        opened_in(setup, format_named(REFERENCE), **settings) as (bench, model),
        setup.progress(len(names) + 2, "formats") as bar,
    ):
        warm_up(bench)
        reference = _Reference(setup, bench, model, Path(folder))
        bar.note(f"{REFERENCE}: logits of {len(reference.sequences)} texts")
        for index, logits in enumerate(each_logits(model, reference.sequences, "float32")):
            reference.kept.keep(index, logits)
        bar()
        measured: list[Measured] = []
        for name in names:
            bar.note(name)
            if name == "checkpoint" and not bench.built.source.encodings:
                bar()
                continue
            with opened_in(setup, format_named(name), **settings) as (other, other_model):
                warm_up(other)
                measured.append(_measure(setup, name, reference, other, other_model, len(names)))
            bar()
        measured.insert(0, _of_reference(setup, reference))
        bar.note("the claims")
        set_threads(None, bench.built.report.precision)
        claims = claims_of(setup, bench.built.source, model, reference.sequences, reference.kept)
        bar()
        words = in_words(bench)
        return _finding(setup, measured, claims, reference, words, bench.built.source)


def _names(setup: Setup) -> list[str]:
    if str(setup.engine.get("device", "cpu")) not in ("auto", "cpu"):
        raise ConfigError(f"precision runs on the CPU, not on {setup.engine['device']}: leave out --device")
    if setup.engine.get("quantization", "auto") != "auto":
        raise ConfigError(
            "precision compares all number formats: choose them with --formats, not --quantization"
        )
    check_formats(setup.formats)
    chosen = setup.formats or setup.pick(
        ("checkpoint", "int8", "int4-g64", "nf4-b64n"), tuple(FORMATS), tuple(FORMATS)
    )
    return [name for name in chosen if name != REFERENCE]


def _sequences(setup: Setup, bench: Bench) -> tuple[list[list[int]], str]:
    count = setup.contexts or setup.pick(1, 8, 50)
    most = min(MAX_TOKENS, bench.built.report.limits.max_model_len)
    if bench.tokenizer is None:
        requests = bench.requests([Lengths(min(64, most), 1)] * count)
        return [
            request.prompt_token_ids for request in requests
        ], "random tokens (the model has no tokenizer)"
    chosen, origin = texts(setup.data, count)
    return [bench.tokenizer.encode(text, add_special_tokens=False)[:most] for text in chosen], origin


def _measure(
    setup: Setup, name: str, reference: _Reference, bench: Bench, model: DecoderModel, num_formats: int
) -> Measured:
    precision = bench.built.report.precision
    set_threads(None, precision)
    quality = reference.quality(model, kv_dtype_of(precision.format))
    error = relative_error(decoded_matrices(reference.model), decoded_matrices(model))
    variants = {
        REFERENCE: partial(_speed, setup, reference.bench),
        name: partial(_speed, setup, bench),
    }
    rounds = interleave(setup, variants, decode, f"{name} beside {REFERENCE}", share=1 / num_formats)
    reference.speeds.extend(rounds.runs[REFERENCE])
    return Measured(
        name,
        error,
        quality,
        weight_groups(model),
        rounds.interval(name, decode),
        rounds.interval(name, prefill),
        rounds.ratio(name, REFERENCE, decode),
        rounds.ratio(name, REFERENCE, prefill),
    )


def decode(speed: FormatSpeed) -> float:
    return speed.decode


def prefill(speed: FormatSpeed) -> float:
    return speed.prefill


def _of_reference(setup: Setup, reference: _Reference) -> Measured:
    """Its own row; the speed is that of all rounds in which other formats were measured beside it."""
    speeds = reference.speeds or [_speed(setup, reference.bench)]
    return Measured(
        REFERENCE,
        0.0,
        reference.quality(reference.model, "float32"),
        weight_groups(reference.model),
        Interval.of([speed.decode for speed in speeds]),
        Interval.of([speed.prefill for speed in speeds]),
        None,
        None,
    )


def _speed(setup: Setup, bench: Bench) -> FormatSpeed:
    """One sequence: a prompt, then decode steps."""
    report = bench.built.report
    set_threads(None, report.precision)
    num_tokens = max(1, min(setup.pick(16, 64, 128), report.limits.max_model_len // 2))
    steps = step_seconds(bench, 1, CONTEXT, setup.pick(2, 4, 8))
    seconds = bench.serve(bench.requests([Lengths(num_tokens, 1)])).seconds
    return FormatSpeed(1 / statistics.median(steps), num_tokens / seconds)


def _finding(
    setup: Setup, measured: list[Measured], claims: Claims, reference: _Reference, words: str, source: Source
) -> Finding:
    best = min(measured[1:], key=lambda row: row.quality.mean_kl, default=measured[0])
    least = min(measured, key=lambda row: row.num_bytes)
    take_away = (
        f"Nearest to {REFERENCE}: {best.name}, mean KL {best.quality.mean_kl:.4f}, "
        f"{100 * best.quality.same_share:.1f} % equal greedy tokens. Smallest: {least.name}, "
        f"{in_bytes(least.num_bytes)} against {in_bytes(measured[0].num_bytes)}."
    )
    schemes = sorted({str(encoded.scheme) for encoded in source.encodings.values()})
    notes = [
        words.replace("float32", "every format"),
        f"quality: {reference.origin}, {sum(map(len, reference.sequences)):,} tokens; KL divergence in nats from "
        f"{REFERENCE}, over all positions; equal greedy tokens: the same most likely token",
        "bits per weight: of attention and MLP, from the stored bytes; resident: everything that is kept",
        f"speed: one sequence, each format in turns with {REFERENCE}; medians with {CONFIDENCE_WORDS} intervals, a "
        "question mark where the ratio is not resolved on this machine",
        *claims.notes,
    ]
    if schemes:
        notes.append(
            f"the checkpoint is quantized already ({', '.join(schemes)}): {REFERENCE} is its decoded form, and what "
            "other formats lose is lost in addition"
        )
    picture = Picture(
        "precision",
        "What number formats cost",
        take_away,
        lambda figure: _draw(figure, measured, claims),
        height=8.0,
    )
    results = {
        "formats": {row.name: row.record() for row in measured},
        "claims": claims.record(),
    }
    settings = {
        "seed": setup.seed,
        "contexts": len(reference.sequences),
        "formats": [row.name for row in measured],
        "model": words,
    }
    tables = [_quality_table(measured), _memory_table(measured), *claims.tables()]
    return Finding(take_away, tables, [picture], results, settings, claims.checks, notes)


def _quality_table(measured: Sequence[Measured]) -> Table:
    head = ["format", "weight error", "perplexity", "mean KL", "largest KL", "equal greedy tokens"]
    rows = [
        [
            row.name,
            f"{row.weight_error:.4f}",
            f"{row.quality.perplexity:.3f}",
            f"{row.quality.mean_kl:.5f}",
            f"{row.quality.largest_kl:.3f}",
            f"{100 * row.quality.same_share:.1f} %",
        ]
        for row in measured
    ]
    return Table("Quality", head, rows)


def _memory_table(measured: Sequence[Measured]) -> Table:
    head = [
        "format",
        "precise",
        "bits per weight",
        "resident",
        "decode tok/s",
        "over none",
        "prefill tok/s",
        "over none",
    ]
    rows = [
        [
            row.name,
            row.precise,
            f"{row.linear_bits:.3f}",
            in_bytes(row.num_bytes),
            row.decode.text(1),
            row.decode_ratio.text() if row.decode_ratio else "–",
            row.prefill.text(0),
            row.prefill_ratio.text() if row.prefill_ratio else "–",
        ]
        for row in measured
    ]
    return Table("Memory and speed", head, rows, left=2)


def _draw(figure: Any, measured: Sequence[Measured], claims: Claims) -> None:
    (kl, error), (speed, outliers) = figure.subplots(2, 2)
    others = [row for row in measured if row.quality.mean_kl > 0]
    kl.barh(range(len(others)), [row.quality.mean_kl for row in others], **bar_style(1))
    kl.set_yticks(range(len(others)), [f"{row.name}, {row.linear_bits:.2f} bits" for row in others])
    kl.invert_yaxis()
    if others:
        plain_log(kl, "x")
    kl.set(title="divergence and bits per weight", xlabel="mean KL to none")
    names = [row.name for row in measured]
    places = range(len(names))
    error.barh(places, [row.weight_error for row in measured], **bar_style(0))
    error.set_yticks(places, names)
    error.invert_yaxis()
    error.set(title="relative weight error", xlabel="‖decoded − weight‖ / ‖weight‖")
    rates = [row.decode for row in measured]
    speed.barh(places, [rate.median for rate in rates], xerr=error_bars(rates), capsize=2, **bar_style(2))
    speed.set_yticks(places, names)
    speed.invert_yaxis()
    speed.set(title="decode speed, one sequence", xlabel="tokens per second")
    claims.draw(outliers)


EXPERIMENT = Experiment(
    "precision",
    "What number formats cost",
    "Weight error, divergence, equal tokens, bytes and speed of every number format, and the claims made for them.",
    run,
)
