"""What a neighbour costs: `python -m quire_lab.benchmarks.gpu_sharing [--modes …] [--output FILE]`, and the processes
of `quire bench lab gpu-sharing`.

Two real engines: one decodes answers, the other mostly computes prompts. On a GPU they run alone, in time slices, in
time slices with green contexts of half of the processors each (`--sm-share`), under MPS, and under MPS with half of the
processors each. `steps` times one engine alone with 14 to 57 % of the processors beside what `simulated:h200-smNN`
predicts, and `fault` has a neighbour under MPS fault. On a CPU (`--device cpu`) they run alone, on the same cores, and
each on its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from quire.bench.report import percentile
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire_lab.benchmarks import workloads

PERCENTAGES = (14, 29, 43, 57)
MODES = ("alone", "time-slices", "green-contexts", "mps", "mps-percent", "steps", "fault")
CPU_MODES = ("alone", "same-cores", "own-cores")


@dataclass(frozen=True, slots=True)
class Role:
    """What an engine is kept busy with."""

    shape: str
    sequences: int
    prompt_tokens: int
    output_tokens: int


ROLES = {
    "decodes": Role("llama8b", 32, 128, 256),
    "prompts": Role("llama1b", 4, 2048, 4),
    "step": Role("llama8b", 16, 512, 64),
}
CPU_ROLES = {"decodes": Role("", 8, 32, 64), "prompts": Role("", 2, 256, 4)}  # of the built-in model
WARM_UP = 40  # steps; a quarter on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--modes", help="comma-separated; default: all of the device")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "fault":
        fault(options.folder)
    elif options.child:
        child(options.child, options.device, options.folder, options.seconds)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    usual = CPU_MODES if options.device == "cpu" else MODES
    modes = options.modes.split(",") if options.modes else usual
    rows: list[dict[str, Any]] = []
    for mode in modes:
        for row in run_mode(mode, options.device, options.seconds):
            rows.append(
                {"mode": mode, **row, "date": date.today().isoformat(), "machine": machine(options.device)}
            )
            print(json.dumps(rows[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")


def machine(device: str) -> str:
    if device == "cpu":
        from quire.bench.machine import cpu_name

        return f"{cpu_name()}, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name()


def run_mode(mode: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    if mode == "alone":
        for role in ("decodes", "prompts"):
            yield from together({role: {}}, device, seconds)
    elif mode in ("time-slices", "same-cores"):
        yield from together({"decodes": {}, "prompts": {}}, device, seconds)
    elif mode == "green-contexts":
        half = {"QUIRE_SM_SHARE": "0.5"}
        yield from together({"decodes": half, "prompts": half}, device, seconds)
    elif mode == "own-cores":
        yield from together({"decodes": {"QUIRE_CORE": "0"}, "prompts": {"QUIRE_CORE": "1"}}, device, seconds)
    else:
        with mps() as environment:
            if mode == "mps":
                yield from together({"decodes": environment, "prompts": environment}, device, seconds)
            elif mode == "mps-percent":
                half = {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
                yield from together({"decodes": half, "prompts": half}, device, seconds)
            elif mode == "steps":
                for percent in PERCENTAGES:
                    limited = {**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
                    for row in together({"step": limited}, device, seconds):
                        yield {**row, "percent": percent, "predicted": predicted(percent)}
            elif mode == "fault":
                yield from together({"decodes": environment, "fault": environment}, device, seconds)


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
            subprocess.run([tool], input="quit\n", text=True, env={**os.environ, **environment}, check=False)


def together(roles: Mapping[str, Mapping[str, str]], device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Starts one process for each role, lets them begin at once, and returns what each counted."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        processes = {}
        for role, environment in roles.items():
            command = [
                sys.executable,
                "-m",
                "quire_lab.benchmarks.gpu_sharing",
                "--child",
                role,
                "--device",
                device,
            ]
            command += ["--folder", name, "--seconds", str(seconds)]
            processes[role] = stack.enter_context(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
            )
        waiting = [role for role in roles if role != "fault"]
        while not all((folder / f"{role}.ready").exists() for role in waiting):
            if any(processes[role].poll() is not None for role in waiting):
                break
            time.sleep(0.05)
        (folder / "go").touch()
        for role, process in processes.items():
            code = process.wait()
            result = folder / f"{role}.json"
            yield json.loads(result.read_text()) if result.exists() else {"role": role, "exit": code}


def child(name: str, device: str, folder: Path, seconds: float) -> None:
    if core := os.environ.get("QUIRE_CORE"):
        os.sched_setaffinity(0, {int(core)})
    from quire import LLM

    role = (CPU_ROLES if device == "cpu" else ROLES)[name]
    with tempfile.TemporaryDirectory() as model:
        if device == "cpu":
            llm = LLM(use_tqdm=False, num_threads=1 if core else 2, enable_prefix_caching=False)
            vocabulary = 40_000
        else:
            shape = workloads.SHAPES[role.shape]
            Path(model, "config.json").write_text(json.dumps(shape))
            llm = LLM(
                model,
                load_format="dummy",
                use_tqdm=False,
                enable_prefix_caching=False,
                gpu_memory_utilization=0.4,
                sm_share=float(os.environ.get("QUIRE_SM_SHARE", "1")),
            )
            vocabulary = shape["vocab_size"]
    busy = Busy(llm.engine, role, vocabulary)
    steps = WARM_UP // 4 if device == "cpu" else WARM_UP
    busy.run(until=lambda: busy.num_steps >= steps)
    (folder / f"{name}.ready").touch()
    while not (folder / "go").exists():
        busy.step()
    busy.clear()
    end = time.perf_counter() + seconds
    error = ""
    try:
        busy.run(until=lambda: time.perf_counter() >= end)
    except Exception as fault:
        error = f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}"
    (folder / f"{name}.json").write_text(json.dumps({"role": name, **busy.counted(), "error": error}))
    os._exit(0)  # a context that faulted does not end by itself


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


def predicted(percent: int) -> dict[str, float]:
    """Milliseconds of a decode step by the simulated device."""
    from quire.core.config import EngineConfig
    from quire.models import registry
    from quire_lab.simulate.build import model_costs, open_shape, simulated_parts
    from quire_lab.simulate.cost_model import CostModel, StepCounts

    role = ROLES["step"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(workloads.SHAPES[role.shape]))
        config = EngineConfig.of(model=folder, load_format="dummy", device=f"simulated:h200-sm{percent}")
        model = registry.describe(open_shape(config).config)
        parts = simulated_parts(config, model, ())
    cost = CostModel(parts.device.rates, parts.device.factors, model_costs(model, parts.precision, 16))
    context = role.sequences * (role.prompt_tokens + role.output_tokens // 2)
    decode = StepCounts(role.sequences, role.sequences, role.sequences, context, float(context))
    return {"decode_ms": 1e3 * cost.seconds(decode)}


def fault(folder: Path) -> None:
    """A real fault, three seconds after the start: a store to an address that is not mapped."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def store(address):
        tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)

    torch.zeros(1, device="cuda")
    while not (folder / "go").exists():
        time.sleep(0.05)
    time.sleep(3)
    result = {"role": "fault"}
    try:
        store[(1,)](1 << 50)
        torch.cuda.synchronize()
    except Exception as error:
        result["error"] = str(error).splitlines()[0][:200]
    (folder / "fault.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
