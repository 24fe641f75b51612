"""What a neighbour costs: `python -m quire_lab.benchmarks.gpu_sharing [--modes …] [--output FILE]`, and the processes
of `quire bench lab gpu-sharing`.

Two real engines: one decodes answers, the other mostly computes prompts. On a GPU they run alone, in time slices, in
time slices with green contexts of half of the processors each (`--sm-share`), under MPS, and under MPS with parts of
the processors (`--splits`). On a CPU (`--device cpu`) they run alone, on the same two cores, and on one each.

Others have one engine at a time: `share` has the whole GPU, then a green context of half of its SMs. `steps` times
decodes and prompts in green contexts of 10 to 100 % (`quire_lab.fit.sm_shares` fits and predicts them). In `fault` a
neighbour under MPS faults, after which another engine starts. `mig` compares the table of NVML with ours.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from quire.bench.report import percentile
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.observe.host import MPS_PERCENTAGE
from quire_lab.benchmarks import workloads

CALIBRATION = (10, 20, 36, 75, 100)  # percent of the SMs; others are tested: quire_lab.fit.sm_shares
PERCENTAGES = (14, 29, 43, 57, *CALIBRATION)
SPLITS = "50:50,70:30,90:10,95:5"  # percent of the engine that decodes, and of the other
WITHOUT_MPS = ("alone", "time-slices", "green-contexts", "share", "steps", "mig")
MODES = (*WITHOUT_MPS, "mps", "mps-percent", "fault")
CPU_MODES = ("alone", "same-cores", "own-cores")
CELLS = ((16, 512, 16), (1, 2048, 1))  # sequences, tokens before, decodes: what `steps` and `share` time
REPEATS = 3
SETTLE_SECONDS = 0.7  # both engines are busy before they are counted
START_SECONDS = 120.0  # at most: kernels may have to be compiled
PAIRS_AT_ONCE = 3  # whose engines are in memory together
MOST_OF_A_REASON = 400  # characters
FAULT_SECONDS = 3.0  # from the start to the neighbour's fault
END_SECONDS = 60.0  # after its time, an engine that does not end is killed


@dataclass(frozen=True, slots=True)
class Role:
    """What an engine is kept busy with."""

    shape: str
    sequences: int
    prompt_tokens: int
    output_tokens: int
    memory: float = 0.0  # gpu_memory_utilization: PAIRS_AT_ONCE fit beside each other


ROLES = {
    "decodes": Role("llama8b", 32, 128, 256, memory=0.2),
    "prompts": Role("llama1b", 4, 2048, 4, memory=0.08),
}
STEP_SHAPE = "llama8b"
CPU_ROLES = {"decodes": Role("", 8, 32, 64), "prompts": Role("", 2, 256, 4)}  # of the built-in model
WARM_UP = 40  # steps; a quarter on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--modes", help="comma-separated; default: all of the device")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--splits", default=SPLITS, help="of mps-percent: decodes:prompts, in percent")
    parser.add_argument("--layers", type=int, help="of the model of steps and share (default: all 32)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        measure(options)
        return
    name, _, role = options.child.partition(":")
    path = options.folder / (f"{name}.json" if role == "steps" else f"{name}-{role}.json")
    with record_failure(path, name if role == "steps" else role):
        if role == "fault":
            fault(options.folder, name)
        elif role == "steps":
            steps_child(options.folder, name, options.layers)
        else:
            child(name, role, options.device, options.folder, options.seconds)


@contextmanager
def record_failure(path: Path, role: str, end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """A process whose engine does not start leaves the reason in its row, so that a report can name it."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        path.write_text(json.dumps({"role": role, "exit": 1, "error": in_one_line(error)}))
        sys.stderr.flush()
        end(1)  # a context that faulted does not end by itself


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:MOST_OF_A_REASON]}"


def measure(options: argparse.Namespace) -> None:
    usual = CPU_MODES if options.device == "cpu" else MODES
    modes = options.modes.split(",") if options.modes else usual
    rows: list[dict[str, Any]] = []
    for mode in modes:
        began = time.perf_counter()
        for row in run_mode(mode, options.device, options.seconds, options.splits, options.layers):
            rows.append(
                {"mode": mode, **row, "date": date.today().isoformat(), "machine": machine(options.device)}
            )
            print(in_words(rows[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{mode}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def in_words(row: Mapping[str, Any]) -> str:
    """One line of a table."""
    parts = [f"{row['mode']:14} {row.get('split', ''):6} {row['role']:9}"]
    if "steps" in row:
        parts += [f"{row['num_sms']} SMs, {row['started']};"]
        parts += [f"{step['what']}: {1e3 * step['seconds']:.2f} ms;" for step in row["steps"]]
    if "output_tok_s" in row:
        parts += [f"{row['output_tok_s']:8,.0f} tokens/s", f"{row['prompt_tok_s']:9,.0f} prompt tokens/s"]
        parts += [f"{name} {row[f'{name}_ms'] or 0:.2f} ms" for name in ("itl_p50", "itl_p99", "ttft_p99")]
    shown = ("exit", "error", "where", "same_tokens", "card", "differences")
    parts += [f"{name}: {row[name]}" for name in shown if row.get(name) not in (None, "")]
    return " ".join(parts)


def machine(device: str) -> str:
    if device == "cpu":
        from quire.bench.machine import cpu_name

        return f"{cpu_name()}, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name()


def run_mode(
    mode: str, device: str, seconds: float, splits: str = SPLITS, num_layers: int | None = None
) -> Iterator[dict[str, Any]]:
    if mode == "alone":
        for role in ("decodes", "prompts"):
            yield from together({role: {}}, device, seconds)
    elif mode == "time-slices":
        yield from together({"decodes": {}, "prompts": {}}, device, seconds)
    elif mode in ("same-cores", "own-cores"):
        yield from together(on_two_cores(mode), device, seconds)
    elif mode == "green-contexts":
        half = {"QUIRE_SM_SHARE": "0.5"}
        yield from together({"decodes": half, "prompts": half}, device, seconds)
    elif mode == "share":
        yield from shares(num_layers)
    elif mode == "mig":
        yield mig_table()
    elif mode == "steps":
        limited = {str(percent): {"QUIRE_SM_SHARE": f"{percent / 100:g}"} for percent in PERCENTAGES}
        for row in one_by_one(limited, num_layers):
            yield {"percent": int(row["role"]), **row}
    else:
        with mps() as environment:
            yield from under_mps(mode, environment, device, seconds, splits, num_layers)


def on_two_cores(mode: str) -> dict[str, dict[str, str]]:
    """Two of the cores that this process may use: both for each engine, or one each."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    first, second = (cores, cores) if mode == "same-cores" else (cores[:1], cores[-1:])
    return {"decodes": {"QUIRE_CORES": ",".join(first)}, "prompts": {"QUIRE_CORES": ",".join(second)}}


def under_mps(
    mode: str, environment: dict[str, str], device: str, seconds: float, splits: str, num_layers: int | None
) -> Iterator[dict[str, Any]]:
    if mode == "mps":
        yield from together({"decodes": environment, "prompts": environment}, device, seconds)
    elif mode == "mps-percent":
        pairs = []
        for split in splits.split(","):
            parts = zip(("decodes", "prompts"), split.split(":"), strict=True)
            pairs.append({role: {**environment, MPS_PERCENTAGE: part} for role, part in parts})
        groups = (pairs[at : at + PAIRS_AT_ONCE] for at in range(0, len(pairs), PAIRS_AT_ONCE))
        measured = chain.from_iterable(run_groups(group, device, seconds) for group in groups)
        for split, rows in zip(splits.split(","), measured, strict=True):
            yield from ({"split": split, **row} for row in rows)
    elif mode == "fault":
        longer = max(seconds, 2 * FAULT_SECONDS)  # the engine must not end before its neighbour faults
        yield from together({"prompts": environment, "fault": environment}, device, longer)
        for row in together({"prompts": environment}, device, min(seconds, 2.0)):
            yield {**row, "role": "restarted"}


def shares(num_layers: int | None) -> Iterator[dict[str, Any]]:
    """The whole GPU and a green context of half of it: SMs, steps, and whether the tokens are the same."""
    first: list[list[int]] = []
    for row in one_by_one({"whole": {}, "half": {"QUIRE_SM_SHARE": "0.5"}}, num_layers):
        tokens = row.pop("tokens", [])
        if first and tokens:
            pairs = [
                pair for answers in zip(first, tokens, strict=True) for pair in zip(*answers, strict=True)
            ]
            row["same_tokens"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
        first = first or tokens
        yield row


def mig_table() -> dict[str, Any]:
    """What `quire plan --mig auto` reads and compares; MIG may be off."""
    from quire.fleet import mig, nvml

    title, table = nvml.read_card()
    different = nvml.differences(mig.find_card(title), table) or "none"
    return {
        "role": "nvml",
        "card": title,
        "slices": [asdict(profile) for profile in table],
        "differences": different,
    }


def mps_tool() -> str | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/nvidia/bin"))
    return shutil.which("nvidia-cuda-mps-control", path=path)


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A control daemon of its own; the environment of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in environment.values():
            Path(path).mkdir()
        tool = mps_tool() or "nvidia-cuda-mps-control"
        subprocess.run([tool, "-d"], env={**os.environ, **environment}, check=True)
        try:
            yield environment
        finally:
            with suppress(subprocess.TimeoutExpired):  # a server that faulted may not end
                subprocess.run(
                    [tool],
                    input="quit\n",
                    text=True,
                    env={**os.environ, **environment},
                    check=False,
                    timeout=20,
                )


def together(roles: Mapping[str, Mapping[str, str]], device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Starts one process for each role, lets them begin at once, and returns what each counted."""
    for rows in run_groups([roles], device, seconds):
        yield from rows


def run_groups(
    groups: Sequence[Mapping[str, Mapping[str, str]]], device: str, seconds: float
) -> Iterator[list[dict[str, Any]]]:
    """All processes start together; one group of them after the other runs, while the others sleep."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        started = [
            {role: _start(stack, folder, f"{index}:{role}", env, "--device", device, "--seconds", str(seconds))
             for role, env in roles.items()}
            for index, roles in enumerate(groups)
        ]  # fmt: skip
        waiting = [
            (f"{i}-{role}", process) for i, group in enumerate(started) for role, process in group.items()
        ]
        _await_ready(folder, [(key, process) for key, process in waiting if not key.endswith("fault")])
        for index, group in enumerate(started):
            (folder / f"{index}.go").touch()
            yield [
                _result(folder, f"{index}-{role}", role, process, seconds) for role, process in group.items()
            ]


def _await_ready(folder: Path, waiting: Sequence[tuple[str, "subprocess.Popen[bytes]"]]) -> None:
    """Until every engine is warm or has ended. After START_SECONDS late ones are killed, and their rows say so."""
    deadline = time.monotonic() + START_SECONDS
    while late := [
        (key, process)
        for key, process in waiting
        if not (folder / f"{key}.ready").exists() and process.poll() is None
    ]:
        if time.monotonic() < deadline:
            time.sleep(0.05)
            continue
        for key, process in late:
            process.kill()
            row = {
                "role": key.partition("-")[2],
                "exit": process.wait(),
                "error": f"not ready in {START_SECONDS:g} s",
            }
            (folder / f"{key}.json").write_text(json.dumps(row))


def one_by_one(
    environments: Mapping[str, Mapping[str, str]], num_layers: int | None
) -> Iterator[dict[str, Any]]:
    """One engine for each, never two at once: their processes import together, and wait for each other to end."""
    layers = ("--layers", str(num_layers)) if num_layers else ()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        processes = {
            key: _start(stack, folder, f"{key}:steps", env, *layers) for key, env in environments.items()
        }
        for key, process in processes.items():
            (folder / f"{key}.go").touch()
            yield _result(folder, key, key, process, START_SECONDS)


def _start(
    stack: ExitStack, folder: Path, child: str, environment: Mapping[str, str], *more: str
) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "quire_lab.benchmarks.gpu_sharing",
        "--child",
        child,
        "--folder",
        str(folder),
    ]
    process = subprocess.Popen(
        [*command, *more], env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    stack.callback(process.kill)  # one that has ended is left alone
    return process


def _result(
    folder: Path, key: str, role: str, process: "subprocess.Popen[bytes]", seconds: float
) -> dict[str, Any]:
    """What the process wrote, or how it ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds + END_SECONDS)
    process.kill()
    code, path = process.wait(), folder / f"{key}.json"
    return json.loads(path.read_text()) if path.exists() else {"role": role, "exit": code}


def await_go(folder: Path, name: str) -> None:
    while not (folder / f"{name}.go").exists():
        time.sleep(0.005)


def open_engine(shape: Mapping[str, Any], **settings: Any) -> Any:
    """A model of random weights, on the share of SMs that the environment names."""
    from quire import LLM

    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(shape))
        share = float(os.environ.get("QUIRE_SM_SHARE", "1"))
        return LLM(
            model,
            load_format="dummy",
            use_tqdm=False,
            enable_prefix_caching=False,
            sm_share=share,
            **settings,
        )


def child(name: str, role_name: str, device: str, folder: Path, seconds: float) -> None:
    cores = {int(core) for core in os.environ.get("QUIRE_CORES", "").split(",") if core}
    if cores:
        os.sched_setaffinity(0, cores)
    from quire import LLM

    role = (CPU_ROLES if device == "cpu" else ROLES)[role_name]
    if device == "cpu":
        llm = LLM(use_tqdm=False, num_threads=len(cores) or 2, enable_prefix_caching=False)
        vocabulary = 40_000
    else:
        shape = workloads.SHAPES[role.shape]
        llm = open_engine(shape, gpu_memory_utilization=role.memory, max_num_seqs=role.sequences)
        vocabulary = shape["vocab_size"]
    busy = Busy(llm.engine, role, vocabulary)
    steps = WARM_UP // 4 if device == "cpu" else WARM_UP
    busy.run(until=lambda: busy.num_steps >= steps)
    (folder / f"{name}-{role_name}.ready").touch()
    await_go(folder, name)
    settled = time.perf_counter() + SETTLE_SECONDS
    busy.run(until=lambda: time.perf_counter() >= settled)
    busy.clear()
    end = time.perf_counter() + seconds
    error = ""
    try:
        busy.run(until=lambda: time.perf_counter() >= end)
    except Exception as fault:
        error = in_one_line(fault)
    result = {"role": role_name, **busy.counted(), "error": error}
    if cores:
        result["cores"] = sorted(os.sched_getaffinity(0))
    (folder / f"{name}-{role_name}.json").write_text(json.dumps(result))
    os._exit(0)  # a context that faulted does not end by itself


def steps_child(folder: Path, name: str, num_layers: int | None) -> None:
    """Single steps of an engine that has the GPU for itself, and the tokens of another that is deterministic."""
    from quire.bench.drive import Bench
    from quire.engine.build import runner
    from quire_lab.fit.sm_shares import shape_of
    from quire_lab.fit.step_grid import StepCell, measure_grid

    import_module("quire.llm.llm")  # it takes seconds, and others may measure meanwhile
    await_go(folder, name)
    runner.GRAPH_SECONDS = 2.0  # the largest decode comes first, and is all that is measured
    settings = {"max_num_seqs": CELLS[0][0], "gpu_memory_utilization": 0.4}
    llm = open_engine(shape_of(STEP_SHAPE, num_layers), **settings)
    report = llm.report
    steps = measure_grid(Bench(llm._built), [StepCell(*cell) for cell in CELLS], REPEATS)
    record = {
        "role": name, "shape": STEP_SHAPE, "layers": num_layers, "where": report.where,
        "started": report.started, "num_sms": report.start.num_sms,
        "steps": [step.as_dict() for step in steps],
    }  # fmt: skip
    if name in ("whole", "half"):
        llm.close()
        record["tokens"] = deterministic_tokens(
            open_engine(shape_of(STEP_SHAPE, 2), deterministic=True, **settings)
        )
    (folder / f"{name}.json").write_text(json.dumps(record))
    os._exit(0)


def deterministic_tokens(llm: Any) -> list[list[int]]:
    prompts = [[(7919 * row + 31 * at) % 100_000 + 5 for at in range(40 + 100 * row)] for row in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling)]


class Busy:
    """Keeps an engine full of equal requests, and counts."""

    def __init__(self, engine: Any, role: Role, vocabulary: int) -> None:
        self._engine, self._role, self._vocabulary = engine, role, vocabulary
        self._next = 0
        self.clear()
        self._came: dict[str, float] = {}
        self._last: dict[str, float] = {}
        for _ in range(role.sequences):
            self._add()

    def clear(self) -> None:
        self.num_steps = self._tokens = self._prompts = 0
        self._gaps: list[float] = []
        self._firsts: list[float] = []
        self._steps: list[float] = []
        self._began = time.perf_counter()

    def _add(self) -> None:
        role, index = self._role, self._next
        self._next += 1
        prompt = [(index * 7919 + 31 * at) % (self._vocabulary - 10) + 5 for at in range(role.prompt_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=role.output_tokens, ignore_eos=True)
        self._engine.add(Request(str(index), prompt, sampling))
        self._came[str(index)] = time.perf_counter()

    def run(self, until: Any) -> None:
        while not until():
            self.step()

    def step(self) -> None:
        began = time.perf_counter()
        updates = self._engine.step()
        now = time.perf_counter()
        self.num_steps += 1
        self._steps.append(now - began)
        for update in updates:
            name = update.request_id
            if update.token_ids:
                self._tokens += len(update.token_ids)
                if name in self._last:
                    self._gaps.append(now - self._last[name])
                else:
                    self._firsts.append(now - self._came[name])
                    self._prompts += self._role.prompt_tokens
                self._last[name] = now
            if update.finish_reason is not None:
                self._last.pop(name, None)
                self._add()

    def counted(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        gaps, firsts, steps = sorted(self._gaps), sorted(self._firsts), sorted(self._steps)
        result: dict[str, Any] = {
            "output_tok_s": self._tokens / seconds,
            "prompt_tok_s": self._prompts / seconds,
            "seconds": seconds,
        }
        for name, values in (("itl", gaps), ("ttft", firsts), ("step", steps)):
            for percent in (50, 99):
                result[f"{name}_p{percent}_ms"] = 1e3 * percentile(values, percent) if values else None
        return result


def fault(folder: Path, name: str) -> None:
    """A real fault, FAULT_SECONDS after the start: a store to an address that is not mapped."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def store(address):
        tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)

    torch.zeros(1, device="cuda")
    await_go(folder, name)
    time.sleep(FAULT_SECONDS)
    result = {"role": "fault"}
    try:
        store[(1,)](1 << 50)
        torch.cuda.synchronize()
    except Exception as error:
        result["error"] = str(error).splitlines()[0][:200]
    (folder / f"{name}-fault.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
