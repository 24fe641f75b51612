"""The tool file_search in responses and chats: the model answers from files and says from which."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import openai
import pytest
from fastapi import Request

from quire.core.stats import VectorFormat
from quire.rag.stores import StorePassage, VectorStore
from quire.server.access import RequestContext
from quire.server.app import create_app
from quire.server.retrieval.file_search import FileSearch
from quire.server.retrieval.search import rewritten
from tests.server.running import MODEL, RunningServer
from tests.server.scripted import TEMPLATE, ScriptedEngine, posted, scripted_service, update

QUESTION = "How many parameters does Grok-0 have?"
GROK = "Grok-0 is the first language model of xAI. Grok-0 has 33 billion parameters."
TEA = "Green tea is brewed with water of eighty degrees for three minutes."


@pytest.fixture
def client(data_server: RunningServer) -> openai.OpenAI:
    return data_server.client(api_key="alice")


@pytest.fixture(scope="module")
def store(data_server: RunningServer) -> tuple[str, str]:
    """Its id, and that of the file about Grok-0."""
    client = data_server.client(api_key="alice")
    ids = [
        client.files.create(file=(name, text.encode()), purpose="assistants").id
        for name, text in (("grok.txt", GROK), ("tea.txt", TEA))
    ]
    made = client.vector_stores.create(name="search")
    done = client.vector_stores.file_batches.create_and_poll(made.id, file_ids=ids, poll_interval_ms=50)
    assert done.file_counts.completed == 2
    return made.id, ids[0]


def tool(store: tuple[str, str], **more: Any) -> list[Any]:
    return [{"type": "file_search", "vector_store_ids": [store[0]], **more}]


def test_the_model_answers_from_the_file_and_cites_it(client: openai.OpenAI, store: tuple[str, str]) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, tools=tool(store), temperature=0)
    call, message = answer.output
    assert call.type == "file_search_call"
    assert (call.status, call.queries, call.results) == ("completed", [QUESTION], None)
    assert "33 billion" in answer.output_text
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    citation = part.annotations[0]
    assert citation.type == "file_citation"
    assert (citation.file_id, citation.filename) == (store[1], "grok.txt")
    assert part.text[: citation.index].endswith("parameters.")
    chunk = citation.to_dict()["chunk"]
    assert isinstance(chunk, dict)
    assert GROK[chunk["start"] : chunk["end"]] == GROK


def test_the_model_does_not_know_it_alone(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=60)
    assert "33 billion" not in answer.output_text


@pytest.mark.parametrize("kind", ["client", "async_client"])
def test_events_come_in_order(data_server: RunningServer, kind: str, store: tuple[str, str]) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "stream": True}
    asked |= {"tools": tool(store, max_num_results=1), "include": ["file_search_call.results"]}

    async def streamed() -> list[Any]:
        made = getattr(data_server, kind)(api_key="alice").responses.create(**asked)
        return [event async for event in await made] if kind == "async_client" else list(made)

    events = asyncio.run(streamed())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:7] == [
        "created",
        "in_progress",
        "output_item.added",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "output_item.done",
    ]
    tail = [
        "output_text.annotation.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert kinds[-5:] == tail
    assert set(kinds[9:-5]) == {"output_text.delta"}
    done: Any = events[6]
    assert [result.text for result in done.item.results] == [GROK]
    noted: Any = events[-5]
    assert (noted.output_index, noted.annotation_index, noted.annotation.file_id) == (1, 0, store[1])
    last: Any = events[-1]
    assert last.response.output[1].content[0].annotations[0].file_id == store[1]


def test_a_chat_has_the_same_tool(client: openai.OpenAI, store: tuple[str, str]) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tool(store), temperature=0
    ).choices[0]
    assert "33 billion" in (whole.message.content or "")
    note = whole.message.to_dict()["annotations"][0]  # type: ignore[index]
    assert note["file_citation"]["file_id"] == store[1]
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=tool(store), temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-2].choices[0].delta.to_dict()["annotations"] == [note]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stored_response_goes_on(client: openai.OpenAI, store: tuple[str, str]) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, tools=tool(store), temperature=0)
    stored = client.responses.retrieve(first.id)
    assert [item.type for item in stored.output] == ["file_search_call", "message"]
    again = client.responses.create(
        model=MODEL,
        input="And how is tea brewed?",
        previous_response_id=first.id,
        tools=tool(store),
        temperature=0,
    )
    call: Any = again.output[0]
    assert call.queries == ["And how is tea brewed?"]
    sent_back = [item.to_dict() for item in first.output]
    third = client.responses.create(
        model=MODEL,
        input=[*sent_back, {"role": "user", "content": "Hi"}],
        max_output_tokens=3,  # type: ignore[list-item]
    )
    assert third.output


def test_tool_choice_and_background(client: openai.OpenAI, store: tuple[str, str]) -> None:
    none = client.responses.create(
        model=MODEL, input=QUESTION, tools=tool(store), tool_choice="none", max_output_tokens=5
    )
    assert [item.type for item in none.output] == ["message"]
    for choice in ("required", {"type": "file_search"}):
        forced = client.responses.create(
            model=MODEL,
            input=QUESTION,
            tools=tool(store),
            tool_choice=choice,
            max_output_tokens=5,  # type: ignore[arg-type]
        )
        assert forced.output[0].type == "file_search_call"
    running = client.responses.create(
        model=MODEL, input=QUESTION, tools=tool(store), background=True, stream=True, temperature=0
    )
    kinds = [event.type for event in running]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert "response.file_search_call.completed" in kinds


def test_passages_fit_the_context(client: openai.OpenAI, data_server: RunningServer) -> None:
    """Many long passages: as many as fit are shown, and the answer has its room."""
    text = " ".join(f"Fact {number} about zebras is that stripe {number} is black." for number in range(1500))
    file = client.files.create(file=("zebra.txt", text.encode()), purpose="assistants")
    made = client.vector_stores.create(name="long", file_ids=[file.id])
    done = client.vector_stores.files.poll(file.id, vector_store_id=made.id, poll_interval_ms=50)
    assert done.status == "completed", done.last_error
    answer = client.responses.create(
        model=MODEL,
        input="Tell me a fact about zebras.",
        tools=[{"type": "file_search", "vector_store_ids": [made.id], "max_num_results": 50}],
        max_output_tokens=6500,
        extra_body={"stop": ["a", "e", "i", "o"]},
        include=["file_search_call.results"],
    )
    call: Any = answer.output[0]
    assert len(call.results) == 50
    assert answer.usage is not None
    assert 600 < answer.usage.input_tokens < 8192 - 6500


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vector_store_ids": []}, "tools[0].vector_store_ids"),
        ({}, "tools[0].vector_store_ids"),
        ({"vector_store_ids": ["vs"] * 9}, "tools[0].vector_store_ids"),
        ({"vector_store_ids": ["vs"], "max_num_results": 0}, "tools[0].max_num_results"),
        ({"vector_store_ids": "vs"}, "tools[0].vector_store_ids"),
    ],
)
def test_a_wrong_tool_names_its_field(
    data_server: RunningServer, given: dict[str, Any], message: str
) -> None:
    body = {"input": "x", "tools": [{"type": "file_search", **given}]}
    error = data_server.error("/v1/responses", 400, json=body, headers={"Authorization": "Bearer alice"})
    assert message in error["message"]


def test_a_filter_of_the_tool_holds(client: openai.OpenAI, store: tuple[str, str]) -> None:
    filters = {"type": "eq", "key": "kind", "value": "none"}
    answer = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=tool(store, filters=filters),
        max_output_tokens=5,
        include=["file_search_call.results"],
    )
    call: Any = answer.output[0]
    assert call.results == []


# ---------------------------------------------------------------------- models that call tools


class TwoAnswers(ScriptedEngine):
    """A first answer, and one after the search."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(())
        self._answers = [first, second]
        self.prompts: list[Any] = []

    def submit(self, requests: Sequence[Any]) -> Any:
        self.prompts.append(requests[0].prompt_token_ids)
        answer = self._answers.pop(0)
        self.script = [[update(answer)], [update("", finish_reason="stop")]]
        return super().submit(requests)


class OneStore:
    """Stands for the open data folder: a store that finds one passage for every query."""

    def __init__(self) -> None:
        self.stores = self
        self.file_search: FileSearch | None = None
        self.queries: list[str] = []

    def usable(self, owner: str, store_id: str) -> VectorStore:
        return VectorStore(store_id, owner, "", None, {}, 0, None, 0, "model", 4)

    async def run(self, call: Any, *values: Any) -> Any:
        return call(*values)

    async def search(self, store: VectorStore, queries: Sequence[str], *_: Any) -> list[StorePassage]:
        self.queries += queries
        return [StorePassage(store.id, "file-1", "grok.txt", {}, 0, len(GROK), GROK, 1.0)]

    async def opened(self) -> "OneStore":
        return self


def asked(engine: ScriptedEngine, template: str, **body: Any) -> tuple[dict[str, Any], OneStore]:
    service, store = scripted_service(engine, chat_template=template), OneStore()
    store.file_search = FileSearch(service, store)  # type: ignore[arg-type]
    service.retrieval = store  # type: ignore[assignment]
    tools = [{"type": "file_search", "vector_store_ids": ["vs_1"]}]
    fields = {"input": QUESTION, "tools": tools, **body}
    status, pieces = asyncio.run(posted(create_app(service), "/v1/responses", fields))
    assert status == 200, pieces
    return json.loads(b"".join(pieces)), store


CALL = '<tool_call>{"name": "file_search", "arguments": {"query": "size of Grok-0"}}</tool_call>'
WITH_TOOLS = "{% if tools %}<tool_call> {{ tools }}{% endif %}" + TEMPLATE


def test_a_model_with_tools_chooses_the_query() -> None:
    engine = TwoAnswers(CALL, "It has 33 billion parameters.")
    response, store = asked(engine, WITH_TOOLS)
    assert store.queries == ["size of Grok-0"]
    call, message = response["output"]
    assert (call["type"], call["queries"]) == ("file_search_call", ["size of Grok-0"])
    assert message["content"][0]["annotations"][0]["file_id"] == "file-1"
    assert len(engine.prompts) == 2


def test_a_model_with_tools_may_answer_without_a_search() -> None:
    response, store = asked(TwoAnswers("Hello!", "Hello again!"), WITH_TOOLS, input="Hi")
    assert store.queries == []
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["output"][0]["content"][0]["annotations"] == []


def test_a_forced_search_asks_no_model() -> None:
    engine = TwoAnswers("It has 33 billion parameters.", "")
    response, store = asked(engine, WITH_TOOLS, tool_choice={"type": "file_search"})
    assert store.queries == [QUESTION]
    assert len(engine.prompts) == 1
    assert response["output"][0]["type"] == "file_search_call"


def test_a_query_is_rewritten_by_the_model_where_the_tool_asks_for_it() -> None:
    tool = {"type": "file_search", "vector_store_ids": ["vs_1"], "rewrite_query": True}
    response, store = asked(TwoAnswers(' "Grok-0 size"', "33 billion."), TEMPLATE, tools=[tool])
    assert store.queries == ["Grok-0 size"]
    assert response["output"][0]["queries"] == ["Grok-0 size"]
    _, store = asked(TwoAnswers("  ", "33 billion."), TEMPLATE, tools=[tool])  # nothing written
    assert store.queries == [QUESTION]


def test_without_a_chat_model_a_query_stays_and_a_warning_says_so() -> None:
    engine = ScriptedEngine(())
    service = scripted_service(engine)
    engine.ready = msgspec.structs.replace(engine.ready, vectors=VectorFormat(4, True))
    service.models.main.task = "embed"
    context = RequestContext("req-1")
    request = Request({"type": "http", "headers": [], "quire.context": context})
    assert asyncio.run(rewritten(service, request, ["one", "two"])) == ["one", "two"]
    (warning,) = context.warnings
    assert warning.startswith("rewrite_query has no effect: this server has only")


def test_other_tools_stay_with_the_model() -> None:
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    search = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    called = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    response, store = asked(TwoAnswers(called, called), WITH_TOOLS, tools=[search, weather])
    assert store.queries == []
    assert [item["type"] for item in response["output"]] == ["function_call"]
