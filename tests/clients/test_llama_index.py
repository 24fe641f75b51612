"""LlamaIndex: OpenAILike and OpenAILikeEmbedding."""

from typing import Any

import openai
import pytest

WHERE = "runs with make test-clients"
llms = pytest.importorskip("llama_index.llms.openai_like", reason=WHERE)
embeddings = pytest.importorskip("llama_index.embeddings.openai_like", reason=WHERE)
core = pytest.importorskip("llama_index.core", reason=WHERE)
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool

from tests.clients import asked

pytestmark = pytest.mark.clients
TOOL = FunctionTool.from_defaults(asked.weather)


def build_model(url: str, **more: Any) -> Any:
    options = {"model": asked.MODEL, "api_key": "any", "max_tokens": 80, "temperature": 0, "max_retries": 0}
    options |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    return llms.OpenAILike(api_base=f"{url}/v1", **options | more)


@pytest.fixture
def model(url: str) -> Any:
    return build_model(url)


def test_a_stream_is_the_answer_in_pieces(url: str, model: Any):
    messages = [ChatMessage(role="user", content=asked.LONG_QUESTION)]
    answer = model.chat(messages).message.content
    pieces = [one.delta for one in model.stream_chat(messages) if one.delta]
    assert len(pieces) > 1
    assert "".join(pieces) == answer
    assert build_model(url, is_chat_model=False).complete("The capital of France is").text


def test_a_tool_is_called_and_its_result_answered(model: Any):
    response = model.chat_with_tools([TOOL], asked.TOOL_QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(response)
    assert call.tool_name == "weather"
    asked.check_arguments(call.tool_kwargs)
    *_, streamed = model.stream_chat_with_tools([TOOL], asked.TOOL_QUESTION, tool_required=True)
    assert model.get_tool_calls_from_response(streamed)[0].tool_kwargs == call.tool_kwargs
    history = [ChatMessage(role="user", content=asked.TOOL_QUESTION), response.message]
    result = ChatMessage(role="tool", content=asked.RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat([*history, result]).message.content
    chosen = model.predict_and_call([TOOL], asked.TOOL_QUESTION, tool_required=True)
    assert str(chosen) == asked.RESULT


def test_an_answer_is_parsed_into_a_model(url: str, model: Any):
    """By a call of a function that has the class's fields, and by response_format."""
    program = FunctionCallingProgram.from_defaults(
        output_cls=asked.City, prompt_template_str="{question}", llm=model, tool_required=True
    )
    assert isinstance(program(question=asked.QUESTION), asked.City)
    for structured in (model, build_model(url, should_use_structured_outputs=True)):
        answer = structured.as_structured_llm(asked.City).complete(asked.QUESTION)
        assert isinstance(answer.raw, asked.City)


def test_vectors_are_the_servers_and_find_a_text(url: str, vectors: list[list[float]]):
    embedder = embeddings.OpenAILikeEmbedding(
        model_name=asked.EMBEDDER, api_base=f"{url}/v1", api_key="any", max_retries=0
    )
    asked.check_vectors(embedder.get_text_embedding_batch(asked.TEXTS), vectors)
    documents = [core.Document(text=text) for text in asked.TEXTS]
    index = core.VectorStoreIndex.from_documents(documents, embed_model=embedder)
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("Which animal ran?")
    assert found.text == asked.TEXTS[1]


def test_errors_have_the_clients_own_classes(url: str, model: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        model.complete(asked.TOO_LONG)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        build_model(url, model=asked.UNKNOWN).complete(asked.QUESTION)
