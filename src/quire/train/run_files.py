"""The files of a run, `training` in its folder: checkpoints, the log of its steps, how it ended. No torch: a server
reads them too."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.core.errors import TrainingError

STATE = "trainer.json"
PART = ".part"  # ends the name of what is being written


def write_json(path: Path, content: Any) -> None:
    """Replaces the file at once."""
    beside = path.with_name(path.name + PART)
    with beside.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


class RunFiles:
    """Where everything lies, below the adapter's folder."""

    def __init__(self, folder: Path, keep_checkpoints: int = 1) -> None:
        self.folder = folder / "training"
        self.log = RunLog(self.folder / "events.jsonl")
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep_checkpoints)
        self._result = self.folder / "result.json"

    def ended(self, status: str, error: str | None = None, memory: int = 0) -> None:
        """How the last process ended; of one that was killed there is no record. `memory` bytes
        must be free before a run goes on that was short of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._result, {"status": status, "error": error, "memory": memory})

    def begun(self) -> None:
        self._result.unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(self._result.read_text())
        except (OSError, ValueError):
            return None
        return result


class Checkpoints:
    """The newest few of a run, in folders `step-000120`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Of the whole ones, in order."""
        found = (
            path.name.removeprefix("step-") for path in self.folder.glob("step-*") if (path / STATE).is_file()
        )
        return sorted(int(name) for name in found if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """`write` fills the folder. What there is no room for is removed."""
        path = self.path(step)
        beside = path.with_name(path.name + PART)
        with self.writing(f"the checkpoint of step {step}", self.folder):
            try:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
                write(beside)
                write_json(beside / STATE, state)
                shutil.rmtree(path, ignore_errors=True)
                beside.rename(path)
            except Exception:
                shutil.rmtree(beside, ignore_errors=True)
                raise
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return path

    @contextmanager
    def writing(self, what: str, where: Path) -> Iterator[None]:
        """TrainingError, with the last good checkpoint, where the disk is full."""
        try:
            yield
        except Exception as error:  # safetensors has errors of its own
            raise TrainingError(
                f"{what} cannot be written to {where} ({error}): free some space and run again; {self.last_good()}"
            ) from error

    def last_good(self) -> str:
        steps = self.steps()
        return (
            f"the last good checkpoint is {self.path(steps[-1])}" if steps else "there is no checkpoint yet"
        )

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        steps = self.steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        try:
            return path, json.loads((path / STATE).read_text())
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"{path / STATE} cannot be read ({error}): delete the folder {path}"
            ) from error


class RunLog:
    """Lines of a run: metrics of each step, and messages. A run that goes on drops what came after its checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewind(self, step: int) -> None:
        kept = [event for event in self.read() if event.get("step", 0) <= step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(json.dumps(event) + "\n" for event in kept))

    def add(self, event: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def say(self, message: str, level: str = "info") -> None:
        self.add({"type": "message", "created_at": int(time.time()), "level": level, "message": message})

    def read(self) -> list[dict[str, Any]]:
        """A last line that a crash cut off is left out."""
        events = []
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return events
