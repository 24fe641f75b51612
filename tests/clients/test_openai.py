"""OpenAI's own client: chat completions, Responses, embeddings."""

from typing import Any

import openai
import pytest

from tests.clients import asked

TOOL: Any = openai.pydantic_function_tool(asked.Weather, name="weather")


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def ask(content: str = asked.QUESTION, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": asked.MODEL, "messages": messages, "temperature": 0, "max_tokens": 80, **more}


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI):
    answer = client.chat.completions.create(**ask(asked.LONG_QUESTION)).choices[0].message.content
    chunks = client.chat.completions.create(**ask(asked.LONG_QUESTION, stream=True))
    pieces = [text for chunk in chunks if (text := chunk.choices[0].delta.content)]
    assert len(pieces) > 1
    assert "".join(pieces) == answer


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI):
    sent = ask(asked.TOOL_QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = client.chat.completions.create(**sent).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    asked.check_arguments(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": asked.RESULT}
    sent |= {"messages": [*sent["messages"], message, result], "tool_choice": "none"}
    assert client.chat.completions.create(**sent).choices[0].message.content


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI):
    message = client.chat.completions.parse(**ask(), response_format=asked.City).choices[0].message
    assert isinstance(message.parsed, asked.City)
    with client.chat.completions.stream(**ask(), response_format=asked.City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_a_response_streams_calls_and_parses(client: openai.OpenAI):
    sent: Any = {"model": asked.MODEL, "temperature": 0, "max_output_tokens": 80}
    answer = client.responses.create(**sent, input=asked.LONG_QUESTION).output_text
    with client.responses.stream(**sent, input=asked.LONG_QUESTION) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == answer
    assert isinstance(
        client.responses.parse(**sent, input=asked.LONG_QUESTION, text_format=asked.City).output_parsed,
        asked.City,
    )
    tool = {"type": "function", **TOOL["function"]}
    first = client.responses.create(
        **sent, input=asked.TOOL_QUESTION, tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = first.output
    asked.check_arguments(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": asked.RESULT}
    second = client.responses.create(
        **sent, input=[result], previous_response_id=first.id, tools=[tool], tool_choice="none"
    )
    assert second.output_text


def test_vectors_are_the_servers(vectors: list[list[float]], client: openai.OpenAI):
    found = client.embeddings.create(model=asked.EMBEDDER, input=asked.TEXTS)
    asked.check_vectors([one.embedding for one in found.data], vectors)


def test_errors_have_the_clients_own_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as caught:
        client.chat.completions.create(**ask(asked.TOO_LONG))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ask(model=asked.UNKNOWN))
    assert missing.value.code == "model_not_found"
