"""The unchanged `ollama` client against the server: chat, streams, generate, embed, list, show, ps, errors."""

from typing import Any

import httpx
import ollama
import pytest

from tests.server.running import MODEL, RunningServer

ENCODER = "all-MiniLM-L6-v2"
SHORT = {"num_predict": 12, "temperature": 0}
ASK = [{"role": "user", "content": "Say hi."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


@pytest.fixture
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(server.url)


def test_a_chat_is_the_same_whole_and_in_a_stream(client: ollama.Client) -> None:
    whole = client.chat(MODEL, ASK, options=SHORT)
    pieces = list(client.chat(f"{MODEL}:latest", ASK, options=SHORT, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1  # tokens that a busy machine sends together are one piece
    for last in (whole, pieces[-1]):
        assert (last.done_reason, last.eval_count) == ("length", 12)
        assert last.prompt_eval_count is not None
        assert last.prompt_eval_count > 20


def test_a_whole_answer_knows_how_long_its_tokens_took(client: ollama.Client) -> None:
    long = client.chat(
        MODEL, [{"role": "user", "content": "Write a long story."}], options={"num_predict": 200}
    )
    eval_ns, prompt_ns = long.eval_duration or 0, long.prompt_eval_duration or 0
    assert eval_ns > 1_000_000, "of 200 tokens"
    assert eval_ns + prompt_ns <= (long.total_duration or 0)


def test_generate_takes_a_system_prompt_and_a_format(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
    }
    options = {"num_predict": 40, "temperature": 0}
    answer = client.generate(MODEL, "Give me a person.", system="Be brief.", format=schema, options=options)
    assert answer.response is not None
    assert '"age"' in answer.response
    pieces = client.generate(MODEL, "Say hi.", options=SHORT, stream=True)
    assert "".join(piece.response or "" for piece in pieces)


def test_tools_and_their_answers_go_back_and_forth(client: ollama.Client) -> None:
    call = {"function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    history = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    answer = client.chat(MODEL, history, tools=[WEATHER], options=SHORT)
    assert answer.message.role == "assistant"


def test_vectors_models_and_what_they_can_do(client: ollama.Client) -> None:
    vectors = client.embed(ENCODER, ["a", "b"]).embeddings
    assert [len(vector) for vector in vectors] == [384, 384]
    # cut, as Ollama does
    assert len(client.embed(ENCODER, "word " * 2000, dimensions=64).embeddings[0]) == 64
    assert len(client.embeddings(ENCODER, "a").embedding) == 384
    assert {model.model for model in client.list().models} >= {MODEL, ENCODER}
    assert MODEL in {model.model for model in client.ps().models}
    assert client.show(MODEL).capabilities == ["completion", "tools"]
    assert client.show(ENCODER).capabilities == ["embedding"]


def test_a_model_is_loaded_by_an_empty_request(server: RunningServer) -> None:
    loaded = httpx.post(f"{server.url}/api/generate", json={"model": MODEL}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert httpx.get(f"{server.url}/api/version").json()["version"]


def test_curls_type_is_json_but_not_from_a_page_of_another_origin(server: RunningServer) -> None:
    ask: dict[str, Any] = {
        "content": f'{{"model": "{MODEL}"}}',
        "headers": {"Content-Type": "application/x-www-form-urlencoded"},
    }
    assert httpx.post(f"{server.url}/api/generate", **ask).json()["done_reason"] == "load"
    ask["headers"]["Origin"] = "http://elsewhere.example"
    assert httpx.post(f"{server.url}/api/generate", **ask).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "nope", "messages": ASK}, 404, "does not exist"),
        ("chat", {"model": MODEL, "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
        ("chat", {"model": MODEL, "messages": [{"content": "x"}]}, 400, "role"),
        ("chat", {"model": MODEL, "messages": ASK, "format": "xml"}, 400, "format"),
        ("chat", {"model": MODEL, "messages": ASK, "options": {"temperature": -5}}, 400, "options.temperature"),
        ("generate", {"model": MODEL, "prompt": "x", "raw": True}, 400, "raw is not supported"),
        ("embed", {"model": ENCODER, "input": "x", "dimensions": 9999}, 400, "dimensions=9999"),
        ("show", {"model": "nope"}, 404, "not found"),
        ("chat", {"messages": ASK}, 400, "model"),
    ],
)  # fmt: skip
def test_errors_are_one_string(
    server: RunningServer, path: str, body: dict[str, object], status: int, words: str
) -> None:
    answer = httpx.post(f"{server.url}/api/{path}", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]
