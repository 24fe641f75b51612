"""pydantic-ai: agents over chats, Responses and messages, and its embedder."""

import asyncio
from typing import Any

import anthropic
import pytest

pydantic_ai = pytest.importorskip("pydantic_ai", reason="runs with make test-clients")
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import asked

pytestmark = pytest.mark.clients
SETTINGS: Any = {"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}


class CallFirst(AbstractCapability):
    """A tool must be called in the first step, and none afterwards."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required" if context.run_step == 1 else "none"}


def build_model(kind: str, url: str, name: str = asked.MODEL) -> Any:
    if kind == "anthropic":
        client = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
        # It knows by a model's name what the model can do.
        profile: Any = {"supports_json_schema_output": True}
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client), profile=profile)
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    return (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(name, provider=provider)


@pytest.fixture(params=["chat", "responses", "anthropic"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(url: str, kind: str) -> Any:
    return build_model(kind, url)


def test_a_stream_is_the_answer_in_pieces(model: Any):
    agent = Agent(model, model_settings=SETTINGS)

    async def run() -> tuple[str, list[str]]:
        answer = (await agent.run(asked.LONG_QUESTION)).output
        async with agent.run_stream(asked.LONG_QUESTION) as stream:
            pieces = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        return answer, pieces

    answer, pieces = asyncio.run(run())
    assert len(pieces) > 1
    assert "".join(pieces) == answer


def test_a_tool_is_called_and_its_result_answered(model: Any):
    agent = Agent(
        model, model_settings=SETTINGS, tools=[asked.weather], capabilities=[CallFirst()], retries=0
    )
    result = agent.run_sync(asked.TOOL_QUESTION)
    parts = [part for message in result.all_messages() for part in message.parts]
    (call,) = [part for part in parts if part.part_kind == "tool-call"]
    (returned,) = [part for part in parts if part.part_kind == "tool-return"]
    asked.check_arguments(call.args)
    assert returned.content == asked.RESULT
    assert result.output


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_an_answer_is_parsed_into_a_model(model: Any, form: Any):
    agent = Agent(model, model_settings=SETTINGS, output_type=form(asked.City), retries=0)
    assert isinstance(agent.run_sync(asked.QUESTION).output, asked.City)


def test_vectors_are_the_servers(url: str, vectors: list[list[float]]):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    embedder = Embedder(OpenAIEmbeddingModel(asked.EMBEDDER, provider=provider))
    found = embedder.embed_documents_sync(asked.TEXTS)
    asked.check_vectors([list(vector) for vector in found.embeddings], vectors)


def test_errors_have_the_clients_own_classes(url: str, kind: str, model: Any):
    with pytest.raises(ModelHTTPError) as caught:
        Agent(model, model_settings=SETTINGS).run_sync(asked.TOO_LONG)
    assert caught.value.status_code == 400
    with pytest.raises(ModelHTTPError) as missing:
        Agent(build_model(kind, url, asked.UNKNOWN), model_settings=SETTINGS).run_sync(asked.QUESTION)
    assert missing.value.status_code == 404
