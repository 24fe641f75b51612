"""Dashboard and alerts name metrics that exist; clients work with the settings of docs/operating.md."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml

from tests.server.running import MODEL, RunningServer
from tools import dashboard

ROOT = Path(__file__).resolve().parents[2]
# In a live /metrics only where they are on: adapters, replicas, a router, refused requests, embeddings.
ELSEWHERE = re.compile(r"lora_|pool_blocks_|replica_|server_up|requests_refused|embedding")


def used(text: str) -> set[str]:
    """The metrics that a text names, without prefix and without what Prometheus adds to a histogram."""
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"\bquire_(\w+)", text)}


def expressions() -> str:
    panels = json.loads(dashboard.DASHBOARD.read_text())["panels"]
    return "\n".join(target["expr"] for panel in panels for target in panel.get("targets", ()))


def test_dashboard_and_rules_are_what_the_tool_writes():
    """`PYTHONPATH=src python tools/dashboard.py` writes them."""
    for path, text in dashboard.files().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_every_metric_is_on_the_dashboard_or_on_the_list_of_those_left_out():
    known, shown = set(dashboard.registered()), used(expressions())
    assert shown | set(dashboard.NOT_SHOWN) == known
    assert not shown & set(dashboard.NOT_SHOWN)


def test_alerts_name_metrics_of_the_registry_and_labels_of_their_own_result():
    rules = yaml.safe_load(dashboard.RULES.read_text())["groups"][0]["rules"]
    assert len(rules) >= 7
    for rule in rules:
        assert used(rule["expr"])
        assert used(rule["expr"]) <= set(dashboard.registered())
        kept = set(re.findall(r"\w+", re.findall(r"by \((.*?)\)", rule["expr"])[0]))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept


def test_panels_do_not_overlap_and_counters_are_shown_as_rates():
    panels = json.loads(dashboard.DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    for name in re.findall(r"(?<!rate\()(?<!increase\()quire_(\w+_total)", expressions()):
        pytest.fail(f"{name} is shown without a rate")


def test_a_live_server_has_the_dashboards_metrics(server: RunningServer):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert server.post("/v1/chat/completions", json=chat).status_code == 200
    live = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used(server.get("/metrics").text)}
    assert {name for name in used(expressions()) - live if not ELSEWHERE.match(name)} == set()


# Recipes


def test_the_pages_python_clients_get_answers(server: RunningServer):
    page = (ROOT / "docs" / "operating.md").read_text().replace("http://127.0.0.1:8000", server.url)
    examples = dict(re.findall(r"\n### (\w+)\n\n```python\n(.*?)```", page, re.DOTALL))
    made: dict[str, dict[str, Any]] = {name: {} for name in examples}
    for name, code in examples.items():
        exec(code, made[name])
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert made["openai"]["client"].chat.completions.create(**ask).choices[0].message.content
    assert made["anthropic"]["client"].messages.create(**ask).content
    assert made["LangChain"]["model"].invoke("Hi", max_tokens=3).content


def test_open_webuis_calls_work_with_the_compose_files_settings(server: RunningServer):
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    environment = compose["services"]["open-webui"]["environment"]
    base = environment["OPENAI_API_BASE_URL"].replace("http://quire:8000", server.url)
    headers = {"Authorization": f"Bearer {environment['OPENAI_API_KEY']}"}
    model = httpx.get(f"{base}/models", headers=headers).json()["data"][0]["id"]
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    body["stream_options"] = {"include_usage": True}
    answer = httpx.post(f"{base}/chat/completions", headers=headers, json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_claude_codes_kind_of_request_works_with_the_pages_variables(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
):
    """With a token, content blocks under cache_control, tools, thinking, metadata and a beta header; streamed."""
    page = (ROOT / "docs" / "operating.md").read_text()
    variables = dict(re.findall(r"^export (ANTHROPIC_\w+)=(\S+)", page, re.MULTILINE))
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("http://127.0.0.1:8000", server.url))
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {
        "name": "Bash",
        "description": "Runs a command",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
    ask = {
        "model": variables["ANTHROPIC_MODEL"],
        "system": [{"type": "text", "text": "You are a coding agent.", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi.", **cached}]}],
        "tools": [tool],
    }
    client = anthropic.Anthropic(max_retries=0)
    assert client.messages.count_tokens(**ask).input_tokens > 10
    with client.beta.messages.stream(
        **ask,
        max_tokens=8,
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        metadata={"user_id": "user_1"},
        thinking={"type": "disabled"},
    ) as stream:
        answer = stream.get_final_message()
    assert answer.role == "assistant"
    assert answer.usage.output_tokens > 0


def test_codexs_kind_of_request_works_with_the_pages_settings(server: RunningServer):
    """Over the Responses API: instructions, developer and user messages, a tool, nothing stored; streamed."""
    page = (ROOT / "docs" / "operating.md").read_text()
    settings = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["wire_api"] == "responses"
    url = provider["base_url"].replace("http://127.0.0.1:8000", server.url)
    schema = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}
    messages = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": "Say hi."}]}
        for role in ("developer", "user")
    ]
    body = {
        "model": settings["model"],
        "instructions": "You are a coding agent.",
        "input": messages,
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs",
                "strict": False,
                "parameters": schema,
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "a-session",
        "max_output_tokens": 16,
    }
    answer = httpx.post(f"{url}/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert re.search(r"event: response\.(completed|incomplete)", answer.text)


def test_aiders_kind_of_request_works_with_the_pages_variables(server: RunningServer):
    page = (ROOT / "docs" / "operating.md").read_text()
    variables = dict(re.findall(r"^export (OPENAI_\w+)=(\S+)", page, re.MULTILINE))
    model = re.findall(r"^aider --model openai/(\S+)", page, re.MULTILINE)[0]
    url = variables["OPENAI_API_BASE"].replace("http://127.0.0.1:8000", server.url)
    client = openai.OpenAI(base_url=url, api_key=variables["OPENAI_API_KEY"], max_retries=0)
    messages = [{"role": role, "content": "Say hi."} for role in ("system", "user", "assistant", "user")]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=4,
    )
    assert list(stream)[-1].usage.completion_tokens > 0
