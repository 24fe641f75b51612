"""Fits what adapters add to a simulated step to their kernels as measured, and checks it against whole runs.

    python -m quire_lab.benchmarks.lora_fit [--save src/quire/runner/devices/h200.json]

The samples are the shapes of results/lora_gpu.json: layers of q, k, v and o of llama-8b, ranks 8, 16, 32 and 64 in
turn. Each is held out once. The runs of results/h200_lora.json are not fitted to: the simulator plans the same requests
again.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.report import percentile
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build
from quire_lab.benchmarks import workloads
from quire_lab.fit.factors import nonnegative_least_squares
from quire_lab.simulate.devices import find_device
from quire_lab.simulate.lora_cost import LORA_FACTOR_NAMES, LoraCounts, ideal_lora_terms

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
RANKS = (8, 16, 32, 64)
INPUTS, OUTPUTS = (4096, 4096, 4096, 4096), (4096, 1024, 1024, 4096)  # q, k, v, o
LAUNCHES = 2  # of a layer: q, k and v are one
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def samples() -> tuple[np.ndarray, np.ndarray]:
    """[samples, factors] ideal seconds, and [samples] measured ones."""
    rates = find_device("simulated:h200").rates
    rows, seconds = [], []
    for shape in json.loads((RESULTS / "lora_gpu.json").read_text())["shapes"]:
        ranks = np.resize(RANKS, shape["adapters"])
        per_rank = sum(INPUTS) + sum(OUTPUTS)
        counts = LoraCounts(
            LAUNCHES,
            int(ranks[: shape["lines"]].sum()) * per_rank,
            int(np.resize(ranks, shape["lines"]).sum()) * per_rank,
            shape["lines"] * (sum(INPUTS) + 2 * sum(OUTPUTS)),
        )
        rows.append(ideal_lora_terms(rates, counts, num_bytes=2))
        seconds.append(shape["layer_us"] * 1e-6)
    return np.array(rows), np.array(seconds)


def fit(ideal: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return nonnegative_least_squares(ideal / seconds[:, None], np.ones(len(seconds)))


def errors(ideal: np.ndarray, seconds: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return np.abs(ideal @ factors / seconds - 1.0)


def fitted() -> tuple[dict[str, float], dict[str, Any]]:
    ideal, seconds = samples()
    factors = fit(ideal, seconds)
    held_out = []
    for index in range(len(seconds)):
        others = np.arange(len(seconds)) != index
        held_out.append(errors(ideal[index], seconds[index], fit(ideal[others], seconds[others])).item())
    within = sorted(errors(ideal, seconds, factors).tolist())
    summary = {
        "on": "NVIDIA H200",
        "sources": ["lora_gpu.json"],
        "num_samples": len(seconds),
        "median_error": round(percentile(within, 50), 4),
        "p90_error": round(percentile(within, 90), 4),
        "held_out_median_error": round(percentile(sorted(held_out), 50), 4),
        "held_out_p90_error": round(percentile(sorted(held_out), 90), 4),
    }
    return {
        name: float(f"{factor:.5g}") for name, factor in zip(LORA_FACTOR_NAMES, factors, strict=True)
    }, summary


def simulated_run(num_adapters: int, resident: bool) -> float:
    """Output tokens per second of the 512 requests of quire_lab.benchmarks.h200_lora. `resident`: in pages already."""
    settings = {"model": "llama-8b", "device": "simulated:h200", "enable_prefix_caching": False}
    engine = build(EngineConfig.of(**settings, enable_lora=num_adapters > 0)).engine
    names = [f"adapter-{index}" for index in range(num_adapters)]
    if engine.adapters is not None:
        for index, name in enumerate(names):
            engine.adapters.add(name, {}, {"r": RANKS[index % len(RANKS)], "target_modules": TARGETS})
    for _ in range(2 if resident else 1):
        started, before = engine.clock(), engine.stats.num_generated_tokens
        draw = random.Random(2)
        for index, (prompt, output) in enumerate(workloads.lengths("sharegpt", 512)):
            sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            adapter = names[draw.randrange(num_adapters)] if names else None
            engine.add(Request(f"{started} {index}", [7] * prompt, sampling, adapter=adapter))
        while engine.has_work:
            engine.step()
    return (engine.stats.num_generated_tokens - before) / (engine.clock() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", type=Path, help="the device's file, whose `lora` and `lora_fit` are written"
    )
    options = parser.parse_args()
    factors, summary = fitted()
    if options.save:
        record = json.loads(options.save.read_text())
        options.save.write_text(json.dumps({**record, "lora": factors, "lora_fit": summary}, indent=1) + "\n")
    fit = {"factors": factors, "fit": summary}
    runs = json.loads((RESULTS / "h200_lora.json").read_text())["runs"][1]["rows"]
    measured = {
        "base, first run": runs[0]["out_tok_s"],
        "base, adapters enabled": runs[1]["out_tok_s"],
        "100 adapters, in pages": runs[3]["out_tok_s"],
    }
    charged = dict.fromkeys(list(measured)[:2], simulated_run(0, resident=False))
    charged["100 adapters, in pages"] = simulated_run(100, resident=True)
    fit["checks"] = {
        what: {
            "measured_tok_s": round(rate),
            "charged_tok_s": round(charged[what]),
            "error": round(charged[what] / rate - 1, 3),
        }
        for what, rate in measured.items()
    }
    print(json.dumps(fit, indent=1))


if __name__ == "__main__":
    main()
