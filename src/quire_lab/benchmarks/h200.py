"""The shared workloads on one GPU: `python -m quire_lab.benchmarks.h200 --shapes llama8b --cases b1,b64 --output FILE`.

Each shape runs in a process of its own, random weights, prefix cache off, half the requests greedy and half at
temperature 0.8 with top-p 0.95. `start_s` is from the process's start to its first token. A case is run
`--repeats` times after a short warm-up and its median is kept. `h200 lora` measures adapters:
see h200_lora.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from quire.core.request import Request
from quire_lab.benchmarks import floors, workloads

WARM_UP = 8  # output tokens


def main() -> None:
    options = _options()
    if options.child:
        _run_shape(options)
        return
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        rows += _spawn(shape, options)
        if options.output:
            Path(options.output).write_text(json.dumps(rows, indent=1) + "\n")
    _print(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(workloads.SHAPES))
    parser.add_argument("--cases", help="of every shape; default: the compared ones")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--settings", default="{}", help="JSON, passed to LLM")
    parser.add_argument("--batching", help="continuous, static or dynamic: the same in --settings")
    parser.add_argument("--max-num-seqs", type=int, help="the same in --settings")
    parser.add_argument("--kv-cache-dtype", help="the same in --settings, such as int8")
    parser.add_argument("--profile", help="folder for a trace of some steps of each case")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def _spawn(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        result = part_file(options.output, folder)
        command = [
            sys.executable,
            "-m",
            "quire_lab.benchmarks.h200",
            "--child",
            shape,
            "--output",
            str(result),
        ]
        command += ["--cases", options.cases or ",".join(workloads.ROWS[shape])]
        command += ["--repeats", str(options.repeats), "--settings", _settings(options)]
        if options.profile:
            command += ["--profile", options.profile]
        done = subprocess.run([*command, "--began", repr(time.time())], check=False)
        if done.returncode:
            print(f"{shape}: ended with {done.returncode}", flush=True)
        return take_rows(result)


def part_file(output: str | None, folder: str) -> Path:
    """Where a child writes its rows: beside the output, so that a run that is cut off leaves them there."""
    return Path(f"{output}.part" if output else f"{folder}/rows.json")


def take_rows(part: Path) -> list[dict[str, Any]]:
    """What a child has written, however it ended."""
    rows = json.loads(part.read_text()) if part.exists() else []
    part.unlink(missing_ok=True)
    return rows


def _settings(options: argparse.Namespace) -> str:
    """With the flags that stand for a setting."""
    names = ("batching", "max_num_seqs", "kv_cache_dtype")
    named = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in named.items() if value is not None}
    return json.dumps({**json.loads(options.settings), **given})


def _run_shape(options: argparse.Namespace) -> None:
    import torch

    from quire import LLM, SamplingParams

    shape = options.child
    settings = {"enable_prefix_caching": False, **json.loads(options.settings)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(workloads.SHAPES[shape]))
        llm = LLM(folder, load_format="dummy", served_model_name=shape, use_tqdm=False, **settings)
        llm.generate(
            [[11, 12, 13]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False
        )
        start_s = time.time() - options.began
        print(*llm.report.lines(), f"first token after {start_s:.1f} s", sep="\n", flush=True)
        rows = []
        for case in options.cases.split(","):
            runs = [_run_case(llm, shape, case, options.profile) for _ in range(options.repeats)]
            best = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
            row = {
                **best,
                "all_seconds": [run["seconds"] for run in runs],
                "start_s": start_s,
                "settings": settings,
                "date": date.today().isoformat(),
                "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            }
            rows.append(row)
            _print([row])
            Path(options.output).write_text(json.dumps(rows))


def _run_case(llm: Any, shape: str, case: str, profile: str | None) -> dict[str, Any]:
    from quire import SamplingParams

    kind, count = workloads.CASES[case]
    sizes = workloads.lengths(kind, count)
    prompts = workloads.prompts(sizes, workloads.SHAPES[shape]["vocab_size"])
    greedy = SamplingParams(temperature=0, ignore_eos=True, seed=0)
    drawn = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=0)
    samplings = [
        (greedy if index % 2 == 0 else drawn).changed(max_tokens=output, seed=index)
        for index, (_, output) in enumerate(sizes)
    ]
    llm.generate(prompts[:2], greedy.changed(max_tokens=WARM_UP), use_tqdm=False)
    if profile:
        _profile(llm, prompts, samplings, Path(profile, f"{shape}-{case}.txt"))
    stats = llm.engine.stats
    before = (
        stats.num_steps,
        stats.schedule_seconds,
        stats.commit_seconds,
        llm.engine.scheduler.stats.num_preemptions,
        getattr(llm.engine.scheduler.policy, "num_wasted_tokens", 0),
    )
    began = time.perf_counter()
    outputs = llm.generate(prompts, samplings, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_output = sum(len(completion.outputs[0].token_ids) for completion in outputs)
    assert num_output == sum(output for _, output in sizes), "an answer is not as long as it was asked to be"
    num_steps = stats.num_steps - before[0]
    longest = max(output for _, output in sizes)
    return {
        "shape": shape,
        "case": case,
        "out_tok_s": num_output / seconds,
        "ms_per_step": 1e3 * seconds / longest if kind.startswith("fixed") else 1e3 * seconds / num_steps,
        "floor_ms_per_step": floors.floor(shape, case)["ms_per_step"],
        "prompt_tok_s": sum(prompt for prompt, _ in sizes) / seconds,
        "seconds": seconds,
        "num_steps": num_steps,
        "schedule_ms": 1e3 * (stats.schedule_seconds - before[1]) / num_steps,
        "commit_ms": 1e3 * (stats.commit_seconds - before[2]) / num_steps,
        "num_preemptions": llm.engine.scheduler.stats.num_preemptions - before[3],
        "ended_tokens": getattr(llm.engine.scheduler.policy, "num_wasted_tokens", 0) - before[4],
    }


def _profile(llm: Any, prompts: list[list[int]], samplings: list[Any], path: Path) -> None:
    """Where the device's time goes in the middle of a case: a table of kernels."""
    skipped, timed = (4, 8) if samplings[0].max_tokens == 1 else (30, 20)  # prompts alone are soon over
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.add(Request(f"profile-{index}", prompt, sampling))
    for _ in range(skipped):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(timed):
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(timed):
            engine.step()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    averages = seen.key_averages()
    path.write_text(
        f"{timed} steps just before these, without a profiler: {1e3 * seconds:.1f} ms\n"
        + averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60)
        + averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    )
    for index in range(len(prompts)):
        engine.abort(f"profile-{index}")
    while engine.has_work:
        engine.step()


def _floor(row: dict[str, Any]) -> str:
    """Of steps of equal size: `floors` says what is counted, of a mixture the experts that are chosen."""
    floor = row.get("floor_ms_per_step")
    return f"(floor {floor:.3f}) " if floor and row["case"].startswith("b") else ""


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['shape']:9} {row['case']:9} {row['out_tok_s']:10,.0f} tok/s {row['ms_per_step']:8.3f} ms/step "
            f"{_floor(row)}"
            f"{row['prompt_tok_s']:9,.0f} prompt tok/s  start {row['start_s']:5.1f} s  "
            f"plan {row['schedule_ms']:.3f} commit {row['commit_ms']:.3f} ms, {row['num_preemptions']} preempted",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if sys.argv[1:2] == ["lora"]:
        from quire_lab.benchmarks import h200_lora

        h200_lora.main(sys.argv[2:])
    else:
        main()
