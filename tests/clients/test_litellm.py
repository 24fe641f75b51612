"""LiteLLM: the providers `hosted_vllm` and `openai` for chats, `anthropic` for messages."""

from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="runs with make test-clients")

from tests.clients import asked

pytestmark = pytest.mark.clients
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": asked.Weather.__doc__,
        "parameters": asked.Weather.model_json_schema(),
    },
}


@pytest.fixture(params=["hosted_vllm", "openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(provider: str, url: str, content: str = asked.QUESTION, model: str = asked.MODEL, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": content}])
    base = url if provider == "anthropic" else f"{url}/v1"
    options: Any = {"api_base": base, "api_key": "any", "temperature": 0, "max_tokens": 80, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{model}", messages=messages, **options, **more)


def test_a_stream_is_the_answer_in_pieces(url: str, provider: str):
    answer = ask(provider, url, asked.LONG_QUESTION)
    assert answer.usage.completion_tokens > 2
    pieces = [
        text
        for chunk in ask(provider, url, asked.LONG_QUESTION, stream=True)
        if (text := chunk.choices[0].delta.content)
    ]
    assert len(pieces) > 1
    assert "".join(pieces) == answer.choices[0].message.content


def test_a_tool_is_called_and_its_result_answered(url: str, provider: str):
    choice = {"type": "function", "function": {"name": "weather"}}
    sent: Any = {"content": asked.TOOL_QUESTION, "tools": [TOOL], "tool_choice": choice}
    message = ask(provider, url, **sent).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    asked.check_arguments(call.function.arguments)
    streamed = litellm.stream_chunk_builder(list(ask(provider, url, **sent, stream=True))).choices[0].message
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": asked.RESULT}
    history = [{"role": "user", "content": asked.TOOL_QUESTION}, message.model_dump(), result]
    answer = ask(provider, url, messages=history, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content


def test_an_answer_is_parsed_into_a_model(url: str, provider: str):
    answer = ask(provider, url, response_format=asked.City)
    asked.City.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("kind", ["hosted_vllm", "openai"])
def test_vectors_are_the_servers(url: str, vectors: list[list[float]], kind: str):
    found = litellm.embedding(
        model=f"{kind}/{asked.EMBEDDER}", input=asked.TEXTS, api_base=f"{url}/v1", api_key="any"
    )
    asked.check_vectors([one["embedding"] for one in found.data], vectors)


def test_a_response_streams(url: str):
    options: Any = {"api_base": f"{url}/v1", "api_key": "any", "max_output_tokens": 80, "temperature": 0}
    asked_for: Any = {"model": f"openai/{asked.MODEL}", "input": asked.LONG_QUESTION}
    answer = litellm.responses(**asked_for, **options)
    events = list(litellm.responses(**asked_for, **options, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == answer.output[0].content[0].text


def test_errors_have_the_clients_own_classes(url: str, provider: str):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(provider, url, asked.TOO_LONG)
    with pytest.raises(litellm.NotFoundError):
        ask(provider, url, model=asked.UNKNOWN)
