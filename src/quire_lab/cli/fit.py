"""`quire bench fit`: fits the simulator's cost model to this machine, or to files of measured steps."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from quire.bench.machine import PROBE_BYTES, best_seconds, cpu_name, cpu_read_rate, memory_bytes
from quire.bench.report import BenchReport
from quire.cli.flags import engine_settings
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build
from quire_lab.fit.factors import Fit, Sample, charged_errors, fit_factors
from quire_lab.fit.samples import CPU_CELLS, MeasuredSamples, measure_here, read_samples
from quire_lab.simulate.cost_model import FACTOR_NAMES, Rates
from quire_lab.simulate.devices import DEFAULT_DEVICE, device_names, find_device

PROBE_SIDE = 1024  # of the square matrices of the GEMM


def add_fit(parser: Parser) -> None:
    parser.add_argument(
        "--samples",
        nargs="+",
        metavar="FILE",
        help="fit to these measurements of another machine, instead of measuring this one",
    )
    parser.add_argument(
        "--base",
        default=DEFAULT_DEVICE,
        metavar="NAME",
        help=f"whose data sheet the measurements are compared with: {', '.join(device_names())} "
        f"(default: {DEFAULT_DEVICE})",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        metavar="FILE",
        help="measurements that are not part of the fit: how well it predicts them",
    )
    parser.add_argument(
        "--save", metavar="FILE.json", help="write the device, for --device simulated:FILE.json"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of every measured step (default: 3)"
    )


def fit(arguments: argparse.Namespace) -> BenchReport:
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}: give at least 1")
    if arguments.save is not None and not arguments.save.endswith(".json"):
        raise ConfigError(f"--save {arguments.save}: give a name that ends in .json")
    record, measured = _from_files(arguments) if arguments.samples else _from_here(arguments)
    rates = Rates(*(float(record.get(name, 0.0)) for name in ("bandwidth", "flops")))
    fitted = fit_factors(rates, measured.samples, by_data_sheet=bool(arguments.samples))
    record["factors"] = {name: float(f"{value:.5g}") for name, value in fitted.factors.as_dict().items()}
    errors = {name: round(value, 4) for name, value in fitted.summary().items()}
    record["fit"] = {
        "on": measured.on,
        "measured": measured.date,
        "fitted": datetime.now(UTC).date().isoformat(),
        "sources": list(measured.sources),
        **errors,
    }
    checks = _checked(arguments, rates, fitted) if arguments.check else []
    if checks:
        record["fit"]["checked_on"] = [Path(path).name for path in arguments.check]
        record["fit"]["checked_median_error"] = round(statistics.median(abs(error) for _, error in checks), 4)
    if arguments.save is not None:
        _save(record, arguments.save)
    return _report(record, fitted, checks)


def _checked(arguments: argparse.Namespace, rates: Rates, found: Fit) -> list[tuple[str, float]]:
    """What each of them is, and its error."""
    samples = [one for path in arguments.check for one in read_samples(path, arguments.base).samples]
    errors = charged_errors(rates, found.factors, samples)
    return [(one.what, error) for one, error in zip(samples, errors, strict=True)]


def _from_files(arguments: argparse.Namespace) -> tuple[dict[str, Any], MeasuredSamples]:
    base = find_device(f"simulated:{arguments.base}")
    with tqdm(disable=not sys.stderr.isatty(), unit="run", leave=False) as bar:
        several = [
            read_samples(path, arguments.base, lambda _: bar.update(1) and None) for path in arguments.samples
        ]
    measured = replace(
        several[0],
        samples=[sample for measured_file in several for sample in measured_file.samples],
        sources=[source for measured_file in several for source in measured_file.sources],
        date=max(measured_file.date for measured_file in several),
    )
    rates = base.rates
    record = {
        "title": base.title,
        "on_gpu": base.on_gpu,
        "memory_bytes": base.memory_bytes,
        "bandwidth": rates.bandwidth,
        "flops": rates.flops,
        "link_bandwidth": rates.link_bandwidth,
        "link_latency": rates.link_latency,
        "host_link": rates.host_link,
        "source": base.source,
    }
    if base.lora_fit and not base.derived_from:  # quire_lab.benchmarks.lora_fit measured adapters apart
        record |= {"lora": base.lora.as_dict(), "lora_fit": dict(base.lora_fit)}
    return record, measured


def _from_here(arguments: argparse.Namespace) -> tuple[dict[str, Any], MeasuredSamples]:
    settings = {"device": "cpu", "enable_prefix_caching": False, **engine_settings(arguments)}
    if settings["device"] != "cpu":
        raise ConfigError(
            "a GPU is fitted from files: run quire_lab.benchmarks.step_times_gpu there and give its output to --samples"
        )
    record = {
        "title": f"{cpu_name()}",
        "on_gpu": False,
        "memory_bytes": memory_bytes(),
        "bandwidth": float(f"{cpu_read_rate():.4g}"),
        "flops": float(f"{_gemm_rate():.4g}"),
        "host_link": float(f"{_copy_rate():.4g}"),
        "source": "measured: a matrix times a vector, and float32 products",
    }
    announce_compiling()
    built = build(EngineConfig.of(**settings))
    try:
        with tqdm(
            total=arguments.repeats * len(CPU_CELLS),
            disable=not sys.stderr.isatty(),
            unit="batch",
            leave=False,
        ) as bar:
            samples = measure_here(built, CPU_CELLS, arguments.repeats, lambda _: bar.update(1) and None)
    finally:
        built.engine.close()
    report = built.report
    on = f"{cpu_name()}, {report.start.num_threads} threads, {report.model} in {report.precision.format_name}"
    return record, MeasuredSamples(samples, on, datetime.now(UTC).date().isoformat(), ("this machine",))


def _save(record: dict[str, Any], path: str) -> None:
    try:
        Path(path).expanduser().write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written ({error})") from error


def _report(record: dict[str, Any], fitted: Fit, checks: Sequence[tuple[str, float]]) -> BenchReport:
    samples = fitted.samples
    units = dict.fromkeys(("step", "layer", "row", "start"), "µs")
    rows = [("device", record["title"]), ("fitted on", record["fit"]["on"])]
    for name in FACTOR_NAMES:
        value = getattr(fitted.factors, name)
        rows.append((name, f"{1e6 * value:.1f} µs" if name in units else f"{value:.2f} × the ideal"))
    summary = fitted.summary()
    rows.append(("samples", f"{summary['num_samples']:.0f}"))
    for name in ("", "held_out_"):
        what = "error, held out" if name else "error"
        rows.append(
            (what, f"median {summary[f'{name}median_error']:.1%}, p90 {summary[f'{name}p90_error']:.1%}")
        )
    worst = sorted(zip(fitted.held_out, samples, strict=True), key=lambda pair: -pair[0])[:3]
    notes = ["worst held out: " + "; ".join(f"{_what(sample)} {error:.0%}" for error, sample in worst)]
    if fitted.left_out:
        notes.append("left out, disturbed: " + "; ".join(map(_what, fitted.left_out)))
    if checks:
        notes.append("foretold, not fitted: " + "; ".join(f"{what} {error:+.0%}" for what, error in checks))
    each = [
        {"what": sample.what, "seconds": sample.seconds, "error": error, "held_out_error": held_out}
        for sample, error, held_out in zip(samples, fitted.errors, fitted.held_out, strict=True)
    ]
    return BenchReport(
        "fit",
        {},
        {"device": record, "samples": each, "checked": [list(check) for check in checks]},
        rows,
        notes,
    )


def _what(sample: Sample) -> str:
    return f"{sample.what} ({1e3 * sample.seconds:.3g} ms)"


def _copy_rate() -> float:
    """Bytes per second of a copy in memory: the best of many."""
    source, target = torch.ones(PROBE_BYTES // 4), torch.empty(PROBE_BYTES // 4)
    return PROBE_BYTES / best_seconds(lambda: target.copy_(source))


def _gemm_rate() -> float:
    """Float32 operations per second of a GEMM: the best of many."""
    left, right = torch.ones(PROBE_SIDE, PROBE_SIDE), torch.ones(PROBE_SIDE, PROBE_SIDE)
    return 2 * PROBE_SIDE**3 / best_seconds(lambda: left @ right)
