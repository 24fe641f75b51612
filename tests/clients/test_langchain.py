"""LangChain: ChatOpenAI and OpenAIEmbeddings, and ChatAnthropic where it is installed."""

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients import asked

weather = tool(asked.weather)


def build_model(kind: str, url: str, name: str = asked.MODEL) -> BaseChatModel:
    options: Any = {"model": name, "api_key": "any", "max_tokens": 80, "max_retries": 0, "temperature": 0}
    if kind == "anthropic":
        anthropic = pytest.importorskip("langchain_anthropic", reason="runs with make test-clients")
        return anthropic.ChatAnthropic(base_url=url, **options)
    return ChatOpenAI(base_url=f"{url}/v1", use_responses_api=kind == "responses", **options)


@pytest.fixture(params=["chat", "responses", "anthropic"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(url: str, kind: str) -> BaseChatModel:
    return build_model(kind, url)


def test_a_stream_is_the_answer_in_pieces(model: BaseChatModel):
    answer = model.invoke(asked.LONG_QUESTION)
    assert answer.usage_metadata["output_tokens"] > 2
    streams = [
        [text for chunk in model.stream(asked.LONG_QUESTION) if (text := chunk.text)] for _ in range(3)
    ]
    assert max(map(len, streams)) > 1  # a server that is held up sends the tokens of several steps at once
    assert {"".join(pieces) for pieces in streams} == {answer.text}


def test_a_tool_is_called_and_its_result_answered(model: BaseChatModel):
    question = HumanMessage(asked.TOOL_QUESTION)
    bound = model.bind_tools([weather], tool_choice="weather")
    called = bound.invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    asked.check_arguments(call["args"])
    whole, *others = bound.stream([question])
    assert sum(others, whole).tool_calls[0]["args"] == call["args"]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([question, called, result]).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_parsed_into_a_model(model: BaseChatModel, method: str):
    structured = model.with_structured_output(asked.City, method=method)
    assert isinstance(structured.invoke(asked.QUESTION), asked.City)


def test_vectors_are_the_servers(url: str, vectors: list[list[float]]):
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="any", model=asked.EMBEDDER, check_embedding_ctx_length=False
    )
    asked.check_vectors(embeddings.embed_documents(asked.TEXTS), vectors)
    asked.check_vectors([embeddings.embed_query(text) for text in asked.TEXTS], vectors)


def test_errors_have_the_clients_own_classes(url: str, kind: str, model: BaseChatModel):
    with pytest.raises(ContextOverflowError):
        model.invoke(asked.TOO_LONG)
    with pytest.raises(Exception, match=asked.UNKNOWN) as caught:
        build_model(kind, url, asked.UNKNOWN).invoke(asked.QUESTION)
    assert caught.value.status_code == 404
