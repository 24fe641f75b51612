"""The endpoints of encoders: /v1/embeddings, /v1/classify, /v1/score, /v1/rerank and /v1/fill-mask."""

import base64
import math
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest
from quire.server.encoder_requests import (
    check_limits,
    check_texts,
    encoded,
    encoder_with_room,
    kept_tokens,
    new_id,
    token_ids,
)
from quire.server.protocol.models import Embedding, EmbeddingList, EmbeddingRequest
from quire.server.protocol.scoring import (
    ClassifiedTexts,
    ClassifyRequest,
    EncoderRequest,
    FilledMaskList,
    FillMaskRequest,
    RerankedDocument,
    RerankedDocuments,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from quire.server.reply import JsonReply, answers
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.text.encoder_texts import cosine, masked_request, pair_request, predictions_of, with_prompt
from quire.text.prompts import as_list

EMBEDDINGS, CLASSIFY, SCORE, RERANK = "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"
FILL_MASK = "/v1/fill-mask"
MAX_PAIR_CHARACTERS = 1 << 24  # of all pairs together: a query that goes with many documents counts with each


# ---------------------------------------------------------------------- embeddings


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post(EMBEDDINGS, responses=answers(EmbeddingList))
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """One vector for each text."""
        model, vectors, num_tokens = await embedded(service, request, body)
        data: list[Embedding] = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        listed: EmbeddingList = {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return JsonReply(listed)

    return router


async def embedded(
    service: Service, request: Request, body: EmbeddingRequest
) -> tuple[str, list[list[float] | str], int]:
    """The model's name, a vector for each text, and the number of tokens."""
    service.refuse_if_draining()  # before an encoder is started for it
    encoder = await service.encoder_named(body.model, EMBEDDINGS)
    dimensions, vectors, name = body.dimensions, encoder.vectors, encoder.names[0]
    if dimensions is not None and not 1 <= dimensions <= vectors.width:
        raise InvalidRequest(
            f"dimensions={dimensions} is outside 1 to {vectors.width}, the size of {name}'s vectors: change it",
            "dimensions",
        )
    service.check_room(encoder.client)
    keep = kept_tokens(service, encoder, body.truncate_prompt_tokens)
    prompted = with_prompt(as_list(body.input), vectors, body.prompt_name)
    texts = await token_ids(prompted, encoder, keep, body.add_special_tokens)
    pooled = await encoded(service, encoder, EmbedRequest(new_id("embd"), texts), request)
    made = [encode_vector(item.vector, body.encoding_format, dimensions) for item in pooled]
    return name, made, sum(item.num_tokens for item in pooled)


def encode_vector(vector: bytes, encoding: str, dimensions: int | None) -> list[float] | str:
    """`vector` is float32 in this machine's order; base64 is little-endian, as OpenAI's clients read it."""
    numbers = array("f", vector)
    if dimensions is not None and dimensions < len(numbers):
        numbers = numbers[:dimensions]
        length = math.sqrt(sum(number * number for number in numbers))
        if length:  # zeros stay zeros; others have length one again
            numbers = array("f", (number / length for number in numbers))
    if encoding == "float":
        return numbers.tolist()
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


# ---------------------------------------------------------------------- scores


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a request, and the field that has them."""

    param: str
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Scored:
    """One score for each pair."""

    id: str
    model: str
    scores: list[float]
    num_tokens: int


def _head(request_id: str, model: str, num_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    head = {"id": request_id, "object": "list", "created": int(time.time())}
    return {**head, "model": model, "usage": usage}


def scoring_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["encoders"])

    @router.post(CLASSIFY, responses=answers(ClassifiedTexts))
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The class of each text, and the probabilities of all classes."""
        encoder = await encoder_with_room(service, body.model, CLASSIFY)
        keep = kept_tokens(service, encoder, body.truncate_prompt_tokens)
        texts = await token_ids(body.input, encoder, keep, body.add_special_tokens)
        embed, labels = EmbedRequest(new_id("classify"), texts), encoder.vectors.labels
        data = []
        for pooled in await encoded(service, encoder, embed, request):
            probs = array("f", pooled.vector).tolist()
            label = labels[probs.index(max(probs))]
            data.append({"index": pooled.index, "label": label, "probs": probs, "num_classes": len(probs)})
        head = _head(embed.request_id, encoder.names[0], embed.num_prompt_tokens)
        return JsonReply({**head, "data": data})

    @router.post(SCORE, responses=answers(ScoreList))
    async def score(body: ScoreRequest, request: Request) -> Response:
        """How well texts go with others: by a cross-encoder, or as the cosine of two vectors."""
        first, second = (
            Texts(name, [texts] if isinstance(texts, str) else texts)
            for name, texts in (("text_1", body.text_1), ("text_2", body.text_2))
        )
        if len(first.texts) not in (1, len(second.texts)):
            raise InvalidRequest(
                f"text_1 has {len(first.texts)} texts and text_2 {len(second.texts)}: send one, or as many",
                "text_1",
            )
        scored = await _scored(service, SCORE, body, first, second, request)
        data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scored.scores)]
        return JsonReply({**_head(scored.id, scored.model, scored.num_tokens), "data": data})

    @router.post(RERANK, responses=answers(RerankedDocuments))
    @router.post("/v2/rerank", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents in the order in which they answer a query."""
        documents = [text if isinstance(text, str) else text.text for text in body.documents]
        query = Texts("query", [body.query])
        scored = await _scored(service, RERANK, body, query, Texts("documents", documents), request)
        order = sorted(range(len(documents)), key=lambda index: -scored.scores[index])
        results: list[RerankedDocument] = []
        for index in order[: body.top_n or None]:
            result: RerankedDocument = {"index": index, "relevance_score": scored.scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": documents[index]}
            results.append(result)
        reranked: RerankedDocuments = {
            "id": scored.id,
            "model": scored.model,
            "usage": {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens},
            "results": results,
        }
        return JsonReply(reranked)

    _add_fill_mask(router, service)
    return router


async def _scored(
    service: Service, path: str, body: EncoderRequest, first: Texts, second: Texts, request: Request
) -> Scored:
    """One of the first texts goes with all of the second, or each with its own."""
    encoder = await encoder_with_room(service, body.model, path)
    keep = kept_tokens(service, encoder, body.truncate_prompt_tokens)
    request_id = new_id(path.removeprefix("/v1/"))
    for part in (first, second):
        check_texts(part.texts, encoder, keep, part.param)
    if encoder.vectors.labels:
        embed = await paired(encoder, request_id, first, second, keep)
        pooled = await encoded(service, encoder, embed, request, second.param)
        scores = [array("f", pair.vector)[0] for pair in pooled]
        return Scored(request_id, encoder.names[0], scores, embed.num_prompt_tokens)
    rows: list[list[int]] = []
    for part in (first, second):
        made = await token_ids(part.texts, encoder, keep, param=part.param)
        check_limits(EmbedRequest(request_id, made), encoder, part.param)
        rows += made
    embed = EmbedRequest(request_id, rows)
    pooled = await encoded(service, encoder, embed, request, second.param)
    vectors = [array("f", text.vector) for text in pooled]
    lefts, rights = vectors[: len(first.texts)], vectors[len(first.texts) :]

    def cosines() -> list[float]:
        return [cosine(lefts[at % len(lefts)], right) for at, right in enumerate(rights)]

    scores = await encoder.prompts.run(cosines, len(vectors) * encoder.vectors.width)
    return Scored(request_id, encoder.names[0], scores, embed.num_prompt_tokens)


async def paired(
    encoder: ServedModel, request_id: str, first: Texts, second: Texts, keep: int | None
) -> EmbedRequest:
    """The pairs as a cross-encoder takes them: both texts in one sequence."""
    pairs = [(first.texts[at % len(first.texts)], text) for at, text in enumerate(second.texts)]

    def make() -> EmbedRequest:
        return pair_request(request_id, pairs, encoder.prompts.tokenizer, keep)

    try:
        return await encoder.prompts.run(make, _num_characters(pairs, first.param))
    except InvalidRequest as wrong:
        raise wrong.renamed({"prompt": second.param}) from None


def _num_characters(pairs: Sequence[tuple[str, str]], param: str) -> int:
    num_characters = sum(len(first) + len(second) for first, second in pairs)
    if num_characters > MAX_PAIR_CHARACTERS:
        raise InvalidRequest(
            f"the pairs have {num_characters} characters, {param} counted with each, and {MAX_PAIR_CHARACTERS} are "
            "allowed: shorten it, or send several requests",
            param,
        )
    return num_characters


# ---------------------------------------------------------------------- masks


def _add_fill_mask(router: APIRouter, service: Service) -> None:
    @router.post(FILL_MASK, responses=answers(FilledMaskList))
    async def fill_mask(body: FillMaskRequest, request: Request) -> Response:
        """Predictions of each mask token of each text, as transformers' pipeline makes them."""
        encoder = await encoder_with_room(service, body.model, FILL_MASK)
        tokenizer = encoder.prompts.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"{encoder.names[0]} has no tokenizer: name another model", "model")
        texts = await token_ids(
            body.input, encoder, kept_tokens(service, encoder, body.truncate_prompt_tokens)
        )
        masked = masked_request(new_id("fill-mask"), texts, body.top_k, tokenizer, encoder.ready.vocab_size)
        pooled = await encoded(service, encoder, masked, request)

        def described() -> FilledMaskList:
            return {
                "id": masked.request_id,
                "object": "list",
                "created": int(time.time()),
                "model": encoder.names[0],
                "data": [
                    {
                        "index": text.index,
                        "object": "fill-mask",
                        "masks": [
                            [asdict(token) for token in row]  # type: ignore[misc]
                            for row in predictions_of(text, masked, tokenizer)
                        ],
                    }
                    for text in pooled
                ],
                "usage": {
                    "prompt_tokens": masked.num_prompt_tokens,
                    "total_tokens": masked.num_prompt_tokens,
                },
            }

        num_decoded = sum(len(row) * len(text) for row, text in zip(masked.masked, texts, strict=True))
        return JsonReply(await encoder.prompts.run(described, num_decoded * masked.top_k))
