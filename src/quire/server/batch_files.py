"""The two files of a batch: read a line at a time, written a whole row at a time."""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from quire.core.errors import ConfigError
from quire.server.batch_lines import is_finished

STREAM = "-"  # standard input or output


def open_input(path: str) -> BinaryIO:
    if path == STREAM:
        return sys.stdin.buffer
    try:
        return Path(path).expanduser().open("rb")
    except OSError as error:
        raise ConfigError(f"-i {path}: cannot be read ({error.strerror})") from error


def count_lines(path: str) -> int | None:
    """For a progress bar; None where one cannot look twice."""
    if path == STREAM:
        return None
    with Path(path).expanduser().open("rb") as file:
        return sum(1 for line in file if line.strip())


def is_same_file(one: str, other: str) -> bool:
    """Also through a link or another spelling. Standard input and output are never one file here."""
    if STREAM in (one, other) or not Path(other).expanduser().exists():
        return False
    return Path(one).expanduser().samefile(Path(other).expanduser())


class RowFile:
    """Rows are appended with one write each: whenever the program ends, every row in the file is whole."""

    def __init__(self, path: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.finished: set[str] = set()  # ids of an earlier run that need not be asked again
        self._is_stream = path == STREAM
        if self._is_stream:
            self._descriptor = sys.stdout.fileno()
            return
        file = Path(path).expanduser()
        try:
            if file.exists() and file.stat().st_size and not (resume or overwrite):
                raise ConfigError(
                    f"-o {path}: holds rows already: --resume goes on with them, --overwrite drops them"
                )
            if resume and file.exists():
                self.finished = _keep_finished(file)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if overwrite and not resume else 0)
            self._descriptor = os.open(file, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"-o {path}: cannot be written ({error.strerror})") from error

    def write(self, row: dict[str, Any]) -> None:
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        while data:  # a pipe may take less than all of it
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        if not self._is_stream:
            os.close(self._descriptor)


def _keep_finished(file: Path) -> set[str]:
    """Drops what must be asked again: rows of failures, and one that a crash cut off."""
    kept, finished = [], set()
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if is_finished(row) and line.endswith(b"\n"):
            kept.append(line)
            finished.add(row["custom_id"])
    beside = file.with_name(f"{file.name}.part")
    beside.write_bytes(b"".join(kept))
    os.replace(beside, file)
    return finished
