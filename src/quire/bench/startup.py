"""Startup: fresh processes, time from process start to first token, and resident memory."""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quire.bench.report import BenchReport, check_positive, summary
from quire.bench.table import in_bytes
from quire.core.errors import QuireError

CHILD = "quire.bench.first_token"
PROMPT = "The capital of France is"
TARGET_SECONDS, TARGET_BYTES = 3.0, 700e6  # of the built-in model, cached
STAGES = ("interpreter", "import torch", "import quire", "load", "first token")


@dataclass(frozen=True, slots=True)
class StartupPlan:
    settings: dict[str, Any] = field(default_factory=dict)  # as LLM(...) takes them
    iterations: int = 3
    num_tokens: int = 64
    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_positive(self, "iterations", "num_tokens")


def run_startup(plan: StartupPlan) -> BenchReport:
    """One warm-up run (files come from disk, weights may be converted), then `iterations` measured ones."""
    cold = _start_once(plan)
    runs = [_start_once(plan) for _ in range(plan.iterations)]
    memory = {name: max(run["resident_bytes"][name] for run in runs) for name in runs[0]["resident_bytes"]}
    results = {
        "first_token_seconds": summary([run["seconds"] for run in runs]),
        "first_run_seconds": cold["seconds"],
        "stages": {stage: summary([run["stages"][stage] for run in runs]) for stage in STAGES},
        "resident_bytes": memory,
        "num_tokens": plan.num_tokens,
        "runs": runs,
    }
    settings = {"settings": plan.settings, "iterations": plan.iterations, "num_tokens": plan.num_tokens}
    return BenchReport("startup", settings, results, _rows(results, plan))


def _start_once(plan: StartupPlan) -> dict[str, Any]:
    plan_text = json.dumps({"settings": plan.settings, "prompt": PROMPT, "num_tokens": plan.num_tokens})
    started = time.time()
    try:
        child = subprocess.run(
            [sys.executable, "-m", CHILD, plan_text],
            capture_output=True,
            text=True,
            timeout=plan.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise QuireError(
            f"the engine did not start within {plan.timeout:.0f} s: check its settings"
        ) from error
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        reason = re.sub(r"^quire\.core\.errors\.\w+: ", "", last)
        raise QuireError(f"a fresh process could not start the engine: {reason}")
    report = json.loads(child.stdout.strip().splitlines()[-1])
    clock = report["clock"]
    names = ("started", "torch_ready", "imported", "loaded", "first_token")
    marks = [started, *(clock[name] for name in names)]
    stages = {stage: after - before for stage, (before, after) in zip(STAGES, pairwise(marks), strict=True)}
    return {
        "seconds": clock["first_token"] - started,
        "stages": stages,
        "decode_seconds": clock["ended"] - clock["first_token"],
        "resident_bytes": report["resident_bytes"],
    }


def _rows(results: dict[str, Any], plan: StartupPlan) -> list[tuple[str, str]]:
    total, memory = results["first_token_seconds"], results["resident_bytes"]
    model = plan.settings.get("model") or "the built-in model"
    rows = [
        ("model", f"{model}, {plan.iterations} fresh processes"),
        (
            "first token",
            f"{total['median']:.2f} s median, {total['min']:.2f} s best after the process's start",
        ),
        ("  first run", f"{results['first_run_seconds']:.2f} s"),
    ]
    rows += [(f"  {stage}", f"{seconds['median']:.2f} s") for stage, seconds in results["stages"].items()]
    if memory:
        own, mapped = memory.get("anonymous", 0), memory.get("mapped_files", 0)
        rows += [
            ("memory", f"{in_bytes(memory['current'])} resident after {results['num_tokens']} tokens"),
            ("  of which", f"{in_bytes(own)} its own, {in_bytes(mapped)} mapped files"),
            ("  at its peak", in_bytes(memory["peak"])),
        ]
    if plan.settings.get("model") is None:
        rows.append(("targets", _verdict(total["median"], memory)))
    return rows


def _verdict(seconds: float, memory: dict[str, int]) -> str:
    met = {f"under {TARGET_SECONDS:.0f} s": seconds < TARGET_SECONDS}
    if memory:
        met[f"under {in_bytes(TARGET_BYTES)}"] = memory["current"] < TARGET_BYTES
    return "; ".join(f"{target}: {'met' if is_met else 'missed'}" for target, is_met in met.items())
