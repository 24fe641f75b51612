"""Valid bodies whose values, also nested ones, are replaced one at a time: whatever comes, no answer is a 5xx."""

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.config import AdapterConfig, EngineConfig
from quire.server.app import create_app
from quire.server.fine_tuning.jobs import Jobs
from tests.server.scripted import ScriptedEngine, scripted_service
from tests.server.test_transcripts import plain

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "enum": ["a"]}}, "required": ["x"]}
ADD = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
TOOL = {"type": "function", "function": ADD}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = [{"type": "text", "text": "a"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": TEXT},
                *HI,
            ],
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            "metadata": {"a": "b"},
            "store": True,
            "documents": [{"text": "a"}],
            "chat_template_kwargs": {"a": 1},
            "reasoning_effort": "low",
            "max_tokens": 5,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": "{}"},
                },
                {"role": "function", "name": "f", "content": "x"},
            ],
            "functions": [ADD],
            "function_call": {"name": "f"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
            },
        },
    ),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {"prompt": ["a"], "max_tokens": 3, "logit_bias": {"1": 1}, "stop": ["a"]}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "5"}],
                },
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "a"}],
                    "content": [{"type": "reasoning_text", "text": "a"}],
                },
                {"type": "file_search_call", "queries": ["a"]},
                *HI,
            ],
            "tools": [{"type": "function", **ADD}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["a"],
            "metadata": {"a": "b"},
            "instructions": "i",
        },
    ),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 5,
            "system": TEXT,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        *TEXT,
                        {"type": "document", "title": "t", "source": {"type": "content", "content": TEXT}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a"},
                        {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "u", "content": TEXT, "is_error": False}
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled"},
            "metadata": {"user_id": "a"},
            "stop_sequences": ["x"],
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": HI,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        },
    ),
    (
        "/v1/conversations",
        {
            "items": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "i"},
                {"type": "file_search_call", "queries": ["a"]},
            ],
            "metadata": {"a": "b"},
        },
    ),
    (
        "/api/chat",
        {
            "model": "scripted",
            "stream": False,
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": "a",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "a"},
            ],
            "tools": [TOOL],
            "format": SCHEMA,
            "options": {"temperature": 1.0, "stop": ["a"], "num_predict": 3, "top_k": 1},
            "think": True,
            "keep_alive": "5m",
        },
    ),
    ("/api/generate", {"model": "scripted", "stream": False, "prompt": "a", "options": {"num_predict": 3}}),
    (
        "/v1/vector_stores",
        {
            "name": "a",
            "metadata": {"a": "b"},
            "expires_after": {"anchor": "last_active_at", "days": 1},
            "chunking_strategy": {
                "type": "static",
                "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400},
            },
        },
    ),
    (
        "/v1/vector_stores/STORE/search",
        {
            "query": ["a"],
            "filters": {"type": "and", "filters": [{"type": "in", "key": "a", "value": ["x"]}]},
            "ranking_options": {"ranker": "auto", "score_threshold": 0.1},
            "max_num_results": 3,
        },
    ),
    (
        "/v1/uploads",
        {
            "bytes": 10,
            "filename": "a",
            "mime_type": "b",
            "purpose": "batch",
            "expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
    (
        "/v1/batches",
        {
            "input_file_id": "none",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/fine_tuning/jobs",
        {
            "model": "scripted",
            "training_file": "FILE",
            "suffix": "s",
            "seed": 1,
            "hyperparameters": {"n_epochs": 1, "targets": ["a"], "qlora": True, "alpha": 1.0},
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"batch_size": 1, "schedule": "cosine", "paged": False}},
            },
            "metadata": {"a": "b"},
        },
    ),
]
VALUES = [5, "a", [], {}, ["a"], [5], None, "\ud800", 10**30, True, {"a": "b"}, [[]], -1.5, ""]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value in it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, nested in inside:
        yield (*place, key)
        yield from places(nested, (*place, key))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> bytes:
    made: Any = copy.deepcopy(body)
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return json.dumps(made).encode()


def test_no_value_in_a_body_breaks_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    service = scripted_service(ScriptedEngine(plain("Hel", "lo", "")), data_dir=str(tmp_path))
    adapters = AdapterConfig(lora_dir=str(tmp_path))
    monkeypatch.setattr(service.models, "config", EngineConfig(adapters=adapters))
    monkeypatch.setattr(Jobs, "_watch", lambda _self: None)
    app = create_app(service)

    async def main() -> list[str]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [fault for path, body in BODIES async for fault in faults(client, path, body)]

    async def faults(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        if "STORE" in path:
            path = path.replace("STORE", (await client.post("/v1/vector_stores", json={})).json()["id"])
        if body.get("training_file"):
            form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", b"{}")}}
            body = {**body, "training_file": (await client.post("/v1/files", **form)).json()["id"]}
        answer = await client.post(path, json=body)
        assert answer.status_code in (200, 404, 503), (path, answer.text)  # it is valid
        for place in places(body):
            for value in VALUES:
                answer = await client.post(
                    path, content=changed(body, place, value), headers={"Content-Type": "application/json"}
                )
                if answer.status_code >= 500 and answer.status_code != 503:
                    yield f"{path} {place} {value!r}: {answer.text[:200]}"
        if "training_file" in body:
            answer = await client.get(path, params={"limit": 100})
            if answer.status_code != 200:
                yield f"{path} is broken: {answer.text[:200]}"

    assert asyncio.run(main()) == []
