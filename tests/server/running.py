"""A real `quire serve` process on a free port, for tests to talk to, signal and bury."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai

MODEL = "SmolLM2-135M-Instruct"
ADMIN_KEY = "the-operators-key"
SMALL = ("--kv-cache-memory-bytes", "256M", "--max-num-seqs", "16")
PATIENCE = 30.0  # for what takes a moment: a busy machine may take many


class RunningServer:
    """Started at once; `wait_ready` waits. Its log is kept, and shown by pytest when a test fails."""

    def __init__(self, *flags: str, **environment: str) -> None:
        if "--data-dir" not in flags:
            flags = (*flags, "--data-dir", "none")  # not the user's own
        self._start("serve", "--admin-key", ADMIN_KEY, "--log-requests", *SMALL, *flags, **environment)

    def _start(self, command: str, *flags: str, **environment: str) -> None:
        # tests of clients may run in another environment
        python = os.environ.get("QUIRE_PYTHON", sys.executable)
        self.process = subprocess.Popen(
            [python, "-m", "quire", command, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self.url = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            print(line, end="", file=sys.stderr)
            found = re.search(r"serving\s+(https?://\S+)/v1", line)
            if found:
                self.url = found[1]
                self._serving.set()
        self._serving.set()

    def wait_ready(self) -> "RunningServer":
        assert self._serving.wait(120), "the server did not start"
        assert self.url, "the server ended: " + "\n".join(self.lines[-5:])
        return self

    def wait_for_line(self, *words: str, seconds: float = PATIENCE) -> str:
        """The first line of the log that has these words. An answer may be here before the line about it."""
        deadline = time.monotonic() + seconds
        while True:
            for line in list(self.lines):
                if all(word in line for word in words):
                    return line
            assert time.monotonic() < deadline, f"no line with {words}: " + "\n".join(self.lines[-5:])
            time.sleep(0.02)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "any", "max_retries": 0, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "any", "max_retries": 0, **options}
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=2 * PATIENCE, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=4 * PATIENCE, **options)

    def error(self, path: str, status: int, **options: Any) -> dict[str, Any]:
        """The error that a request must get, after a look at its shape."""
        response = self.post(path, **options)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert isinstance(error["type"], str)
        return error

    def chat_error(self, status: int = 400, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
        return self.error("/v1/chat/completions", status, json=body)

    def pool(self) -> dict[str, Any]:
        """The pool, recounted; fails if it is not whole."""
        response = self.post("/check_integrity", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert response.status_code == 200, response.text
        return response.json()

    def wait_idle(self, blocks_used: int = 0) -> dict[str, Any]:
        """Until no request is open and no block but those that are pinned is in use."""
        deadline = time.monotonic() + PATIENCE
        while (pool := self.pool())["requests_open"] or pool["blocks_used"] != blocks_used:
            assert time.monotonic() < deadline, pool
            time.sleep(0.02)
        return pool

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of that name that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == f"quire_{name}" and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total

    def wait_metric(self, expected: float, name: str, **labels: str) -> None:
        """A request is counted after its last byte, and the engine's figures come with its next message."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.metric(name, **labels)) != expected:
            assert time.monotonic() < deadline, f"{name} is {found}, not {expected}"
            time.sleep(0.02)

    def wait_status(self, path: str, status: int) -> httpx.Response:
        """The first answer with that status."""
        deadline = time.monotonic() + 2 * PATIENCE  # an engine may have to start first
        while (response := self.get(path)).status_code != status:
            assert time.monotonic() < deadline, response.text
            time.sleep(0.05)
        return response

    def send_random_frames(self) -> None:
        """10,000 pieces of bytes to its port, as themselves or behind the beginning of a request."""
        drawn = random.Random(0)
        host, port = self.url.removeprefix("http://").split(":")
        starts = (
            b"",
            b"POST /v1/completions HTTP/1.1\r\n",
            b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        )
        for number in range(100):
            with (
                socket.create_connection((host, int(port))) as raw,
                suppress(OSError),
            ):  # it may close at once
                raw.sendall(starts[number % len(starts)])
                for _ in range(100):
                    raw.sendall(drawn.randbytes(drawn.randrange(1, 100)))

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [pid for pid in children if "quire.link.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(found) == 1
        return int(found[0])

    def wait_exit(self, seconds: float = 2 * PATIENCE) -> int:
        """With the whole log read."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(2 * PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise


class RunningRouter(RunningServer):
    """A real `quire route` process before servers that run already."""

    def __init__(self, *flags: str) -> None:
        self._start("route", *flags)
