"""What a cost model is fitted to: files of measured steps, files of whole runs, or this machine, measured now."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.drive import Bench
from quire.bench.workload import Lengths, fixed, named
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import Built, build
from quire_lab.fit.factors import Sample
from quire_lab.fit.step_grid import StepCell, WatchedRunner, measure_grid
from quire_lab.simulate.build import model_costs
from quire_lab.simulate.cost_model import StepCounts

# the shared workloads' names for what weights/architectures.py calls otherwise, and their cases
SHAPE_NAMES = {"llama8b": "llama-8b", "llama1b": "llama-1b", "smol135m": "smollm2-135m", "opt13b": "opt-13b"}
CASES: dict[str, Callable[[], list[Lengths]]] = {
    "b1": lambda: fixed(128, 256, 1),
    "b64": lambda: fixed(128, 256, 64),
    "b256": lambda: fixed(128, 256, 256),
    "prefill": lambda: fixed(4096, 1, 64),
    "sharegpt": lambda: named("sharegpt", 1024, 0),
    "sharegpt512": lambda: named("sharegpt", 512, 0),
    "alpaca": lambda: named("alpaca", 2048, 0),
}
CPU_CELLS = tuple(
    StepCell(num_sequences, context)
    for num_sequences, context in (
        *((1, 16), (1, 128), (1, 512), (2, 64), (4, 32), (4, 256), (8, 64), (8, 256), (16, 32), (16, 128)),
        *((32, 16), (32, 64), (32, 128), (1, 1024), (2, 768)),
    )
)


@dataclass(frozen=True, slots=True)
class MeasuredSamples:
    """Samples, and in words what they are of."""

    samples: Sequence[Sample]
    on: str
    date: str
    sources: Sequence[str]


def read_samples(path: str, base: str, on_run: Callable[[str], None] = lambda what: None) -> MeasuredSamples:
    """A file of steps (from `benchmarks.step_times_gpu`) or of runs (from `benchmarks.h200`)."""
    try:
        record = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        if isinstance(record, list):
            return _of_runs(record, path, base, on_run)
        return _of_steps(record, path, base)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--samples {path}: cannot be read ({error})") from error
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"--samples {path}: holds neither measured steps nor runs ({error!r})") from error


def _of_steps(record: Mapping[str, Any], path: str, base: str) -> MeasuredSamples:
    samples = []
    for run in record["runs"]:
        model = _model(run["model"], base, **run.get("settings", {}))
        for what, counts, seconds in _joined(run["steps"]):
            samples.append(Sample(f"{run['model']} {what}", model, counts, seconds))
    return MeasuredSamples(samples, record["machine"], record["date"], (Path(path).name,))


def _joined(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[StepCounts], float]]:
    """Steps that compute one batch's prompts, where a file has them one by one, count together: see MeasuredSteps."""
    joined: list[tuple[str, list[StepCounts], float]] = []
    for step in steps:
        if not isinstance(step["counts"], Mapping):
            joined.append((step["what"], [StepCounts(**count) for count in step["counts"]], step["seconds"]))
            continue
        counts = StepCounts(**step["counts"])
        is_decode = counts.num_tokens == counts.num_rows
        # Where nothing was computed before a batch begins.
        if is_decode or counts.context_tokens == counts.num_tokens:
            joined.append((step["what"], [counts], step["seconds"]))
        else:
            what, before, seconds = joined[-1]
            joined[-1] = (what, [*before, counts], seconds + step["seconds"])
    return joined


def _of_runs(
    rows: Sequence[Mapping[str, Any]], path: str, base: str, on_run: Callable[[str], None]
) -> MeasuredSamples:
    """The scheduler plans every run again, which gives its steps; they are charged together."""
    samples = []
    for row in rows:
        name = SHAPE_NAMES[row["shape"]]
        built = build(_config(name, base, **row["settings"]))
        watched = built.engine.watch(WatchedRunner)
        for index, request in enumerate(CASES[row["case"]]()):
            sampling = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
            built.engine.add(Request(str(index), [index % 97 + 2] * request.num_prompt_tokens, sampling))
        while built.engine.has_work:
            built.engine.step()
        counts = [counts for counts, _ in watched.seen]
        model = _model(name, base, **row["settings"])
        samples.append(Sample(f"{name} {row['case']}, the whole run", model, counts, row["seconds"]))
        on_run(samples[-1].what)
    return MeasuredSamples(samples, rows[0]["machine"], rows[0]["date"], (Path(path).name,))


def measure_here(
    built: Built, cells: Sequence[StepCell], repeats: int, on_cell: Callable[[StepCell], None]
) -> list[Sample]:
    """Every step of the grid on the real engine that was built."""
    report = built.report
    model = model_costs(built.model, report.precision, report.pool.block_size)
    steps = measure_grid(Bench(built), cells, repeats, on_cell)
    return [Sample(one.what, model, one.counts, one.seconds) for one in steps]


def _config(model: str, base: str, **settings: Any) -> EngineConfig:
    return EngineConfig.of(**{**settings, "model": model, "device": f"simulated:{base}"})


def _model(name: str, base: str, **settings: Any) -> Any:
    built = build(_config(name, base, **settings))
    return model_costs(built.model, built.report.precision, built.report.pool.block_size)
