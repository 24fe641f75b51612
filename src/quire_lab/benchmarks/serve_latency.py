"""Latency of `quire serve` under load, of one source tree or of several in turn.

    python -m quire_lab.benchmarks.serve_latency --cases 20,40,inf --output FILE                      # on a GPU
    python -m quire_lab.benchmarks.serve_latency --model builtin --cases streams8,streams32 --output FILE   # on a CPU

Each tree serves in a process of its own, and `quire bench serve` of this tree is the client. Cases: a number is a rate
in requests per second and `inf` all at once with 512 streams, each about 220 → 300 tokens. `streamsN` is N answers of
`--stream-tokens`, while ten prompts of 1,000 tokens arrive, one every `--every` seconds; `refusedN` is N such answers,
while a prompt of 15 MB, which no model here takes, arrives twice a second; `aloneN` is the same without it.
`--tree NAME=FOLDER` names a source tree to compare with (its `src`). The model is random weights in the shape of
llama8b, or what `--model` names.
"""

import argparse
import csv
import http.client
import itertools
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_origin
from quire.weights.builtin import builtin_path
from quire.weights.gguf import GgufSource
from quire_lab.benchmarks import workloads

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 300
LOAD_START_SECONDS = 4  # for the load generator to start and its streams to open
WITHOUT_CACHE = "--no-enable-prefix-caching"


def main() -> None:
    options = _options()
    trees = dict(named.split("=", 1) for named in options.tree) | {"this": str(Path(__file__).parents[2])}
    variants = dict(named.split("=", 1) for named in options.variant) or {"": ""}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = str(write_model(Path(folder, "model"), options.shape, options.tokenizer))
        for repeat in range(options.repeats):
            for (name, source), (variant, flags) in itertools.product(trees.items(), variants.items()):
                with serving(model, source, f"{options.flags} {flags}") as server:
                    for case in options.cases.split(","):
                        result = run_case(server, case, options, Path(folder))
                        named = {"tree": name} | ({"variant": variant} if variant else {})
                        rows.append({**named, "repeat": repeat, "case": case, **result})
                        print(_line(rows[-1]), flush=True)
                        if options.output:
                            _write(options, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="20,40,inf")
    parser.add_argument(
        "--model", help="a folder or file; builtin: the built-in model (default: random weights)"
    )
    parser.add_argument("--shape", default="llama8b", choices=list(workloads.SHAPES))
    parser.add_argument(
        "--tokenizer", help="folder of a tokenizer.json for random weights (default: the built-in one)"
    )
    parser.add_argument("--tree", action="append", default=[], help="NAME=FOLDER of sources to compare with")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=400, help="of a rate's case")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between long prompts of streamsN")
    parser.add_argument("--stream-tokens", type=int, default=1600, help="of an answer of streamsN")
    parser.add_argument("--flags", default="", help="further flags of quire serve")
    parser.add_argument(
        "--variant", action="append", default=[], help="NAME=FLAGS to compare with each other"
    )
    parser.add_argument("--output", help="JSON file")
    return parser.parse_args()


def write_model(folder: Path, shape: str, tokenizer: str | None) -> Path:
    """A folder without weights, whose tokenizer has a text for every id of the shape's vocabulary."""
    config = workloads.SHAPES[shape]
    if tokenizer is not None:
        text = Path(tokenizer, "tokenizer.json").read_text()
    else:
        text = GgufSource(builtin_path()).tokenizer_json() or ""
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in content.get("added_tokens", ()))}
    vocabulary |= {f"Ġtok{index}": index for index in range(config["vocab_size"]) if index not in known}
    folder.mkdir()
    Path(folder, "tokenizer.json").write_text(json.dumps(content))
    Path(folder, "config.json").write_text(json.dumps(config))
    return folder


class Server:
    """A server process, its URL, and the CPU seconds of it and of its engine's process."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, start_seconds: float) -> None:
        self.process, self.url, self.start_seconds = process, url, start_seconds

    def cpu_seconds(self) -> dict[str, float]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engine = max(map(_cpu_seconds, map(int, children)), default=0.0)
        return {"http": _cpu_seconds(self.process.pid), "engine": engine}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def serving(model: str, source: str, flags: str) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "--port",
        str(port),
        WITHOUT_CACHE,
        *shlex.split(flags),
    ]
    if model != "builtin":
        command.append(model)
        if Path(model, "config.json").exists() and not list(Path(model).glob("*.safetensors")):
            command += ["--load-format", "dummy"]
    paths = os.pathsep.join([source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    began = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if b"serving" in line:
                break
            if time.perf_counter() - began > START_SECONDS:
                raise SystemExit("the server did not start")
        else:
            raise SystemExit("the server ended")
        yield Server(process, f"http://127.0.0.1:{port}", time.perf_counter() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def run_case(server: Server, case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", server.url]
    command += ["--output-json", str(result), "--percentiles", "50,90,99"]
    kind = case.rstrip("0123456789")
    if kind in ("streams", "refused", "alone"):
        num_prompts = 10 if kind == "streams" else 0
        trace = _write_trace(folder / "trace.csv", int(case.removeprefix(kind)), num_prompts, options)
        command += ["--dataset", "trace", "--dataset-path", str(trace[0]), "--num-prompts", str(trace[1])]
    else:
        command += ["--random-input-len", "220", "--random-output-len", "300", "--random-range-ratio", "0.5"]
        command += ["--request-rate", case]
        at_once = ["--max-concurrency", "512", "--num-prompts", "1000"]
        command += at_once if case == "inf" else ["--num-prompts", str(options.num_prompts)]
    before = server.cpu_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    refusals = _refusals(server.url, process) if kind == "refused" else []
    _out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors)
    after = server.cpu_seconds()
    record = json.loads(result.read_text())
    measured = record["results"]["rounds"][0]
    cpu = {name: round(after[name] - before[name], 2) for name in before}
    refused = {"refusal_ms": refusals} if refusals else {}
    return {"start_s": round(server.start_seconds, 1), "cpu_seconds": cpu, **measured, **refused}


def _refusals(url: str, load: "subprocess.Popen[str]") -> list[float]:
    """Sends prompts of 15 MB while the load runs; milliseconds from the first byte sent to the last received."""
    body = json.dumps({"prompt": "word " * 3_000_000, "max_tokens": 2}).encode()
    address = url.removeprefix("http://").split(":")
    took = []
    time.sleep(LOAD_START_SECONDS)
    while load.poll() is None:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(address[0], int(address[1]))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            answer = response.read()
        took.append(round((time.perf_counter() - began) * 1e3, 1))
        connection.close()
        if response.status != 400 or b"maximum context length" not in answer:
            raise SystemExit(f"the long prompt was not refused: {response.status} {answer[:200]!r}")
        time.sleep(0.5)
    return took


def _write_trace(
    path: Path, num_streams: int, num_prompts: int, options: argparse.Namespace
) -> tuple[Path, int]:
    """N long answers from the start, and prompts of 1,000 tokens with short answers, one after another."""
    rows = [(0.0, 64, options.stream_tokens)] * num_streams
    rows += [(2.0 + options.every * i, 1000, 8) for i in range(num_prompts)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["timestamp", "prompt_tokens", "output_tokens"])
        writer.writerows(rows)
    return path, len(rows)


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "tree")}
    record = {**describe_origin(), "settings": settings, "results": rows}
    Path(options.output).write_text(json.dumps(record, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    def at(key: str, which: str) -> str:
        return f"{row[key][which]:,.1f}"

    refused = row.get("refusal_ms")
    seen = (
        f", {len(refused)} refused in {statistics.median(refused)} (p50) to {max(refused)} ms"
        if refused
        else ""
    )
    return (
        f"{row['tree']:8} {row.get('variant', '')} {row['case']:>9}: "
        f"TTFT p50/p99 {at('ttft_ms', 'p50')}/{at('ttft_ms', 'p99')} ms, "
        f"TPOT p50 {at('tpot_ms', 'p50')} ms, ITL p50/p99/max {at('itl_ms', 'p50')}/{at('itl_ms', 'p99')}/"
        f"{at('itl_ms', 'max')} ms, {row.get('output_tokens_per_second', 0):,.0f} tok/s, CPU {row['cpu_seconds']}"
        + seen
    )


if __name__ == "__main__":
    main()
