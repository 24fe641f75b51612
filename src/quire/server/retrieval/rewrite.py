"""`rewrite_query`: a query in the words that the served chat model would search with."""

from collections.abc import Sequence

from fastapi import Request

from quire.core.errors import InvalidRequest
from quire.server.access import add_warning
from quire.server.chat import answer_chat
from quire.server.errors import ApiError
from quire.server.protocol.completions import ChatCompletionRequest
from quire.server.protocol.retrieval import MAX_QUERY
from quire.server.service import Service

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
