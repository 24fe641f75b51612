"""Random requests to every endpoint of a real server, by the fields of its OpenAPI document: what they cost and break.

`python -m tests.server.fuzz --requests 20000` prints a summary as JSON and fails if a bound is exceeded: an answer with
a status of 500 or more, a refusal that takes more than 2 s three times, memory that grew by more than 500 MB, an engine
that restarted.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import ADMIN_KEY, MODEL, PATIENCE, RunningServer

REFUSAL_SECONDS = 2.0
GROWN_MB = 500.0
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}},
}
# What makes a request servable, by the field's name.
VALID: dict[str, Any] = {
    "messages": HI,
    "prompt": "Hi",
    "input": "Hi",
    "tokens": [1, 2],
    "text_1": "Hi",
    "text_2": ["Hi"],
    "query": "Hi",
    "documents": ["Hi"],
    "lora_name": "a",
    "lora_path": "a",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "bytes": 10,
    "filename": "a.txt",
    "mime_type": "text/plain",
    "purpose": "assistants",
    "part_ids": ["none"],
    "items": HI,
    "requests": [{"custom_id": "a", "params": {"model": MODEL, "max_tokens": 2, "messages": HI}}],
}
MISSING = ("none", "a%2Fb", "x" * 300)  # ids of nothing
PART = re.compile(r"\{(\w+)\}")
Ids = dict[str, list[str]]  # that exist, by the path that lists them
UPLOAD = ("bytes", "filename", "mime_type", "purpose")
# Multipart bodies, which the document does not describe: the field of the file, and other fields with a valid value.
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "/v1/files": (
        "file",
        {"purpose": "assistants", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
    ),
    "/v1/uploads/{upload_id}/parts": ("data", {}),
}
NUMBERS = ("1", "5", "100", "101", "0", "-1", "x", "1e3", "%00", "%ff", "000000001999", "9" * 5000)
QUERIES = {
    "limit": NUMBERS,
    "order": ("asc", "desc", "up", ""),
    "stream": ("true", "false", "1", ""),
    "starting_after": NUMBERS,
    "purpose": ("assistants", "batch", "none"),
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SPECIAL: dict[str, list[Any]] = {
    "n": [2, 16, 17, 1024, 10**9],
    "best_of": [2, 16, 17, 1024, 10**9],
    "stop": ["x" * 1024, "x" * 400_000, ["x"] * 64, ["ab" * 500] * 64],
    "bad_words": [[f"q{i}x" for i in range(5000)], ["ab " * 20_000], [f"w{i}" for i in range(1000)], ["b"]],
    "stop_token_ids": [list(range(0, 49152, 2)), [1] * 300_000, [-1], [2**40]],
    "allowed_token_ids": [list(range(49152)), [1] * 300_000, [5, 6], []],
    "logit_bias": [{str(i): 1 for i in range(5000)}, {str(i): -100 for i in range(4000)}, {"5": 100}],
    "prompt": [
        ["a"] * 200,
        ["a"] * 20_000,
        "a" * 5_000_000,
        "a b" * 100_000,
        [1] * 200_000,
        [[1]] * 50_000,
        ["a", 1],
    ],
    "input": [["a"] * 3000, "a " * 500_000, [1] * 200_000, HI * 500],
    "tokens": [[1] * 200_000],
    "text_1": [["a"] * 3000, "a " * 500_000, ["a", "b"]],
    "text_2": [["a"] * 3000, "a " * 500_000, ["a", "b"]],
    "query": ["a " * 500_000, "a" * 5_000_000],
    "documents": [["a"] * 3000, ["a " * 500_000], [{"text": "a"}, "b"], [{}] * 50_000],
    "top_n": [0, 1, 10**9],
    "messages": [
        HI * 20_000,
        HI * 300,
        [{}] * 50_000,
        [{"role": "x" * 100_000}],
        [{"role": "user", "content": "a" * 10**6}],
    ],
    "tools": [
        [TOOL],
        [TOOL] * 2000,
        [{"type": "function", "function": {"name": "g", "parameters": {"a": ["x"] * 50_000}}}],
    ],
    "regex": ["(a{1,400}b){1,400}", "a*", "(" * 500, "x" * 200_000],
    "guided_choice": [["a", "b"], ["a"] * 5000, ["a" * 200_000]],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"] * 9000}}},
    ],
    "metadata": [{str(i): "a" for i in range(50_000)}, {"a": "b"}],
    "user": ["u" * 10**6],
    "cache_salt": ["s" * 10**6, "s"],
    "model": ["m" * 10**6, "none"],
    "seed": [1, 2**64],
    "truncate_prompt_tokens": [-1, 1, 5],
    "file_ids": [["none"], [1] * 100_000, ["a"] * 3000],
    "files": [[{"file_id": "none"}], [{}] * 50_000],
    "part_ids": [["a"] * 20_000, [1] * 100_000],
    "requests": [[{}] * 50_000, [{"custom_id": "a", "params": {"max_tokens": -1}}]],
    "filters": [{"type": "eq", "key": "a", "value": "b"}, {"type": "and", "filters": [{}] * 20_000}],
    "items": [HI * 20, [{}] * 50_000, [{"type": "file_search_call", "queries": 5}]],
    "tool_choice": [{"type": []}, {"type": "tool", "name": []}],
    "text": [{"verbosity": "\ud800"}, {"format": {"type": []}}],
    "reasoning": [{"effort": "\ud800"}],
    "purpose": ["batch", "none"],
    "expires_after": [{"anchor": "last_active_at", "days": 1}, {"anchor": "created_at", "seconds": 3600}],
}


@dataclass
class Summary:
    requests: int = 0
    seconds: float = 0.0
    seed: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    endpoints: dict[str, int] = field(default_factory=dict)
    slowest_refusal: float = 0.0
    slowest_refusal_of: str = ""
    http_mb: tuple[float, float] = (0.0, 0.0)  # at the beginning and at its peak
    engine_mb: tuple[float, float] = (0.0, 0.0)
    restarts: float = 0.0
    faults: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        found = list(self.faults)
        if self.slowest_refusal > REFUSAL_SECONDS:
            found.append(f"a refusal took {self.slowest_refusal:.2f} s: {self.slowest_refusal_of}")
        for name, (before, peak) in (("HTTP", self.http_mb), ("engine", self.engine_mb)):
            if peak - before > GROWN_MB:
                found.append(f"the {name} process grew from {before:.0f} to {peak:.0f} MB")
        if self.restarts:
            found.append(f"the engine was restarted {self.restarts:.0f} times")
        return found


class Fuzzer:
    """Makes requests from a seed: request number i is the same in every run."""

    def __init__(self, document: dict[str, Any], seed: int, ids: Ids | None = None) -> None:
        self._seed, self._ids = seed, ids or {}
        files, batches = (self._ids.get(path, ["none"]) for path in ("/v1/files", "/v1/batches/input"))
        self._valid = VALID | {"file_id": files[0], "file_ids": files[:1], "input_file_id": batches[0]}
        schemas = document.get("components", {}).get("schemas", {})
        self.operations: list[tuple[str, str, list[str]]] = []
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                body = (
                    operation.get("requestBody", {})
                    .get("content", {})
                    .get("application/json", {})
                    .get("schema", {})
                )
                names = [
                    one.get("$ref", "").rpartition("/")[2] for one in (body, *body.get("anyOf", ()))
                ]  # a body may be left out: then it is anyOf with null
                fields = [field for name in names for field in schemas.get(name, {}).get("properties", {})]
                self.operations.append((method.upper(), path, fields))

    def request(self, number: int) -> tuple[str, str, str, dict[str, str], bytes]:
        """Method, path, the path in the document, headers and body."""
        draw = random.Random(f"{self._seed}-{number}")
        with_body = [one for one in self.operations if one[2] or _has_form(*one[:2])]
        method, path, fields = draw.choice(with_body if draw.random() < 0.8 else self.operations)
        template = path
        path = PART.sub(lambda found: self._id(draw, method, template[: found.start() - 1]), template)
        headers = {"Content-Type": "application/json", "X-Request-Id": f"fuzz-{number}"}
        if draw.random() < 0.05:
            headers["X-Junk"] = "x" * draw.choice([10, 5000, 70_000])
        if path.startswith(("/reset", "/check", "/v1/load", "/v1/unload")) and draw.random() < 0.5:
            headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        if _has_form(method, template):
            headers["Content-Type"] = "multipart/form-data; boundary=b"
            return method, path, template, headers, self._form(draw, template)
        if method == "GET" and draw.random() < 0.5:
            path += f"?{self._query(draw, template)}"
        return method, path, template, headers, self._body(draw, fields) if fields else b""

    def _query(self, draw: random.Random, template: str) -> str:
        query = {name: draw.choice(values) for name, values in QUERIES.items() if draw.random() < 0.3}
        for name in ("after", "before", "after_id", "before_id"):
            if draw.random() < 0.2:
                query[name] = self._id(draw, "GET", template)
        return "&".join(f"{name}={value}" for name, value in query.items())

    def _form(self, draw: random.Random, template: str) -> bytes:
        """Half are as they should be; others miss a part, have one twice, or are cut or changed somewhere."""
        name, fields = FORMS[template]
        parts = [f'name="{field}"\r\n\r\n{value}' for field, value in fields.items()]
        size = draw.choice([0, 1, 100, 100_000])
        parts.append(f'name="{name}"; filename="{draw.choice(["a.txt", "é", ""])}"\r\n\r\n{size * "a"}')
        if draw.random() < 0.3:
            parts = draw.choice([parts[1:], parts[:-1], parts * 2, parts * 20, ["x" * 10_000, *parts]])
        elif draw.random() < 0.3:
            at = draw.randrange(len(parts))
            parts[at] = (
                draw.choice([str(self._value(draw)), f"x: {'y' * 5000}\r\n", "\r\nz: 1" * 9, '"']) + parts[at]
            )
        raw = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--b--\r\n"
        content = raw.encode("utf-8", "replace")
        return content if draw.random() < 0.7 else content[: draw.randrange(len(content))]

    def _id(self, draw: random.Random, method: str, parent: str) -> str:
        """Half of them exist. The first of each kind is never deleted."""
        known = self._ids.get(parent, [])[method == "DELETE" :]
        missing, position = draw.choice(MISSING), draw.random()
        return known[int((2 * position - 1) * len(known))] if known and position >= 0.5 else missing

    def _body(self, draw: random.Random, fields: list[str]) -> bytes:
        if draw.random() < 0.02:
            return draw.choice(
                [
                    b"",
                    b"[]",
                    b"{",
                    b"\xff" * 50,
                    b'{"prompt":' + b"[" * 90_000,
                    b'{"messages":[' + b"{}," * 2_000_000,
                ]
            )
        body = {name: value for name, value in self._valid.items() if name in fields}
        if {"prompt", "messages"} <= body.keys():  # one of them
            del body[draw.choice(["prompt", "messages"])]
        for name in draw.sample(fields, k=min(len(fields), draw.choice([0, 1, 1, 1, 2, 3]))):
            chosen = SPECIAL.get(name)
            body[name] = draw.choice(chosen) if chosen and draw.random() < 0.6 else self._value(draw)
        for name in LENGTHS:
            if name in fields and (name not in body or isinstance(body[name], int)):
                body[name] = 2 if name not in body or body[name] > 2 else body[name]
        raw = json.dumps(body).encode()
        if draw.random() < 0.05:
            at = draw.randrange(len(raw))
            raw = raw[:at] + draw.choice([b"", b"\x00", b'"', b"}", b"\\ud800", b"1e999"]) + raw[at + 1 :]
        return raw

    def _value(self, draw: random.Random, depth: int = 0) -> Any:
        size = draw.choice([1, 1, 2, 5, 20, 1000]) if depth else draw.choice([1, 1, 2, 5, 100, 5000, 100_000])
        kind = draw.randrange(9 if depth < 3 else 6)
        if kind == 0:
            return draw.choice([None, True, False])
        if kind == 1:
            return draw.choice([0, 1, -1, 3, 17, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30)])
        if kind == 2:
            return draw.choice([0.0, 0.5, 1.0, -2.0, 1e308, -1e308, 1e-320, float("nan"), float("inf")])
        if kind in (3, 4):
            return draw.choice(["", "a", "\ud800", "\0", "é" * size, "a b " * size, "[" * size])
        if kind == 5:
            return draw.choice(
                [[1] * size, ["a"] * size, [None] * size, [{}] * min(size, 20_000), [[]] * size]
            )
        if kind == 6:
            return [self._value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return {
            draw.choice(["type", "name", "a", "text"]): self._value(draw, depth + 1)
            for _ in range(draw.randrange(3))
        }


def _has_form(method: str, template: str) -> bool:
    return method == "POST" and template in FORMS


class Memory(threading.Thread):
    """The peak memory of the HTTP process and of all its children together, in MB."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._server_id = server.process.pid
        self._done = threading.Event()
        self.before = self.peak = self._now()

    def run(self) -> None:
        while not self._done.wait(0.2):
            http, engines = self._now()
            self.peak = (max(self.peak[0], http), max(self.peak[1], engines))

    def stop(self) -> None:
        self._done.set()
        self.join()

    def _now(self) -> tuple[float, float]:
        children = Path(f"/proc/{self._server_id}/task/{self._server_id}/children").read_text().split()
        return _megabytes(self._server_id), sum(map(_megabytes, children))


def _megabytes(pid: int | str) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    except OSError:
        return 0.0


def fuzz(
    server: RunningServer, num_requests: int, seed: int = 0, num_clients: int = 6, seconds: float = 1e9
) -> Summary:
    """Sends requests 0 … num_requests - 1 of the seed, or as many as fit into `seconds`."""
    _start_helpers(server)
    fuzzer = Fuzzer(server.get("/openapi.json").json(), seed, _make_objects(server))
    memory = Memory(server)
    memory.start()
    summary, lock, numbers = Summary(seed=seed), threading.Lock(), iter(range(num_requests))
    statuses: Counter[str] = Counter()
    endpoints: Counter[str] = Counter()
    restarts, begun = server.metric("engine_restarts_total"), time.monotonic()

    def work() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while time.monotonic() - begun < seconds:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                method, path, template, headers, body = fuzzer.request(number)
                shown = f"{number}: {method} {path[:60]} {body[:200]!r}"
                took = float("inf")
                try:
                    for _ in range(3):  # the quickest of three: other work may hold the machine up
                        sent = time.monotonic()
                        answer = client.request(method, path, headers=headers, content=body)
                        took = min(took, time.monotonic() - sent)
                        if answer.status_code < 400 or took <= REFUSAL_SECONDS:
                            break
                except httpx.HTTPError as error:
                    with lock:
                        summary.faults.append(f"{shown}: {type(error).__name__} {error}")
                    continue
                with lock:
                    statuses[str(answer.status_code)] += 1
                    endpoints[f"{method} {template}"] += 1
                    if answer.status_code >= 500:
                        summary.faults.append(f"{shown}: {answer.status_code} {answer.text[:300]}")
                    elif answer.status_code >= 400 and took > summary.slowest_refusal:
                        summary.slowest_refusal, summary.slowest_refusal_of = (
                            took,
                            f"{shown} {answer.text[:200]}",
                        )

    with ThreadPoolExecutor(num_clients) as pool:
        for done in [pool.submit(work) for _ in range(num_clients)]:
            done.result()
    memory.stop()
    summary.requests, summary.seconds = sum(statuses.values()), round(time.monotonic() - begun, 1)
    summary.statuses, summary.endpoints = dict(sorted(statuses.items())), dict(sorted(endpoints.items()))
    summary.http_mb = (round(memory.before[0]), round(memory.peak[0]))
    summary.engine_mb = (round(memory.before[1]), round(memory.peak[1]))
    summary.restarts = server.metric("engine_restarts_total") - restarts
    return summary


def _start_helpers(server: RunningServer) -> None:
    """The embedding engine and the processes that compile grammars start with the first requests that need them."""
    server.post("/v1/embeddings", json={"input": "Hi"})
    with ThreadPoolExecutor(4) as pool:
        regexes = [{"prompt": "Hi", "max_tokens": 2, "regex": f"{i}a*"} for i in range(8)]
        list(pool.map(lambda body: server.post("/v1/completions", json=body), regexes))


def _make_objects(server: RunningServer) -> Ids:
    """Objects that random requests alone would hardly ever name. Without a data folder only those in memory."""

    def made(path: str, count: int = 4, **options: Any) -> list[str]:
        answers = [server.post(path, **options) for _ in range(count)]
        return [answer.json()["id"] for answer in answers if answer.status_code == 200]

    def uploaded(purpose: str, text: bytes, count: int = 4) -> list[str]:
        return made("/v1/files", count, data={"purpose": purpose}, files={"file": ("a.jsonl", text)})

    chat = {"messages": HI, "max_tokens": 2, "store": True}
    conversations = made("/v1/conversations", json={"items": HI})
    items = [server.get(f"/v1/conversations/{one}/items").json()["data"][0]["id"] for one in conversations]
    ids = {
        "/v1/models": [MODEL],
        "/v1/chat/completions": made("/v1/chat/completions", json=chat),
        "/v1/responses": made("/v1/responses", json={"input": "Hi", "max_output_tokens": 16}),
        "/v1/conversations": conversations,
        "/v1/conversations/{conversation_id}/items": items,
    }
    if not (files := uploaded("assistants", b'{"text": "A house by the sea."}\n')):
        return ids
    asked = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}
    batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
    inputs = uploaded("batch", json.dumps({**asked, "method": "POST"}).encode(), 1)
    stores = made("/v1/vector_stores", json={"file_ids": files})
    # training fails at its file: how it uses memory is measured elsewhere
    job = {"model": MODEL, "training_file": uploaded("fine-tune", b"{\n", 1)[0]}
    jobs = made("/v1/fine_tuning/jobs", 2, json=job)
    deadline = time.monotonic() + 4 * PATIENCE
    for one in jobs:
        while (shown := server.get(f"/v1/fine_tuning/jobs/{one}").json())["status"] != "failed":
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
    return ids | {
        "/v1/files": files,
        "/v1/uploads": made("/v1/uploads", json={name: VALID[name] for name in UPLOAD}),
        "/v1/vector_stores": stores,
        "/v1/vector_stores/{store_id}/files": files,
        "/v1/vector_stores/{store_id}/file_batches": made(
            f"/v1/vector_stores/{stores[0]}/file_batches", json={"file_ids": files}
        ),
        "/v1/batches": made("/v1/batches", json={**batch, "input_file_id": inputs[0]}),
        "/v1/batches/input": inputs,
        "/v1/messages/batches": made("/v1/messages/batches", json={"requests": VALID["requests"]}),
        "/v1/fine_tuning/jobs": jobs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="write the summary to this file, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # a prompt that fills a long context takes a busy machine minutes, and is served all the same
        flags = ("--max-model-len", "2048", "--enable-lora", "--data-dir", folder)
        server = RunningServer(*flags).wait_ready()
        try:
            summary = fuzz(server, arguments.requests, arguments.seed)
            server.wait_idle()
        finally:
            server.close()
    shown = json.dumps({**asdict(summary), "problems": summary.problems()}, indent=1)
    print(shown)
    if arguments.output:
        Path(arguments.output).write_text(shown + "\n")
    return 1 if summary.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
