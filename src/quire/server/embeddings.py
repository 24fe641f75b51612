"""POST /v1/embeddings."""

import base64
import math
import sys
import time
import uuid
from array import array
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import ContextExceeded, EngineDead, InvalidRequest, QueueFull, QuireError
from quire.core.request import EmbedRequest, Pooled
from quire.link.messages import Ready
from quire.server.access import context_of
from quire.server.errors import ApiError
from quire.server.generation import StreamWatch
from quire.server.prompts import check_characters
from quire.server.protocol.models import EmbeddingList, EmbeddingRequest
from quire.server.reply import ERRORS, JsonReply, answers
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.text.prompts import as_list, cut
from quire.text.tokenizer import LONG

MAX_INPUTS = 2048  # of one request, as OpenAI has it
MAX_CHARACTERS = 1 << 20  # of each


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", responses={**answers(EmbeddingList), **ERRORS})
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """One vector for each text."""
        service.refuse_if_draining()  # before an encoder is started for it
        encoder = await service.encoder_named(body.model)
        _check_dimensions(body.dimensions, encoder.ready)
        service.check_room(encoder.client)
        keep = body.truncate_prompt_tokens
        if keep is None and service.settings.embedding_truncate:
            keep = -1
        texts = await _token_ids(body, encoder, keep)
        pooled = await _embedded(service, encoder, texts, request)
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


async def _embedded(
    service: Service, encoder: ServedModel, texts: list[list[int]], request: Request
) -> list[Pooled]:
    """In the texts' order. A closed connection, or --request-timeout, drops what still waits."""
    context = context_of(request)
    embed = EmbedRequest(f"embd-{uuid.uuid4().hex}", texts)
    _check(embed, encoder)
    num_tokens = embed.num_prompt_tokens
    service.check_allowance(context, num_tokens)
    context.facts.update(id=embed.request_id, model=encoder.names[0], prompt_tokens=num_tokens)
    try:
        stream = encoder.client.submit([embed])
    except (EngineDead, QueueFull) as refusal:
        raise service.refusal(refusal, encoder.client) from None
    context.allowance.spend_tokens(num_tokens)
    watch = StreamWatch(stream, request.receive, service.settings.request_timeout, service.metrics)
    pooled: list[Pooled] = []
    try:
        while len(pooled) < len(texts):
            pooled += await stream.updates()
            wrong = next((item.error for item in pooled if item.error is not None), None)
            if wrong is not None:
                raise QuireError(wrong)
        stream.done(stream.request_ids[0])
    finally:
        stream.close()
        watch.close()
    service.metrics.embedded(encoder.names[0], len(texts), num_tokens, time.monotonic() - context.arrival)
    return pooled


def _check(embed: EmbedRequest, encoder: ServedModel) -> None:
    """Refuses here what the engine would refuse by the same limits."""
    limit = encoder.client.admission.bounds.max_tokens
    try:
        encoder.ready.limits.check_texts(embed)
    except ContextExceeded as error:
        raise ApiError(
            400,
            f"This model's maximum context length is {encoder.ready.max_model_len} tokens, however {error}; the flag "
            "--embedding-truncate lets the server cut all such texts",
            param=error.param,
            code="context_length_exceeded",
        ) from None
    if limit is not None and embed.num_prompt_tokens > limit:
        raise InvalidRequest(
            f"input has {embed.num_prompt_tokens} tokens together and {limit} may wait: send several requests, "
            "or raise max_queue_tokens",
            "input",
        )


def _check_dimensions(dimensions: int | None, ready: Ready) -> None:
    width = ready.vectors.width if ready.vectors is not None else 0
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequest(
            f"dimensions={dimensions} is outside 1 to {width}, the size of {ready.model}'s vectors: change it",
            "dimensions",
        )


async def _token_ids(body: EmbeddingRequest, encoder: ServedModel, keep: int | None) -> list[list[int]]:
    """The texts' tokens, cut to `keep` if that was asked for; refused with the number that was exceeded."""
    inputs = as_list(body.input)
    if not inputs:
        raise InvalidRequest("input is an empty list: send at least one text", "input")
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(inputs)} texts and one request may have {MAX_INPUTS}: send several requests",
            "input",
        )
    tokenizer, longest = encoder.prompts.tokenizer, encoder.ready.max_model_len
    for position, item in enumerate(inputs):
        check_characters(item, MAX_CHARACTERS, "input")
        if keep is None and isinstance(item, str) and len(item) > LONG and tokenizer is not None:
            fewest = tokenizer.fewest_tokens(item, longest + 1)
            if fewest > longest:
                raise ContextExceeded.of_text(position, f"at least {fewest}", longest)
    try:
        prepared = await encoder.prompts.completions(inputs, body.add_special_tokens)
    except InvalidRequest as wrong:
        raise InvalidRequest(str(wrong), "input") from None
    texts = [prompt.token_ids for prompt in prepared]
    if body.add_special_tokens is not False and any(not isinstance(item, str) for item in inputs):
        _check_own_tokens(inputs, texts, encoder)
    return _fitted(texts, keep, encoder.ready.max_model_len)


def _check_own_tokens(inputs: list[Any], texts: list[list[int]], encoder: ServedModel) -> None:
    """Refuses token ids of another tokenizer, which would make vectors of other words. LangChain sends such ids."""
    tokenizer, vocab_size = encoder.prompts.tokenizer, encoder.ready.vocab_size
    frame = tokenizer.encode("", add_special_tokens=True) if tokenizer is not None else []
    for position, (item, text) in enumerate(zip(inputs, texts, strict=True)):
        if isinstance(item, str) or not text:
            continue
        problem = ""
        if not 0 <= min(text) <= max(text) < vocab_size:
            wrong = min(text) if min(text) < 0 else max(text)
            problem = f"cannot be: token id {wrong} is outside the vocabulary of {vocab_size}"
        elif len(frame) == 2 and text[0] != frame[0] and text[-1] != frame[1]:
            problem = f"does not begin with the token id {frame[0]} or end with {frame[1]}, as texts of this model do"
        if problem:
            raise InvalidRequest(
                f"input[{position}] {problem}: it seems to come from another tokenizer, so send text instead "
                "(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)); add_special_tokens: false says "
                "that ids of this model's tokenizer have no special tokens",
                "input",
            )


def _fitted(texts: list[list[int]], keep: int | None, longest: int) -> list[list[int]]:
    """The texts, cut to `keep` tokens if that was asked for."""
    if keep is None:
        return texts
    if keep < -1 or keep == 0 or keep > longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens={keep}: give 1 to {longest}, or -1 for as many as the model takes",
            "truncate_prompt_tokens",
        )
    return [cut(text, longest if keep == -1 else keep) for text in texts]


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
