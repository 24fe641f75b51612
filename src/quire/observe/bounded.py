"""BoundedProcess: a program that may hang, run out of memory or crash, in a process of its own."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, cast

CLOSE_SECONDS = 1.0
MAX_LINE = 64 << 20  # bytes of an answer


class BoundedProcess:
    """`python -m MODULE`, which reads lines of JSON and answers each with one.

    An answer with `bytes` is followed by that many. It ends with its stdin. For one thread at a time.
    """

    def __init__(self, module: str, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
        self._pipes = cast("tuple[IO[bytes], IO[bytes]]", (self.process.stdin, self.process.stdout))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: Any, seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """The answer and its bytes; None if the process died, or was killed after `seconds`. Without a message: what
        it says by itself."""
        requests, answers = self._pipes
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            if message is not None:
                requests.write(json.dumps(message).encode() + b"\n")
                requests.flush()
            line = answers.readline(MAX_LINE)
            answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"bytes": -1}
            data = answers.read(max(0, answer.get("bytes", 0)))
        except OSError:
            return None
        finally:
            timer.cancel()
        return (answer, data) if len(data) == answer.get("bytes", 0) else None

    def close(self) -> int:
        """Ends the process; its exit code."""
        for pipe in self._pipes:
            with suppress(OSError):  # unwritten data does not matter any more
                pipe.close()
        try:
            return self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
