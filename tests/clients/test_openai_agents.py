"""OpenAI's Agents SDK, over Responses and over chats. It has no embeddings."""

import asyncio
from typing import Any

import openai
import pytest

agents = pytest.importorskip("agents", reason="runs with make test-clients")
from agents import Agent, ModelSettings, Runner

from tests.clients import asked

pytestmark = pytest.mark.clients


def build_agent(kind: str, url: str, name: str = asked.MODEL, **more: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    model_class = agents.OpenAIResponsesModel if kind == "responses" else agents.OpenAIChatCompletionsModel
    settings = ModelSettings(temperature=0, max_tokens=80, **more.pop("settings", {}))
    model = model_class(model=name, openai_client=client)
    return Agent(name="tester", model=model, model_settings=settings, **more)


@pytest.fixture(params=["responses", "chat"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def run(agent: Any, question: str, **more: Any) -> Any:
    return asyncio.run(Runner.run(agent, question, **more))


def test_a_stream_is_the_answer_in_pieces(url: str, kind: str):
    async def stream() -> list[str]:
        result = Runner.run_streamed(build_agent(kind, url), asked.LONG_QUESTION)
        events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        return [one.data.delta for one in events if one.data.type == "response.output_text.delta"]

    pieces = asyncio.run(stream())
    assert len(pieces) > 1
    assert "".join(pieces) == run(build_agent(kind, url), asked.LONG_QUESTION).final_output


def test_a_tool_is_called_and_its_result_answered(url: str, kind: str):
    """The loop resets a required choice after the first call, so the second turn answers in text."""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    tool = agents.function_tool(asked.weather)
    result = run(build_agent(kind, url, tools=[tool], settings=settings), asked.TOOL_QUESTION, max_turns=3)
    call, output, *_ = result.new_items
    asked.check_arguments(call.raw_item.arguments)
    assert output.output == asked.RESULT
    assert isinstance(result.final_output, str)


def test_an_answer_is_parsed_into_a_model(url: str, kind: str):
    result = run(build_agent(kind, url, output_type=asked.City), asked.QUESTION)
    assert isinstance(result.final_output, asked.City)


def test_errors_have_the_clients_own_classes(url: str, kind: str):
    with pytest.raises(openai.BadRequestError) as caught:
        run(build_agent(kind, url), asked.TOO_LONG)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        run(build_agent(kind, url, asked.UNKNOWN), asked.QUESTION)
