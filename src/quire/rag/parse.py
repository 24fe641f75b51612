"""parse_file: the text of a file, read in a process of its own with limits on time and memory.

`python -m quire.rag.parse` is that process. A job is a line of JSON on stdin, its answer a line on stdout, and after
it the text. The process is kept for the next file, and replaced after some files and whenever it is killed.
"""

import atexit
import json
import resource
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from quire.core.errors import QuireError
from quire.observe.bounded import BoundedProcess
from quire.rag.parsers import FileProblem, ParseLimits, parse

START_SECONDS = 30.0
USUAL_LIMITS = ParseLimits()
FILES_EACH = 1000  # of one process: what a parser leaks is bounded


class ParseError(QuireError):
    """`code` is OpenAI's for a file that cannot be indexed: unsupported_file, invalid_file or server_error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_file(path: Path, filename: str, limits: ParseLimits = USUAL_LIMITS) -> str:
    """The text of the file at `path`, whose `filename` has the ending that says what it is.

    ParseError says what is wrong with the file, within the limits. From several threads: one file at a time.
    """
    if not Path(path).is_file():
        raise ParseError("server_error", f"{filename}: the file is not there any more: add it again")
    return _process.parse(Path(path), filename, limits)


class _ParseProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: BoundedProcess | None = None
        self._num_files = 0
        self._memory_bytes = 0

    def parse(self, path: Path, filename: str, limits: ParseLimits) -> str:
        with self._lock:
            if self._num_files >= FILES_EACH or self._memory_bytes != limits.memory_bytes:
                self._close()
            process = self._process
            if process is None or not process.is_alive:
                process = self._start(limits.memory_bytes)
            job = {"path": str(path.resolve()), "filename": filename, "limits": asdict(limits)}
            self._num_files += 1
            reply = process.ask(job, limits.seconds)
            if reply is None:
                code = self._close()
                excess = f"more than {limits.seconds:g} s" if code == -signal.SIGKILL else "too much memory"
                raise ParseError(
                    "invalid_file", f"{filename}: it takes {excess} to read: split or simplify it"
                )
        answer, text = reply
        if "error" in answer:
            raise ParseError(answer["code"], f"{filename}: {answer['error']}")
        return text.decode()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _start(self, memory_bytes: int) -> BoundedProcess:
        process = BoundedProcess("quire.rag.parse", memory_bytes)
        self._process, self._num_files, self._memory_bytes = process, 0, memory_bytes
        if process.ask(None, START_SECONDS) is None:
            problem = f"the process that reads files cannot be started (exit code {self._close()})"
            raise ParseError("server_error", problem)
        return process

    def _close(self) -> int | None:
        process, self._process = self._process, None
        return None if process is None else process.close()


_process = _ParseProcess()
atexit.register(_process.close)


# ---------------------------------------------------------------------- in the process itself


def _answer(line: bytes) -> tuple[dict[str, Any], bytes]:
    job = json.loads(line)
    limits = ParseLimits(**job["limits"])
    code, problem = "invalid_file", ""
    try:
        with open(job["path"], "rb") as file:
            text = parse(file, job["filename"], limits).encode()
        return {"bytes": len(text)}, text
    except FileProblem as known:
        code, problem = known.code, str(known)
    except MemoryError:
        problem = f"it takes more than {limits.memory_bytes >> 20} MiB of memory to read: split it"
    except RecursionError:
        problem = "it is nested too deep to read: simplify it"
    except ImportError as error:
        code, problem = "server_error", f"{error}: pip install 'quire[rag]'"
    except OSError as error:
        code, problem = "server_error", f"it cannot be read ({error})"[:300]
    except Exception as fault:  # a parser's fault is this file's error
        problem = f"it cannot be read ({type(fault).__name__}: {fault})"[:300]
    return {"code": code, "error": problem}, b""


def _write(stream: IO[bytes], answer: dict[str, Any], text: bytes) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.write(text)
    stream.flush()


def main() -> int:
    memory_bytes = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    with suppress(ImportError):
        import pypdf  # noqa: F401 # before the limits hold
    with suppress(ValueError, OSError):  # some systems know no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(sys.stdout.buffer, {}, b"")
    for line in sys.stdin.buffer:
        _write(sys.stdout.buffer, *_answer(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
