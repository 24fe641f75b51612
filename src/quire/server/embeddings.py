"""POST /v1/embeddings."""

import base64
import math
import sys
from array import array

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest
from quire.server.encoder_requests import encoded, kept_tokens, new_id, token_ids
from quire.server.protocol.models import EmbeddingList, EmbeddingRequest
from quire.server.reply import JsonReply, answers
from quire.server.service import Service
from quire.text.encoder_texts import with_prompt
from quire.text.prompts import as_list

PATH = "/v1/embeddings"


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post(PATH, responses=answers(EmbeddingList))
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """One vector for each text."""
        service.refuse_if_draining()  # before an encoder is started for it
        encoder = await service.encoder_named(body.model, PATH)
        vectors = encoder.vectors
        _check_dimensions(body.dimensions, encoder.names[0], vectors.width)
        service.check_room(encoder.client)
        keep = kept_tokens(service, encoder, body.truncate_prompt_tokens)
        prompted = with_prompt(as_list(body.input), vectors, body.prompt_name)
        texts = await token_ids(prompted, encoder, keep, body.add_special_tokens)
        pooled = await encoded(service, encoder, EmbedRequest(new_id("embd"), texts), request)
        num_tokens = sum(vector.num_tokens for vector in pooled)
        listed: EmbeddingList = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": item.index,
                    "embedding": encode_vector(item.vector, body.encoding_format, body.dimensions),
                }
                for item in pooled
            ],
            "model": encoder.names[0],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return JsonReply(listed)

    return router


def _check_dimensions(dimensions: int | None, model: str, width: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequest(
            f"dimensions={dimensions} is outside 1 to {width}, the size of {model}'s vectors: change it",
            "dimensions",
        )


# ------------------------------------------------- vectors: plain Python, this process needs no numpy otherwise


def encode_vector(vector: bytes, encoding: str, dimensions: int | None) -> list[float] | str:
    """`vector` is float32 in this machine's order; base64 is little-endian, as OpenAI's clients read it."""
    numbers = array("f", vector)
    if dimensions is not None and dimensions < len(numbers):
        numbers = _shortened(numbers, dimensions)
    if encoding == "float":
        return numbers.tolist()
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _shortened(numbers: "array[float]", dimensions: int) -> "array[float]":
    """The first of them, scaled to length one again; zeros stay zeros."""
    kept = numbers[:dimensions]
    length = math.sqrt(sum(number * number for number in kept))
    return array("f", (number / length for number in kept)) if length else kept
