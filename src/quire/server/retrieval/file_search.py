"""FileSearch: the tool `file_search` of responses and chats.

A model whose chat template has tools decides itself whether to search, and for what: a first answer, which is not
shown, may call the tool. For other models the last user message is the query, always. The passages then stand in the
system message of the answer that is shown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from quire.core.errors import InvalidRequest
from quire.rag.prompts import citations, with_passages
from quire.rag.stores import StorePassage, VectorStore
from quire.server.chat import ChatReply, answer_chat, chat_prompt, chat_tools
from quire.server.errors import validated
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.protocol.responses import Item
from quire.server.protocol.retrieval import MAX_QUERY, FileSearchTool
from quire.server.responses.convert_request import new_id
from quire.server.retrieval import is_file_search
from quire.server.retrieval.file_endpoints import owner_of
from quire.server.retrieval.retrieval import Retrieval
from quire.server.retrieval.search import SearchOptions, filter_of, rewritten
from quire.server.service import Service

RESULTS = "file_search_call.results"  # what `include` calls them
MAX_TOOLS = 4
MAX_QUERIES = 4
QUERY_TOKENS = 128  # of the answer in which a model may call the tool
ANSWER_TOKENS = 512  # that are left for an answer without a limit of its own
MIN_PASSAGE = 32  # tokens; less is not worth a place in the prompt
_FUNCTION = {
    "type": "function",
    "function": {
        "name": "file_search",
        "description": "Searches the user's files for passages that answer a question.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search for."}},
            "required": ["query"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class SearchedChat:
    """A chat request with passages in its prompt, and where they are from."""

    body: ChatCompletionRequest
    queries: list[str] = field(default_factory=list)  # empty: nothing was searched
    passages: list[StorePassage] = field(default_factory=list)
    shown: list[StorePassage] = field(default_factory=list)  # to the model, in the order of their numbers

    def item(self, item_id: str, with_results: bool) -> Item:
        """As an item of a response."""
        results = [
            {
                "file_id": passage.file_id,
                "filename": passage.filename,
                "score": passage.score,
                "attributes": passage.attributes,
                "text": passage.text,
            }
            for passage in self.passages
        ]
        return {
            "id": item_id,
            "type": "file_search_call",
            "status": "completed",
            "queries": self.queries,
            "results": results if with_results else None,
        }

    def annotations(self, text: str) -> list[dict[str, Any]]:
        """Of an answer. `chunk` says which characters of the file's text the passage is."""
        made = []
        for citation in citations(text, [passage.text for passage in self.shown]):
            passage = self.shown[citation.passage]
            made.append(
                {
                    "type": "file_citation",
                    "index": citation.index,
                    "file_id": passage.file_id,
                    "filename": passage.filename,
                    "chunk": {"start": passage.start, "end": passage.end},
                }
            )
        return made


class FileSearch:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self._service, self._retrieval = service, retrieval

    def of_response(self, include: Sequence[str]) -> "SearchedResponse":
        return SearchedResponse(self, RESULTS in include)

    async def answer_chat(self, service: Service, request: Request, body: ChatCompletionRequest) -> ChatReply:
        """As chat.answer_chat, for a request with the tool; the answer's annotations say what it is taken from."""
        searched = await self.searched(request, body)
        reply = await answer_chat(service, request, searched.body)
        reply.annotate = lambda text: [_nested(note) for note in searched.annotations(text)]
        return reply

    async def searched(self, request: Request, body: ChatCompletionRequest) -> SearchedChat:
        """Searches, if the request and the model ask for it, and puts what is found into the prompt."""
        service = self._service
        tools = [
            _tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ()) if is_file_search(tool)
        ]
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest(
                f"there are {len(tools)} tools of type file_search, of at most {MAX_TOOLS}", "tools"
            )
        others = [tool for tool in body.tools or () if not is_file_search(tool)]
        choice, is_forced = _choice(body.tool_choice, bool(others))
        plain = body.model_copy(update={"tools": others or None, "tool_choice": choice})
        stores = await self._stores(request, tools)
        if body.tool_choice == "none":
            return SearchedChat(plain)
        service.check_room()
        queries = [_last_question(body.messages)]
        if not is_forced and service.model_named(body.model).prompts.calls_tools:
            queries = await self._asked_queries(request, plain)
        elif any(tool.rewrite_query for tool in tools) and queries[0].strip():
            queries = await rewritten(service, request, [queries[0][:MAX_QUERY]])
        queries = [query[:MAX_QUERY] for query in queries if query.strip()][:MAX_QUERIES]
        if not queries:
            return SearchedChat(plain)
        passages: list[StorePassage] = []
        for tool, own in zip(tools, stores, strict=True):
            options, filter = SearchOptions.of(tool), filter_of(tool)
            for store in own:
                passages += await self._retrieval.search(store, queries, options, filter)
        passages.sort(key=lambda passage: -passage.score)
        passages = passages[: max(SearchOptions.of(tool).max_num_results for tool in tools)]
        shown, messages = await self._fitted(plain, passages)
        return SearchedChat(plain.model_copy(update={"messages": messages}), queries, passages, shown)

    async def _stores(self, request: Request, tools: Sequence[FileSearchTool]) -> list[list[VectorStore]]:
        """Of each tool; raises 404 for one that is not there, before anything is generated."""
        owner, usable = owner_of(request), self._retrieval.stores.usable

        def read() -> list[list[VectorStore]]:
            return [[usable(owner, name) for name in dict.fromkeys(tool.vector_store_ids)] for tool in tools]

        return await self._retrieval.run(read)

    async def _asked_queries(self, request: Request, body: ChatCompletionRequest) -> list[str]:
        """What the model searches for, by a call of the tool; nothing if it makes none."""
        asking = body.model_copy(
            update={
                "tools": [_FUNCTION, *(body.tools or ())],
                "tool_choice": "auto",
                "stream": False,
                "n": 1,
                "max_tokens": None,
                "max_completion_tokens": QUERY_TOKENS,
                "response_format": None,
                "logprobs": None,
                "top_logprobs": None,
            }
        )
        reply = await answer_chat(self._service, request, asking)
        message: Mapping[str, Any] = (await reply.whole())["choices"][0]["message"]
        asked = [call["function"] for call in message.get("tool_calls") or ()]
        return [_argument(call["arguments"]) for call in asked if call["name"] == "file_search"]

    async def _fitted(
        self, body: ChatCompletionRequest, passages: Sequence[StorePassage]
    ) -> tuple[list[StorePassage], list[dict[str, Any]]]:
        """As many passages as fit the context beside the conversation and its answer, and the messages with them."""
        model = self._service.model_named(body.model)
        tokenizer = model.prompts.tokenizer
        prompt = await chat_prompt(model, body, chat_tools(body))
        longest = model.ready.max_model_len
        answer = body.max_completion_tokens or body.max_tokens or min(ANSWER_TOKENS, longest // 4)
        room = longest - len(prompt.token_ids) - answer - MIN_PASSAGE
        shown: list[StorePassage] = []
        for passage in passages:
            text = passage.text
            if tokenizer is None:
                break
            ids = await model.prompts.run(partial(tokenizer.encode, text), len(text))
            num_tokens = len(ids) + 8  # with its number
            if num_tokens > room:
                if not shown and room > MIN_PASSAGE:  # a part of the best one is better than nothing
                    cut = text[: len(text) * (room - 8) // num_tokens]
                    shown.append(replace(passage, text=cut, end=passage.start + len(cut)))
                break
            room -= num_tokens
            shown.append(passage)
        return shown, _with_system(body.messages, [passage.text for passage in shown])


class SearchedResponse:
    """A ResponseSearch: the search of one response."""

    def __init__(self, file_search: FileSearch, with_results: bool) -> None:
        self._file_search = file_search
        self._with_results = with_results
        self._searched: SearchedChat | None = None

    async def answer_chat(self, service: Service, request: Request, body: ChatCompletionRequest) -> ChatReply:
        self._searched = await self._file_search.searched(request, body)
        return await answer_chat(service, request, self._searched.body)

    def items(self) -> list[Item]:
        searched = self._searched
        if searched is None or not searched.queries:
            return []
        return [searched.item(new_id("fs"), self._with_results)]

    def annotations(self, text: str) -> list[dict[str, Any]]:
        return self._searched.annotations(text) if self._searched is not None else []


def _tool(given: Mapping[str, Any], path: str) -> FileSearchTool:
    try:
        return validated(FileSearchTool, given)
    except InvalidRequest as wrong:
        raise InvalidRequest(f"{path}.{wrong}", "tools") from None


def _choice(choice: Any, has_others: bool) -> tuple[Any, bool]:
    """The tool_choice for the answer, without the tool that is run here, and whether a search must be made."""
    if isinstance(choice, dict) and choice.get("type") == "file_search":
        return ("none" if has_others else None), True
    if choice == "required" and not has_others:
        return None, True
    return (choice if has_others else None), False


def _last_question(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else ()
            return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return ""


def _argument(arguments: str) -> str:
    try:
        query = json.loads(arguments).get("query")
    except (ValueError, AttributeError):
        return ""
    return query if isinstance(query, str) else ""


def _with_system(messages: Sequence[dict[str, Any]], passages: Sequence[str]) -> list[dict[str, Any]]:
    if not passages:
        return list(messages)
    first = messages[0] if messages else {}
    is_system = first.get("role") in ("system", "developer") and isinstance(first.get("content"), str)
    instructions = first["content"] if is_system else ""
    system = {"role": "system", "content": with_passages(instructions, passages)}
    return [system, *(messages[1:] if is_system else messages)]


def _nested(note: dict[str, Any]) -> dict[str, Any]:
    """An annotation as chats have it."""
    kind = note["type"]
    return {"type": kind, kind: {name: value for name, value in note.items() if name != "type"}}
