"""Quire beside OpenVINO GenAI and llama.cpp, on this CPU, with the same GGUF and the same token ids.

    python -m quire_lab.benchmarks.compare_cpu [--rounds 3] [--n 1 8 32] [--engines quire openvino llamacpp]
    python -m quire_lab.benchmarks.compare_cpu --engines quire quire-int8 --before OLD/src   # an earlier version
    python -m quire_lab.benchmarks.compare_cpu --gemma [Q8_0]   # Gemma 3 270M's shape, random weights, llama.cpp alone

`quire` has Quire's defaults, `quire-int8` int8 weights and `quire-native` the blocks of the file; several may be named.

The peers live in an environment of their own, .compare/, made at the first run from requirements/compare.txt.

How it is measured, the same way for every engine (harness.py):
- n requests are handed over at once: 128 token ids in, 64 out, greedy, EOS ignored, prefix caches off. Every
  answer is counted; one of another length fails the run.
- Prefill tok/s = n * 128 / wall1, where wall1 is the wall time of a batch with 1 output token.
- Decode tok/s = n * 63 / (wall64 - wall1), where wall64 is the wall time of a batch with 64 output tokens.
- End to end tok/s = n * 64 / wall64: output tokens only.
- Start is from just before the process is made until the engine could take its first request; peak RSS is
  the process's own, at its end. Both include Python and the model file's mapped pages.
- wall1 and wall64 are the fastest of `--repeats` runs each, with new prompts each, after a warm-up batch.
- A round measures each engine at each n, each time in a fresh process and never two at once; the order of the
  engines turns from round to round. The numbers printed are medians over the rounds.
- `cores_used_by_others` is CPU time that other processes took meanwhile. Above 0.1 the results are doubtful,
  all the more since engines that spin between threads lose far more than their share: a warning says so.

Each engine's settings and the reasons for them stand at the head of its worker, beside this file.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
WORKERS = "quire_lab.benchmarks.compare_cpu"
PEER_ENVIRONMENT = ROOT / ".compare"
PEER_REQUIREMENTS = ROOT / "requirements" / "compare.txt"
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
GEMMA_RESULTS = ROOT / "benchmarks" / "results" / "cpu_gemma3_270m.json"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

ENGINES = ("quire", "openvino", "llamacpp")
BEFORE = "quire-before"  # an earlier version, with its defaults; ratios are taken to it as to a peer
QUIRE = {"quire": "auto", "quire-int8": "int8", "quire-native": "checkpoint"}  # engine: --quantization
NUM_REQUESTS = (1, 8, 32)
BUSY_CORES = 0.1  # more than this taken by others, and a figure says more about them than about the engine
# name, heading, whether higher is better
COLUMNS = (
    ("prefill_tok_s", "prefill tok/s", True),
    ("decode_tok_s", "decode tok/s", True),
    ("e2e_tok_s", "end to end tok/s", True),
    ("start_s", "start s", False),
    ("peak_rss_mb", "peak RSS MB", False),
)


# ---------------------------------------------------------------------------- what it runs on


def say(text: str) -> None:
    """Progress, at once also through a pipe."""
    print(text, flush=True)


def cache_folder() -> Path:
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire").expanduser()


def find_model(given: Path | None) -> Path:
    """The GGUF: the one given, or the built-in model wherever it lies in Quire's cache."""
    if given is not None:
        if not given.is_file():
            sys.exit(f"no model file at {given}")
        return given.resolve()
    cache = cache_folder()
    files = sorted(cache.rglob(MODEL_FILE))
    if not files:
        sys.exit(f"{MODEL_FILE} is nowhere under {cache}: run `make setup`, or name a GGUF with --model")
    return files[0].resolve()


def cpu_fields() -> Iterator[dict[str, str]]:
    """One record per logical CPU, as /proc/cpuinfo has it; nothing on systems without it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    for block in text.strip().split("\n\n"):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        yield {key.strip(): value.strip() for key, value in pairs}


def physical_cores() -> int:
    """Cores this process may use, hyperthreads of one core counted once."""
    logical = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {
        (cpu.get("physical id"), cpu.get("core id", cpu.get("processor")))
        for cpu in cpu_fields()
        if int(cpu.get("processor", -1)) in logical
    }
    return len(cores) or len(logical)


def describe_machine(cores: int) -> dict[str, Any]:
    """What a reader needs to judge the results; nothing that names the machine or its user."""
    cpu = next(cpu_fields(), {})
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    vector = ("sse4", "avx", "amx", "fma", "f16c", "asimd", "sve", "i8mm", "bf16")
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in flags if flag.startswith(vector)],
        "physical_cores": cores,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe_model(path: Path) -> dict[str, Any]:
    """The file by name and content; its path stays private."""
    with path.open("rb") as file:
        return {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def peer_python(environment: Path = PEER_ENVIRONMENT, requirements: Path = PEER_REQUIREMENTS) -> Path:
    """The peers' interpreter; makes their environment first, unless it is as the requirements want it."""
    python = environment / "bin" / "python"
    stamp = environment / "installed.txt"
    wanted = f"# {platform.python_version()}\n" + requirements.read_text(encoding="utf-8")
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    name, listed = (path.relative_to(ROOT) for path in (environment, requirements))
    say(f"== making {name}/ with the peers of {listed} (once, about 100 MB to fetch)")
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), "-m", "pip", "--no-input", "install", "--quiet", "-r", str(requirements)],
    ]
    for step in steps:
        if subprocess.run(step, check=False).returncode:
            sys.exit(f"could not make {name}/: see above. Without the peers: --engines quire")
    stamp.write_text(wanted, encoding="utf-8")
    return python


# ---------------------------------------------------------------------------- measuring


def run_worker(engine: str, python: Path, num_requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """One engine at one number of requests, in a process of its own; {"error": …} if it failed."""
    # The peers' environment has neither Quire nor the laboratory installed.
    sources = [str(args.before)] if engine == BEFORE else []
    sources += [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sources)),
    }
    job = {
        "model": str(args.model),
        "num_requests": num_requests,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "threads": args.threads,
        "repeats": args.repeats,
        "spawned_at": time.time(),
        "options": {"precision": args.openvino_precision, "quantization": QUIRE.get(engine, "auto")},
    }
    command = [str(python), "-m", f"{WORKERS}.worker_{engine.split('-')[0]}", json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {args.timeout} s"}
    if done.returncode == 0 and done.stdout:
        return json.loads(done.stdout.splitlines()[-1])
    how = f"exit status {done.returncode}"
    if done.returncode < 0:
        how = f"ended by {signal.Signals(-done.returncode).name}"
    return {"error": " | ".join([how] + done.stderr.strip().splitlines()[-3:])}


def run_rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every measurement, in the order it was taken."""
    peers = peer_python() if set(args.engines) - {*QUIRE, BEFORE} else None
    records = []
    for round_index in range(args.rounds):
        # Turning the order spreads what comes and goes on the machine evenly over the engines.
        turn = round_index % len(args.engines)
        for num_requests in args.n:
            for engine in args.engines[turn:] + args.engines[:turn]:
                is_peer = engine not in (*QUIRE, BEFORE)
                python = peers if is_peer and peers is not None else Path(sys.executable)
                result = run_worker(engine, python, num_requests, args)
                records.append({"round": round_index + 1, "engine": engine, "n": num_requests} | result)
                say(f"round {round_index + 1}  n={num_requests:<3} {engine:<12} {in_short(result)}")
    return records


def in_short(result: dict[str, Any]) -> str:
    """One measurement, as a line of progress."""
    if "error" in result:
        return f"FAILED: {result['error']}"
    text = ", ".join(f"{heading} {number(result[name])}" for name, heading, _ in COLUMNS)
    others = result["cores_used_by_others"]
    return text + (
        f"  (others used {others:.1f} cores)" if others is not None and others > BUSY_CORES else ""
    )


# ---------------------------------------------------------------------------- reporting


def medians(records: list[dict[str, Any]], engine: str, num_requests: int) -> dict[str, float]:
    """The median of each figure over the rounds that gave one."""
    mine = [record for record in records if record["engine"] == engine and record["n"] == num_requests]
    values = {name: [r[name] for r in mine if r.get(name) is not None] for name, _, _ in COLUMNS}
    return {name: statistics.median(found) for name, found in values.items() if found}


def summarise(records: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians per engine and n, and those of Quire against the best peer in each figure."""
    summary = []
    for num_requests in args.n:
        engines = {engine: medians(records, engine, num_requests) for engine in args.engines}
        block: dict[str, Any] = {"n": num_requests, "engines": engines}
        for ours in (engine for engine in args.engines if engine in QUIRE):
            ratios = {}
            for name, _, higher_is_better in COLUMNS:
                peers = [
                    values[name] for peer, values in engines.items() if peer not in QUIRE and name in values
                ]
                if peers and name in engines[ours]:
                    ratios[name] = engines[ours][name] / (max(peers) if higher_is_better else min(peers))
            block[f"{ours}_to_best_peer"] = ratios
        summary.append(block)
    return summary


def number(value: float | None) -> str:
    """Three digits are all that a run on a shared CPU is good for."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_table(summary: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The medians, one block per n; the last line of a block is Quire's figure over the best peer's."""
    say(
        f"\n{args.prompt_tokens} tokens in, {args.output_tokens} out, greedy; medians of {args.rounds} round(s)"
    )
    for block in summary:
        say(f"\n{'n = ' + str(block['n']):<20}" + "".join(f"{heading:>18}" for _, heading, _ in COLUMNS))
        for engine, medians_of in block["engines"].items():
            say(f"  {engine:<18}" + "".join(f"{number(medians_of.get(name)):>18}" for name, _, _ in COLUMNS))
        for engine in block["engines"]:
            if ratios := block.get(f"{engine}_to_best_peer"):
                cells = (f"{ratios[name]:.2f}×" if name in ratios else "–" for name, _, _ in COLUMNS)
                say(f"  {engine + ' / peer':<18}" + "".join(f"{cell:>18}" for cell in cells))
    say("\nStart and peak RSS: less is better, so a ratio under 1 is Quire's.")


def warn_if_disturbed(records: list[dict[str, Any]]) -> None:
    """Warns if other processes used the CPU meanwhile."""
    disturbed = [r for r in records if (r.get("cores_used_by_others") or 0) > BUSY_CORES]
    if disturbed:
        say(f"WARNING: other processes used the CPU during {len(disturbed)} of {len(records)} measurements;")
        say("         compare ratios at most, or run again on a quiet machine.")


def write_results(
    records: list[dict[str, Any]], summary: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    """Everything, so that a reader may take other statistics than ours."""
    good = [record for record in records if "error" not in record]
    report = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(args.threads),
        "model": describe_model(args.model),
        "workload": {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens},
        "versions": {record["engine"]: record["versions"] for record in good},
        "settings": {f"{record['engine']} n={record['n']}": record["settings"] for record in good},
        "medians": summary,
        "rounds": [{k: v for k, v in r.items() if k not in ("versions", "settings")} for r in records],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"wrote {args.output}")


# ---------------------------------------------------------------------------- the command


def parse_args(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the model found and the engines settled."""
    parser = argparse.ArgumentParser(
        prog=WORKERS, description="Quire and its CPU peers, side by side on this machine"
    )
    parser.add_argument("--engines", nargs="+", choices=(*QUIRE, *ENGINES[1:]), default=list(ENGINES))
    parser.add_argument(
        "--before", type=Path, metavar="SRC", help=f"src of an earlier version, measured in turn as {BEFORE}"
    )
    parser.add_argument("--peers-only", action="store_true", help="leave Quire out")
    parser.add_argument("--n", nargs="+", type=int, default=list(NUM_REQUESTS), help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs within a process; the fastest counts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=physical_cores(), help="default: physical cores")
    parser.add_argument("--model", type=Path, help=f"a GGUF; default: {MODEL_FILE} in Quire's cache")
    parser.add_argument(
        "--gemma",
        nargs="?",
        const="Q8_0",
        metavar="KIND",
        help="make a GGUF of Gemma 3 270M's shape in this format, and compare n=1 and n=8 with llama.cpp",
    )
    parser.add_argument("--openvino-precision", choices=("f32", "bf16", "f16", "auto"), default="f32")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one measurement")
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/cpu.json, for a full run only"
    )
    args = parser.parse_args(words)
    if args.output_tokens < 2 or min(args.n + [args.rounds, args.repeats, args.prompt_tokens]) < 1:
        parser.error("--output-tokens must be at least 2, every other number at least 1")
    if args.before is not None:
        if not Path(args.before, "quire").is_dir():
            parser.error(f"--before {args.before}: no package quire there")
        args.before, args.engines = args.before.resolve(), [*args.engines, BEFORE]
    if args.peers_only:
        args.engines = [engine for engine in args.engines if engine not in QUIRE]
    # A partial run must not silently replace the published record.
    if (
        args.output is None
        and args.before is None
        and set(args.engines) >= set(ENGINES)
        and set(args.n) >= set(NUM_REQUESTS)
    ):
        args.output = RESULTS
    if args.gemma:
        _compare_gemma(args)
    args.model = find_model(args.model)
    return args


def _compare_gemma(args: argparse.Namespace) -> None:
    """OpenVINO's reader of GGUF does not know Gemma 3."""
    from quire_lab.benchmarks.compare_cpu.random_gguf import gemma3_270m

    args.engines = [engine for engine in args.engines if engine != "openvino"]
    args.n = [1, 8] if args.n == list(NUM_REQUESTS) else args.n
    args.output = args.output if args.output not in (None, RESULTS) else GEMMA_RESULTS
    args.model = gemma3_270m(cache_folder() / "benchmarks", args.gemma)


def main(words: Sequence[str] | None = None) -> int:
    """Runs, prints and writes; 1 if any measurement failed. `words`: of the command line, this process's by default."""
    args = parse_args(words)
    records = run_rounds(args)
    summary = summarise(records, args)
    print_table(summary, args)
    warn_if_disturbed(records)
    if args.output is not None:
        write_results(records, summary, args)
    else:
        say("a partial run: nothing written (--output FILE writes it)")
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
