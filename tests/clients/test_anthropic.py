"""Anthropic's own client. It has no embeddings."""

from typing import Any

import anthropic
import pytest

from tests.clients import asked

TOOL: Any = {
    "name": "weather",
    "description": asked.Weather.__doc__,
    "input_schema": asked.Weather.model_json_schema(),
}


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)


def ask(content: str = asked.QUESTION, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    sent = {"model": asked.MODEL, "messages": messages, "max_tokens": 80, **more}
    return {**sent, "extra_body": {"temperature": 0}}


def test_a_stream_is_the_answer_in_pieces(client: anthropic.Anthropic):
    (block,) = client.messages.create(**ask(asked.LONG_QUESTION)).content
    with client.messages.stream(**ask(asked.LONG_QUESTION)) as stream:
        pieces = list(stream.text_stream)
    assert len(pieces) > 1
    assert "".join(pieces) == block.text


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    sent = ask(asked.TOOL_QUESTION, tools=[TOOL], tool_choice=choice)
    message = client.messages.create(**sent)
    (use,) = message.content
    assert (use.name, message.stop_reason) == ("weather", "tool_use")
    asked.check_arguments(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": asked.RESULT}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    sent |= {"messages": [*sent["messages"], *turns], "tool_choice": {"type": "none"}}
    assert client.messages.create(**sent).content[0].text


def test_the_clients_own_loop_runs_a_tool(client: anthropic.Anthropic):
    """`tool_runner` calls the function and sends its result until no tool is called."""
    calls: list[tuple[str, int]] = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """The weather of a city for some days."""
        calls.append((city, days))
        return asked.RESULT

    sent = ask(asked.TOOL_QUESTION, tools=[weather], tool_choice={"type": "tool", "name": "weather"})
    messages = list(client.beta.messages.tool_runner(**sent, max_iterations=2))
    assert [message.stop_reason for message in messages] == ["tool_use"] * 2
    assert all(isinstance(city, str) and isinstance(days, int) for city, days in calls)
    assert calls


def test_an_answer_is_parsed_into_a_model(client: anthropic.Anthropic):
    assert isinstance(client.messages.parse(**ask(), output_format=asked.City).parsed_output, asked.City)


def test_errors_have_the_clients_own_classes(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask(asked.TOO_LONG))
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ask(model=asked.UNKNOWN))
    assert missing.value.body["error"]["type"] == "not_found_error"
