"""Searches of vector stores: options, queries that a model rewrites, a cross-encoder that ranks again, and results."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy
from fastapi import Request

from quire.core.errors import EngineDead, InvalidRequest, QueueFull
from quire.rag.filters import Filter, parse_filter
from quire.rag.ranking import IndexQuery
from quire.rag.stores import StorePassage
from quire.server.access import add_warning
from quire.server.chat import answer_chat
from quire.server.encoder_requests import all_pooled, new_id
from quire.server.encoders import RERANK, Texts, paired
from quire.server.errors import ApiError
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.protocol.retrieval import MAX_QUERY, MAX_RESULTS, SearchFields, SearchResult
from quire.server.service import Service

DEFAULT_RESULTS = 10
_AUTO = (None, "auto", "default-2024-11-15", "default_2024_08_21")
REWRITE_TOKENS = 48  # of an answer
_EXAMPLES = (
    ("hey, could you tell me what they charge for shipping?", "shipping cost"),
    ("Who was it again that wrote the first paper about transformers?", "author of the first paper on transformers"),
)  # fmt: skip
_MESSAGES = [
    {
        "role": "system",
        "content": "Rewrite the user's text as a short query for a search engine. Write only the query.",
    },
    *(
        {"role": role, "content": text}
        for pair in _EXAMPLES
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ),
]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    max_num_results: int = DEFAULT_RESULTS
    ranker: Literal["auto", "none"] = "auto"
    reranker: str | None = None  # the name of a cross-encoder
    score_threshold: float = 0.0
    embedding_weight: float = 1.0
    text_weight: float = 1.0

    @classmethod
    def of(cls, given: SearchFields) -> "SearchOptions":
        options = cls(max_num_results=given.max_num_results or DEFAULT_RESULTS)
        ranking = given.ranking_options
        if ranking is None:
            return options
        hybrid = ranking.hybrid_search
        if hybrid is not None and not hybrid.embedding_weight + hybrid.text_weight > 0:
            raise InvalidRequest(
                "ranking_options.hybrid_search has the weights 0 and 0: give at least one above 0",
                "ranking_options",
            )
        return replace(
            options,
            ranker="none" if ranking.ranker == "none" else "auto",
            reranker=None if ranking.ranker in (*_AUTO, "none") else ranking.ranker,
            score_threshold=ranking.score_threshold or 0.0,
            embedding_weight=hybrid.embedding_weight if hybrid is not None else 1.0,
            text_weight=hybrid.text_weight if hybrid is not None else 1.0,
        )

    def index_query(self, vector: numpy.ndarray, text: str, filter: Filter | None) -> IndexQuery:
        """What the index is asked for: more, and of any score, if it is ranked again."""
        is_last = self.reranker is None
        return IndexQuery(
            vector,
            text,
            self.max_num_results if is_last else MAX_RESULTS,
            filter,
            self.ranker,
            self.embedding_weight,
            self.text_weight,
            self.score_threshold if is_last else 0.0,
        )


def filter_of(given: SearchFields) -> Filter | None:
    if given.filters is None:
        return None
    try:
        return parse_filter(given.filters)
    except ValueError as error:
        raise InvalidRequest(str(error).replace("{", "{{").replace("}", "}}"), "filters") from None


async def rewritten(service: Service, request: Request, queries: Sequence[str]) -> list[str]:
    """The queries as the served model rewrites them. A query stays as it is if the model writes nothing; all do, with
    a warning, if no served model chats or a query does not fit its context."""
    made = []
    for query in queries:
        try:
            fields = {
                "messages": [*_MESSAGES, {"role": "user", "content": query}],
                "max_completion_tokens": REWRITE_TOKENS,
                "temperature": 0,
                "stop": ["\n"],
            }
            reply = await answer_chat(service, request, ChatCompletionRequest.model_validate(fields))
        except (InvalidRequest, ApiError) as error:
            if isinstance(error, ApiError) and error.status not in (400, 404):
                raise
            add_warning(request, f"rewrite_query has no effect: {error}")
            return list(queries)
        text = (await reply.whole())["choices"][0]["message"]["content"] or ""
        made.append(text.strip().strip('"')[:MAX_QUERY] or query)
    return made


async def reranked(
    service: Service, name: str, query: str, passages: Sequence[StorePassage]
) -> list[StorePassage]:
    """The passages in the order of a cross-encoder's scores."""
    encoder = await service.encoder_named(name, RERANK)
    if not encoder.vectors.labels:
        raise InvalidRequest(
            f"ranking_options.ranker={name!r} is no cross-encoder: give auto, none, or a model of {RERANK}",
            "ranking_options",
        )
    if not passages:
        return []
    texts = [passage.text for passage in passages]
    longest = encoder.ready.max_model_len
    embed = await paired(
        encoder, new_id("rerank"), Texts("query", [query]), Texts("documents", texts), longest
    )
    try:
        pooled = await all_pooled(encoder.client.submit([embed]), len(texts))
    except (EngineDead, QueueFull) as refusal:
        raise service.refusal(refusal, encoder.client) from None
    scored = [replace(passages[pair.index], score=array("f", pair.vector)[0]) for pair in pooled]
    return sorted(scored, key=lambda passage: -passage.score)


def shown_result(passage: StorePassage) -> SearchResult:
    return {
        "file_id": passage.file_id,
        "filename": passage.filename,
        "score": passage.score,
        "attributes": passage.attributes,
        "content": [{"type": "text", "text": passage.text}],
    }
