"""Which steps of a workload took longer than they should.

    python -m quire_lab.benchmarks.slow_steps_gpu --shape opt13b

Runs `sharegpt` step by step on a GPU with random weights, and puts each step's time beside what the simulator charges
for such a step on an H200. Steps that took far longer were held up by something: a kernel that was compiled or planned,
memory that was pinned, a launch that waited. `launch_ms` is how long the host took to launch the step: it is launched
while the one before it runs, so a slow launch shows in the time of the step before. A process's first steps count, too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.request import Request
from quire.core.step import Step, StepResult
from quire_lab.benchmarks import workloads
from quire_lab.simulate.cost_model import StepCounts, count_step

SIMULATED = {"llama8b": "llama-8b", "opt13b": "opt-13b"}
FAR = 0.02  # seconds above what is charged


class Watched:
    """A runner that notes when steps are launched and when they are over."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.launched: dict[
            int, tuple[StepCounts, float]
        ] = {}  # by step id: what it holds, seconds of launching
        self.over: list[tuple[int, float]] = []

    def launch(self, step: Step) -> None:
        began = time.perf_counter()
        self._runner.launch(step)
        self.launched[step.step_id] = count_step(step), time.perf_counter() - began

    def collect(self) -> StepResult:
        result: StepResult = self._runner.collect()
        self.over.append((result.step_id, time.perf_counter()))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama8b", choices=SIMULATED)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one")
    record = measure(options.shape, options.requests)
    for row in record["slow"]:
        print(json.dumps(row))
    print(
        f"{record['num_steps']} steps in {record['seconds']:.1f} s, {record['charged_seconds']:.1f} s charged; "
        f"{len(record['slow'])} slow ones took {record['lost_seconds']:.1f} s more than they should"
    )
    if options.output:
        options.output.write_text(json.dumps({**describe_origin(), **record}, indent=1) + "\n")


def measure(shape: str, num_requests: int, device: str = "cuda") -> dict[str, Any]:
    simulated: Any = LLM(SIMULATED[shape], device="simulated:h200", use_tqdm=False).engine._runner
    charge = simulated._cost.seconds
    config = workloads.SHAPES[shape]
    sizes = workloads.lengths("sharegpt", num_requests)
    prompts = workloads.prompts(sizes, config["vocab_size"])
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with LLM(
            folder, load_format="dummy", device=device, use_tqdm=False, enable_prefix_caching=False
        ) as llm:
            llm.generate(prompts[:2], greedy.changed(max_tokens=8), use_tqdm=False)
            watched = llm.engine.watch(Watched)
            for number, (prompt, (_, output)) in enumerate(zip(prompts, sizes, strict=True)):
                drawn = {"temperature": 0.8, "top_p": 0.95} if number % 2 else {}
                llm.engine.add(
                    Request(str(number), prompt, greedy.changed(max_tokens=output, seed=number, **drawn))
                )
            began = time.perf_counter()
            while llm.engine.has_work:
                llm.engine.step()
            stats = llm.engine.scheduler.stats
            return {
                "shape": shape,
                "requests": num_requests,
                "preemptions": stats.num_preemptions,
                "swaps_out": stats.num_swaps_out,
                **compare(watched, began, charge),
            }


def compare(watched: Watched, began: float, charge: Any) -> dict[str, Any]:
    rows, before = [], began
    for number, (step_id, at) in enumerate(watched.over):
        counts, launching = watched.launched[step_id]
        row = {
            "step": number,
            "rows": counts.num_rows,
            "tokens": counts.num_tokens,
            "moved_blocks": counts.num_moves,
            "ms": round(1e3 * (at - before), 1),
            "charged_ms": round(1e3 * charge(counts), 1),
            "launch_ms": round(1e3 * launching, 1),
        }
        rows.append(row)
        before = at
    slow = [row for row in rows if row["ms"] - row["charged_ms"] > 1e3 * FAR]
    return {
        "num_steps": len(rows),
        "seconds": before - began,
        "charged_seconds": sum(row["charged_ms"] for row in rows) / 1e3,
        "lost_seconds": sum(row["ms"] - row["charged_ms"] for row in slow) / 1e3,
        "slow": slow,
    }


if __name__ == "__main__":
    main()
