"""The tracer inside each server process: records which functions of one package run, phase by phase.

Python imports a module of this name at start when its folder is on PYTHONPATH. The tracer reads two environment
variables: QUIRE_TRACE_PACKAGE is the folder of the package, QUIRE_TRACE_FOLDER the folder of the control files. The
file `phase` there names the current phase. A thread polls it, confirms each phase in `PID.phase`, and writes the calls
of all phases to `PID.json` when the phase is `done`. Calls outside of a phase are not recorded.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

POLL_SECONDS = 0.005


class Tracer:
    """Counts calls per function in the current phase, in order of the first call."""

    def __init__(self, package: str, folder: Path) -> None:
        self._prefix = package.rstrip(os.sep) + os.sep
        self._folder = folder
        self._phases: dict[str, dict[CodeType, int]] = {}
        self._calls: dict[CodeType, int] | None = None  # of the current phase; None: not recording
        self._starts: dict[CodeType, float] = {}

    def install(self) -> None:
        """Traces all threads of this process, existing and later ones."""
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.PROFILER_ID, "trace_request")
            events = monitoring.events.PY_START | monitoring.events.PY_RESUME
            for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
                monitoring.register_callback(monitoring.PROFILER_ID, event, self._on_start)
            monitoring.set_events(monitoring.PROFILER_ID, events)
        else:  # a profile function belongs to one thread and cannot be set from another: set it before any starts
            threading.setprofile(self._on_profile)
            sys.setprofile(self._on_profile)
        threading.Thread(target=self._watch, name="trace-request", daemon=True).start()

    def _on_profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and self._calls is not None:
            self._on_start(frame.f_code, 0)

    def _on_start(self, code: CodeType, _offset: int) -> None:
        calls = self._calls
        if calls is not None and code.co_filename.startswith(self._prefix):
            if code not in calls:
                self._starts[code] = time.time()
            calls[code] = calls.get(code, 0) + 1

    def _watch(self) -> None:
        current = ""
        while current != "done":
            time.sleep(POLL_SECONDS)
            try:
                phase = (self._folder / "phase").read_text()
            except OSError:  # not written yet, or the controller has ended
                continue
            if phase == current:
                continue
            current = phase
            recorded = phase not in ("", "done")
            self._calls = self._phases.setdefault(phase, {}) if recorded else None
            if phase == "done":
                self._write()
            (self._folder / f"{os.getpid()}.phase").write_text(phase)

    def _write(self) -> None:
        phases = {
            phase: [
                {
                    "file": code.co_filename.removeprefix(self._prefix),
                    "function": code.co_qualname,
                    "calls": count,
                    "start": self._starts[code],
                }
                for code, count in calls.items()
            ]
            for phase, calls in self._phases.items()
        }
        record = {"command": sys.orig_argv, "phases": phases}
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(record))


if "QUIRE_TRACE_FOLDER" in os.environ and "QUIRE_TRACE_PACKAGE" in os.environ:
    Tracer(os.environ["QUIRE_TRACE_PACKAGE"], Path(os.environ["QUIRE_TRACE_FOLDER"])).install()
