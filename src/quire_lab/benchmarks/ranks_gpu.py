"""Two ranks that share one GPU under MPS, beside one rank: `python -m quire_lab.benchmarks.ranks_gpu [--output FILE]`.

Tokens and logprobs with `--deterministic`, whether decodes are replayed as CUDA graphs with the sums inside, how long
sums take there, what a step costs the host, and the bytes. Every part has processes of its own; one without a heartbeat
for a minute is ended, and each of its ranks prints its stacks. `--device cpu` tries the script itself. The exit status
is the number of lines that fail.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.engine.build.ranks import SHARED_CARD, device_groups
from quire.parallel.group import Group
from quire.parallel.processes import TorchGroup
from quire_lab.benchmarks import workloads
from quire_lab.benchmarks.gpu_sharing import mps

VOCABULARY = 4096
SHAPES = {  # heads, key-value heads, inner columns; heads of 64
    "even": (8, 4, 1408),
    "uneven": (9, 3, 1536),
}
LAYERS = 3
SUMS = (1, 64, 1024)  # rows of WIDTH numbers in bfloat16
WIDTH = 4096
IN_GRAPH = 64  # sums of one CUDA graph
SUM_LIMIT = 8.0  # microseconds for 64 rows
HOST_LIMIT = 60.0  # microseconds a step
TIMED_SHAPE, TIMED_ROWS, TIMED_TOKENS = "llama1b", (1, 64), 96


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="sums,tokens,bytes,host", help="comma-separated parts")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without a heartbeat of a part")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, *arguments = options.child
        CHILDREN[name](options.device, options.folder, *arguments)
        os._exit(0)  # a rank that never ends is not waited for
    with ExitStack() as stack:
        environment = {SHARED_CARD: "1", "PYTHONFAULTHANDLER": "1"}
        if options.device == "cuda":
            environment |= stack.enter_context(mps())
        check = PairCheck(options, environment)
        for part in options.only.split(","):
            PARTS[part](check)
    sys.exit(sum(not line["ok"] for line in check.lines))


class PairCheck:
    """Runs the parts, prints a line for each thing that was looked at, and writes the record."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self.device: str = options.device
        self.lines: list[dict[str, Any]] = []
        self._output: Path | None = options.output
        self._timeout: float = options.timeout
        self._environment = {**os.environ, **environment}
        self._began = time.perf_counter()

    def say(self, name: str, ok: bool, **numbers: Any) -> None:
        self.lines.append({"name": name, "ok": ok, **numbers})
        text = ", ".join(f"{what} {value}" for what, value in numbers.items())
        seconds = time.perf_counter() - self._began
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {text} ({seconds:.0f} s)", flush=True)
        if self._output is not None:
            record = {**describe_origin(), "device": self.device, "checks": self.lines}
            self._output.write_text(json.dumps(record, indent=1) + "\n")

    def run(self, *children: tuple[str, ...]) -> list[dict[str, Any]] | None:
        """What these wrote, side by side; None if one failed, which is said."""
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name, str(number)) for number in range(len(children))]
            processes = []
            for folder, child in zip(folders, children, strict=True):
                folder.mkdir()
                command = [sys.executable, "-m", __spec__.name, "--device", self.device]
                command += ["--folder", str(folder), "--child", *child]
                processes.append(subprocess.Popen(command, env=self._environment, start_new_session=True))
            fault = _watch(processes, folders, self._timeout)
            if fault:
                self.say(" ".join(children[0]), False, error=fault)
                return None
            return [json.loads((folder / "result.json").read_text()) for folder in folders]


def _watch(processes: list[subprocess.Popen[bytes]], folders: list[Path], timeout: float) -> str:
    """Why they failed. A heartbeat changes a folder; without one for so long each process prints its stacks."""
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if any(process.poll() for process in processes):
            fault = "a process ended with code " + str([process.poll() for process in processes])
        elif time.time() - max(folder.stat().st_mtime for folder in folders) > timeout:
            fault = f"no heartbeat for {timeout:.0f} s: the stacks of all ranks are above"
        else:
            continue
        for pid in [pid for process in processes for pid in process_tree(process.pid)]:
            print(f"--- process {pid}", file=sys.stderr, flush=True)
            try:
                os.kill(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks
            except ProcessLookupError:
                continue
            time.sleep(0.5)
        for process in processes:
            process.wait(20)
        return fault
    codes = [process.returncode for process in processes]
    return f"a process ended with code {codes}" if any(codes) else ""


def process_tree(pid: int) -> list[int]:
    """The process and all that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in process_tree(int(child)))]


def heartbeat(folder: Path, number: int = 0) -> None:
    (folder / f"alive-{time.monotonic_ns()}-{number}").touch()


# ---------------------------------------------------------------------- sums


def check_sums(check: PairCheck) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        records = check.run(*(("sums", meeting, str(rank)) for rank in range(2)))
    if records is None:
        return
    first, second = records
    equal = first["right"] and second["right"] and first["digests"] == second["digests"]
    check.say(
        "sums and exchanges are right, with equal bits on both ranks", equal, sums=len(first["digests"])
    )
    moved = all(rank["traffic"] == rank["formula"] for rank in records)
    check.say("bytes of the collectives are the formulas'", moved, counted=first["traffic"])
    for rows, microseconds in first["microseconds"].items():
        limit = SUM_LIMIT if rows == "64" and check.device == "cuda" else float("inf")
        slowest = max(microseconds[1], second["microseconds"][rows][1])
        within = "in a graph" if check.device == "cuda" else "without graphs"
        check.say(f"sum of {rows}x{WIDTH} bf16 {within}", slowest <= limit, p10_p50_p90_us=microseconds)


def sums_child(device: str, folder: Path, meeting: str, rank: str) -> None:
    torch.set_num_threads(1)
    own, target = int(rank), torch.device(device, 0) if device == "cuda" else torch.device(device)
    store = FileStore(f"{meeting}/store", 2)
    if device == "cuda":
        torch.cuda.set_device(target)
        group, host = device_groups(store, "sums", own, 2, target)
    else:
        group = host = TorchGroup("gloo", store, own, 2)
    heartbeat(folder)
    result: dict[str, Any] = {"right": True, "digests": [], "microseconds": {}}
    payload = 0
    for rows, dtype in [(rows, torch.bfloat16) for rows in SUMS] + [(64, torch.float32), (3, torch.float16)]:
        parts = [
            torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows + each)).to(dtype)
            for each in range(2)
        ]
        x = parts[own].to(target)
        wanted = (parts[0] + parts[1]).to(target)
        if device == "cuda":
            torch.cuda.synchronize()
        payload += x.nbytes
        group.all_reduce(x, "sum")
        result["right"] &= torch.equal(x, wanted)
        result["digests"].append(float(x.double().sum()))
        heartbeat(folder, rows)
    widths = (1000, 3000)
    columns = torch.arange(2 * WIDTH, dtype=torch.float32).view(2, WIDTH)[:, : sum(widths)].to(target)
    mine = columns[:, :1000] if own == 0 else columns[:, 1000:]
    for turn in range(20):  # what is exchanged is not overwritten before all have read it
        gathered = group.gather(mine.contiguous() + turn, widths, "logits")
        result["right"] &= own > 0 or torch.equal(gathered, columns + turn)
        tokens = group.broadcast(
            torch.full((64,), turn + 7 * own, dtype=torch.int32, device=target), "tokens"
        )
        result["right"] &= tokens.tolist() == [turn] * 64
        heartbeat(folder, turn)
    result["traffic"] = {" ".join(key): count for key, count in group.traffic().items() if key[1] != "start"}
    result["formula"] = {
        "all_reduce sum": payload, "gather logits": 20 * columns.nbytes // 2, "broadcast tokens": 20 * 64 * 4,
    }  # fmt: skip
    for rows in SUMS:
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=target)
        timed = _in_graph(group, x) if device == "cuda" else _eager(group, x)
        host.numbers(0)  # both begin now
        took = sorted(timed() for _ in range(60))[:50]  # the first ones wait for the other rank
        result["microseconds"][str(rows)] = [round(took[at], 2) for at in (5, 25, 45)]
        heartbeat(folder, rows)
    host.numbers(0)
    _write(folder, result)


def _in_graph(group: Group, x: torch.Tensor) -> Callable[[], float]:
    """Microseconds of a sum among IN_GRAPH of one graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            group.all_reduce(x, "timed")

    def timed() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks begin together
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3 / IN_GRAPH

    return timed


def _eager(group: Group, x: torch.Tensor) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        group.all_reduce(x, "timed")
        return (time.perf_counter() - began) * 1e6

    return timed


# ---------------------------------------------------------------------- tokens


def check_tokens(check: PairCheck) -> None:
    alone = check.run(*(("tokens", shape, "1") for shape in SHAPES))
    for number, shape in enumerate(SHAPES):
        records = check.run(("tokens", shape, "2"))
        if alone is None or records is None:
            continue
        (ranked,), single = records, alone[number]
        for kind, wanted in single["answers"].items():
            answers = ranked["answers"][kind]
            same = sum(mine == right for mine, right in zip(answers, wanted, strict=True))
            check.say(
                f"{shape}, {kind}: two ranks have one rank's tokens",
                answers == wanted,
                same=f"{same}/{len(wanted)}",
            )
        apart = max(
            abs(mine - right) for mine, right in zip(ranked["logprobs"], single["logprobs"], strict=True)
        )
        bits = "logprobs, largest difference"
        check.say(f"{shape}: {bits}", apart == 0.0 or check.device == "cpu", difference=apart)
        if check.device == "cuda":
            steps, calls = ranked["passes"], ranked["sums"]
            inside = (
                steps.get("DECODE", 0) > 0 and calls.get("DECODE", 0) == 0 and calls.get("capture", 0) > 0
            )
            check.say(
                f"{shape}: decodes are replayed with the sums inside",
                inside,
                passes=steps,
                calls_of_sums=calls,
            )
        found_again = {"mixed_steps": ranked["mixed"], "prefix_hits": ranked["hits"]}
        check.say(
            f"{shape}: prompts were mixed with decodes, and found again",
            min(found_again.values()) > 0,
            **found_again,
            start_s=ranked["start_s"],
        )


def tokens_child(device: str, folder: Path, shape: str, ranks: str) -> None:
    model = save_shape(folder, shape)
    heartbeat(folder)
    began = time.perf_counter()
    with _engine(model, device, int(ranks), deterministic=True, max_num_batched_tokens=96) as llm:
        result: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1), "answers": {}}
        heartbeat(folder, 1)
        passes, sums = counted_passes(llm)
        prompts = [
            [(7 * i + 3 * j + i * j) % (VOCABULARY - 20) + 10 for j in range(5 + 23 * i)] for i in range(12)
        ]
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        seeded = greedy.changed(temperature=0.9, top_p=0.9)
        kinds = {
            "greedy": [greedy] * 12,
            "seeded, prefixes found": [seeded.changed(seed=i) for i in range(12)],
            "n=3": [seeded.changed(seed=i, n=3) for i in range(12)],
        }
        logprobs: list[float] = []
        for kind, sampling in kinds.items():
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            results = llm.generate(inputs, sampling, use_tqdm=False)
            outputs = [output for answered in results for output in answered.outputs]
            result["answers"][kind] = [list(output.token_ids) for output in outputs]
            logprobs += [float(output.cumulative_logprob or 0.0) for output in outputs]
            heartbeat(folder, 2)
        mixed = passes.pop("mixed", 0)
        hits = llm.engine.memory.stats.prefix_hits
        result |= {"logprobs": logprobs, "passes": passes, "sums": sums, "mixed": mixed, "hits": hits}
    _write(folder, result)


def counted_passes(llm: LLM) -> tuple[Counter[str], Counter[str]]:
    """Passes of rank 0 by how they ran, and calls of all_reduce from Python in them. Counts from now on."""
    passes: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    now = "other"
    runner = llm.engine._runner
    launch = runner.launch

    def noted_launch(step: Any) -> None:
        longest = max(step.num_tokens, default=0)
        passes["mixed"] += longest > 1 and min(step.num_tokens) == 1
        launch(step)

    runner.launch = noted_launch
    local = getattr(runner, "_local", runner)
    graphs = getattr(local._ops, "_graphs", None)
    if graphs is None:
        return passes, sums
    run, mixed = graphs._run, local._ops._forward_mixed
    capture = graphs._capture

    def counted(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal now
        before, now = now, name
        try:
            return call(*arguments)
        finally:
            now = before

    def noted_run(shape: Any, adapted: bool = False) -> Any:
        passes[shape.kind.name] += 1
        return counted(shape.kind.name, run, shape, adapted)

    def noted_mixed(*arguments: Any) -> Any:
        passes["eager"] += 1
        return counted("eager", mixed, *arguments)

    graphs._run, local._ops._forward_mixed = noted_run, noted_mixed
    graphs._capture = lambda *arguments: counted("capture", capture, *arguments)
    if hasattr(local, "part"):
        group = local.part.group
        reduce = group.all_reduce

        def noted_sum(*arguments: Any) -> Any:
            sums[now] += 1
            return reduce(*arguments)

        group.all_reduce = noted_sum
        shape = next(shape for shape, _ in graphs._captured if shape.kind.name == "DECODE")
        with torch.inference_mode():
            graphs._capture(shape)  # once more, to count; nothing runs
    return passes, sums


# ---------------------------------------------------------------------- bytes


def check_bytes(check: PairCheck) -> None:
    if (records := check.run(("bytes", "uneven"))) is not None:
        counted, formula = records[0]["traffic"], records[0]["formula"]
        check.say(
            "bytes of an engine are the formulas'", counted == formula, counted=counted, formula=formula
        )


def bytes_child(device: str, folder: Path, shape: str) -> None:
    model = save_shape(folder, shape)
    width = 64 * SHAPES[shape][0]
    heartbeat(folder)
    with _engine(model, device, 2, enforce_eager=True, enable_prefix_caching=False) as llm:
        group = llm.engine._runner._local.part.group
        before, tokens, samples, launch = group.traffic(), 0, 0, llm.engine._runner.launch

        def noted(step: Any) -> None:
            nonlocal tokens, samples
            tokens += sum(step.num_tokens)
            samples += len(step.sample_rows)
            launch(step)

        llm.engine._runner.launch = noted
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompts = [{"prompt_token_ids": list(range(10, 20 + 9 * i))} for i in range(6)]
        llm.generate(prompts, sampling, use_tqdm=False)
        traffic = {" ".join(key): count - before.get(key, 0) for key, count in group.traffic().items()}
    size = 4 if device == "cpu" else 2
    rows = (LAYERS - 1) * tokens + samples  # the last layer computes what is sampled
    formula = {
        "all_reduce attention": rows * width * size,
        "all_reduce mlp": rows * width * size,
        "gather logits": samples * VOCABULARY * 4 // 2,
        "broadcast tokens": samples * 4,
    }
    _write(folder, {"traffic": {key: n for key, n in traffic.items() if n}, "formula": formula})


# ---------------------------------------------------------------------- the host


def check_host(check: PairCheck) -> None:
    alone, ranked = check.run(("host", "1")), check.run(("host", "2"))
    if alone is None or ranked is None:
        return
    for rows, single in alone[0].items():
        two = ranked[0][rows]
        added = two["host_us"] - single["host_us"]
        ok = added <= HOST_LIMIT or check.device == "cpu"
        check.say(
            f"host's time of a step, {rows} rows",
            ok,
            added_us=round(added, 1),
            one_rank=single,
            two_ranks=two,
        )


def host_child(device: str, folder: Path, ranks: str) -> None:
    """From the entry of a decode step until it is launched, and how long a step takes in all: medians."""
    model = folder / "model"
    model.mkdir()
    name, rows, length = (
        (TIMED_SHAPE, TIMED_ROWS, TIMED_TOKENS) if device == "cuda" else ("smol135m", (1, 4), 12)
    )
    (model / "config.json").write_text(json.dumps(workloads.SHAPES[name]))
    result = {}
    settings = {
        "load_format": "dummy", "max_num_batched_tokens": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    with _engine(model, device, int(ranks), **settings) as llm:
        heartbeat(folder)
        engine = llm.engine
        step, launch = engine.step, engine._runner.launch
        began, host, whole = [0.0], [], []

        def noted_step() -> Any:
            began[0] = time.perf_counter()
            updates = step()
            whole.append(time.perf_counter() - began[0])
            return updates

        def noted_launch(launched: Any) -> None:
            launch(launched)
            if max(launched.num_tokens) == 1:
                host.append(time.perf_counter() - began[0])

        engine.step, engine._runner.launch = noted_step, noted_launch
        for count in rows:
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            prompts = [{"prompt_token_ids": list(range(10 + i, 42 + i))} for i in range(count)]
            for _ in range(3):  # what follows is warm
                host.clear()
                whole.clear()
                llm.generate(prompts, sampling, use_tqdm=False)
                heartbeat(folder, count)
            result[str(count)] = {
                "host_us": round(statistics.median(host) * 1e6, 1),
                "step_us": round(statistics.median(whole) * 1e6, 1),
            }
    _write(folder, result)


# ---------------------------------------------------------------------- what all have


def _engine(model: Path, device: str, ranks: int, **settings: Any) -> LLM:
    usual: dict[str, Any] = {
        "dtype": "bfloat16" if device == "cuda" else "float32", "quantization": "none", "device": device,
        "max_model_len": 1024, "max_num_seqs": 40, "max_num_batched_tokens": 256, "use_tqdm": False,
        "kv_cache_memory_bytes": 200 << 20,
    }  # fmt: skip
    if device == "cpu":
        usual["num_threads"] = 1
    return LLM(str(model), tensor_parallel_size=ranks, **{**usual, **settings})


def save_shape(folder: Path, shape: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    heads, kv_heads, inner = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 * heads, num_hidden_layers=LAYERS, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=64, intermediate_size=inner, vocab_size=VOCABULARY, max_position_embeddings=1024,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    return folder / "model"


def _write(folder: Path, result: Any) -> None:
    (folder / "result.json").write_text(json.dumps(result))


CHILDREN: dict[str, Callable[..., None]] = {
    "sums": sums_child, "tokens": tokens_child, "bytes": bytes_child, "host": host_child,
}  # fmt: skip
PARTS = {"sums": check_sums, "tokens": check_tokens, "bytes": check_bytes, "host": check_host}

if __name__ == "__main__":
    main()
