"""Starts `quire serve` under a tracer, sends one streamed chat request and prints the files that it passed through.

A file counts if the request entered one of its functions in either process. Requests of the same form with other
prompts warm the server up first, so that this one is prefilled, and functions that also run in an idle server
(heartbeats, timers) do not count. Code that Python generates, such as a dataclass's `__init__`, belongs to no file.

Usage: python -m tools.trace_request [--budget FILES] [--functions] [-- FLAGS OF quire serve]
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACER = Path(__file__).parent / "sitecustomize.py"
START_SECONDS = 180.0
PHASE_SECONDS = 30.0
IDLE_SECONDS = 2.5  # longer than the period of any timer that runs in an idle server
DEFAULT_FLAGS = ("--kv-cache-memory-bytes", "256M", "--max-num-seqs", "16")
WARM_UP = ("What is the capital of France?", "Name three rivers of Europe.", "Why is the sky blue at noon?")
PROMPT = "Which of the planets has the longest year, and how long is it?"  # is in no cache
REQUEST = {
    "temperature": 0,
    "max_tokens": 8,
    "stream": True,
}


@dataclass
class FileCalls:
    """One file that the request entered in one process."""

    name: str  # relative to the package, `room/file.py`
    start: float
    calls: int = 0
    functions: list[str] = field(default_factory=list)

    @property
    def room(self) -> str:
        return self.name.partition("/")[0] if "/" in self.name else ""


@dataclass(frozen=True)
class ProcessTrace:
    name: str
    files: list[FileCalls]  # by first call


class Control:
    """The control files: sets the phase and waits until every traced process has confirmed it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, phase: str) -> None:
        new = self._folder / "phase.new"
        new.write_text(phase)
        new.rename(self._folder / "phase")  # a reader sees the old text or the new one
        deadline = time.monotonic() + PHASE_SECONDS
        while pending := [
            pid for pid, confirmed in self._confirmed() if confirmed != phase and _is_alive(pid)
        ]:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"processes {pending} did not enter the phase {phase!r} in {PHASE_SECONDS} s"
                )
            time.sleep(0.005)

    def _confirmed(self) -> list[tuple[int, str]]:
        return [(int(path.stem), path.read_text()) for path in self._folder.glob("*.phase")]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self._folder.glob("*.json"))]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def running_server(folder: Path, flags: list[str]) -> Iterator[str]:
    """A server whose processes are traced; yields its address."""
    package = importlib.util.find_spec("quire")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    path = os.pathsep.join([str(folder), str(root.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "QUIRE_TRACE_FOLDER": str(folder),
        "QUIRE_TRACE_PACKAGE": str(root),
    }
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        lines: list[str] = []
        addresses: list[str] = []
        ready = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"serving\s+(https?://\S+)/v1", line):
                    addresses.append(match[1])
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            if not ready.wait(START_SECONDS) or not addresses:
                raise SystemExit("the server did not start:\n" + "".join(lines[-20:]))
            yield addresses[0]
        finally:
            process.terminate()
            reader.join()


def send(address: str, prompt: str) -> int:
    """The request, read to its last byte. Returns the number of events."""
    body = {**REQUEST, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PHASE_SECONDS) as response:
        return sum(1 for line in response if line.startswith(b"data:"))


def trace(flags: list[str]) -> tuple[list[ProcessTrace], int]:
    """The files per process, and the number of events in the answer."""
    with tempfile.TemporaryDirectory(prefix="quire-trace-") as name:
        folder = Path(name)
        (folder / TRACER.name).write_text(TRACER.read_text())
        control = Control(folder)
        with running_server(folder, flags) as address:
            for prompt in WARM_UP:
                send(address, prompt)
            control.enter("idle")
            time.sleep(IDLE_SECONDS)
            control.enter("request")
            num_events = send(address, PROMPT)
            control.enter("done")
            traces = [process_trace(record) for record in control.records()]
    return [process for process in traces if process.files], num_events


def process_trace(record: dict[str, Any]) -> ProcessTrace:
    command = " ".join(record["command"])
    if "quire.link.worker" in command:
        name = "engine process"
    elif "serve" in record["command"]:
        name = "HTTP process"
    else:
        name = command
    idle = {(call["file"], call["function"]) for call in record["phases"].get("idle", [])}
    files: dict[str, FileCalls] = {}
    for call in record["phases"].get("request", []):
        if (call["file"], call["function"]) in idle:
            continue
        entry = files.setdefault(call["file"], FileCalls(call["file"], call["start"]))
        entry.start = min(entry.start, call["start"])
        entry.calls += call["calls"]
        entry.functions.append(call["function"])
    return ProcessTrace(name, sorted(files.values(), key=lambda entry: entry.start))


def report(traces: list[ProcessTrace], num_events: int, functions: bool) -> list[str]:
    lines = [f"One streamed chat request, {num_events} events. Files in order of the first call:"]
    for process in sorted(traces, key=lambda process: process.files[0].start):
        files = process.files
        lines += ["", f"{process.name}: {len(files)} files, {sum(f.calls for f in files)} calls"]
        for number, entry in enumerate(files, 1):
            lines.append(f"  {number:3}. {entry.calls:5} calls  {entry.name}")
            if functions:
                lines.append(" " * 20 + ", ".join(entry.functions))
    rooms: dict[str, set[str]] = {}
    for entry in (entry for process in traces for entry in process.files):
        rooms.setdefault(entry.room, set()).add(entry.name)
    lines += [
        "",
        f"{len(rooms)} rooms: " + ", ".join(f"{room} {len(names)}" for room, names in rooms.items()),
    ]
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace_request", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--budget", type=int, metavar="FILES", help="exit 1 if the request enters more files")
    parser.add_argument("--functions", action="store_true", help="name the functions of each file")
    parser.add_argument("flags", nargs="*", help="flags of `quire serve`, after --")
    parsed = parser.parse_args(arguments)
    traces, num_events = trace(parsed.flags or list(DEFAULT_FLAGS))
    print("\n".join(report(traces, num_events, parsed.functions)))
    num_files = len({entry.name for process in traces for entry in process.files})
    over = parsed.budget is not None and num_files > parsed.budget
    budget = "" if parsed.budget is None else f" (budget {parsed.budget}{': exceeded' if over else ''})"
    print(f"total: {num_files} distinct files{budget}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
