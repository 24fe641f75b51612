"""What the endpoints of encoders share: texts to tokens within the limits, through the engine, and back."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from quire.core.errors import ContextExceeded, EngineDead, InvalidRequest, QueueFull, QuireError
from quire.core.request import EmbedRequest, Pooled
from quire.engine.streams import Stream
from quire.server.access import context_of
from quire.server.errors import ApiError
from quire.server.generation import StreamWatch
from quire.server.prompts import check_characters
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.text.prompts import as_list, cut
from quire.text.tokenizer import LONG

MAX_INPUTS = 2048  # of one request, as OpenAI has it
MAX_CHARACTERS = 1 << 20  # of each


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


async def encoder_with_room(service: Service, name: str | None, path: str) -> ServedModel:
    """The encoder that a request of `path` names, started if need be; refused if its queue is full."""
    service.refuse_if_draining()  # before an encoder is started for it
    encoder = await service.encoder_named(name, path)
    service.check_room(encoder.client)
    return encoder


async def encoded(
    service: Service, encoder: ServedModel, embed: EmbedRequest, request: Request, param: str = "input"
) -> list[Pooled]:
    """In the order of the texts, which the request calls `param`. A closed connection, or --request-timeout, drops
    what still waits."""
    context = context_of(request)
    check_limits(embed, encoder, param)
    num_tokens = embed.num_prompt_tokens
    service.check_allowance(context, num_tokens)
    context.facts.update(id=embed.request_id, model=encoder.names[0], prompt_tokens=num_tokens)
    try:
        stream = encoder.client.submit([embed])
    except (EngineDead, QueueFull) as refusal:
        raise service.refusal(refusal, encoder.client) from None
    context.allowance.spend_tokens(num_tokens)
    watch = StreamWatch(stream, request.receive, service.settings.request_timeout, service.metrics)
    try:
        pooled = await all_pooled(stream, len(embed.texts))
    finally:
        watch.close()
    service.metrics.embedded(
        encoder.names[0], len(embed.texts), num_tokens, time.monotonic() - context.arrival
    )
    return pooled


async def all_pooled(stream: Stream[Pooled], num_texts: int) -> list[Pooled]:
    """The answers of one request, when all have come. Closes the stream."""
    pooled: list[Pooled] = []
    try:
        while len(pooled) < num_texts:
            pooled += await stream.updates()
            wrong = next((item.error for item in pooled if item.error is not None), None)
            if wrong is not None:
                raise QuireError(wrong)
        stream.done(stream.request_ids[0])
    finally:
        stream.close()
    return pooled


def check_limits(embed: EmbedRequest, encoder: ServedModel, param: str) -> None:
    """Refuses here what the engine would refuse by the same limits."""
    limit = encoder.client.admission.bounds.max_tokens
    try:
        encoder.ready.limits.check_texts(embed)
    except ContextExceeded as exceeded:
        error = exceeded.renamed({"input": param})
        raise ApiError(
            400,
            f"This model's maximum context length is {encoder.ready.max_model_len} tokens, however {error}; the flag "
            "--embedding-truncate lets the server cut all such texts",
            param=error.param,
            code="context_length_exceeded",
        ) from None
    except InvalidRequest as error:
        raise error.renamed({"input": param}) from None
    if limit is not None and embed.num_prompt_tokens > limit:
        raise InvalidRequest(
            f"{param} has {embed.num_prompt_tokens} tokens together and {limit} may wait: send several requests, "
            "or raise max_queue_tokens",
            param,
        )


def kept_tokens(service: Service, encoder: ServedModel, asked: int | None) -> int | None:
    """How many tokens of a text are kept, by a request's truncate_prompt_tokens or the server's flag; None: all."""
    keep, longest = asked, encoder.ready.max_model_len
    if keep is None:
        return longest if service.settings.embedding_truncate else None
    if keep < -1 or keep == 0 or keep > longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens={keep}: give 1 to {longest}, or -1 for as many as the model takes",
            "truncate_prompt_tokens",
        )
    return longest if keep == -1 else keep


def check_texts(texts: Sequence[Any], encoder: ServedModel, keep: int | None, param: str) -> None:
    """Refuses, before they are tokenized, too many texts, and a text that is certain to be too long."""
    if not texts:
        raise InvalidRequest(f"{param} is an empty list: send at least one text", param)
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(
            f"{param} has {len(texts)} texts and one request may have {MAX_INPUTS}: send several requests",
            param,
        )
    tokenizer, longest = encoder.prompts.tokenizer, encoder.ready.max_model_len
    for position, item in enumerate(texts):
        check_characters(item, MAX_CHARACTERS, param)
        if keep is None and isinstance(item, str) and len(item) > LONG and tokenizer is not None:
            fewest = tokenizer.fewest_tokens(item, longest + 1)
            if fewest > longest:
                raise ContextExceeded.of_text(position, f"at least {fewest}", longest).renamed(
                    {"input": param}
                )


async def token_ids(
    texts: Any,
    encoder: ServedModel,
    keep: int | None,
    add_special_tokens: bool | None = None,
    param: str = "input",
) -> list[list[int]]:
    """The texts' tokens, cut to `keep` if that is given; refused with the number that was exceeded."""
    inputs = as_list(texts)
    check_texts(inputs, encoder, keep, param)
    try:
        prepared = await encoder.prompts.completions(inputs, add_special_tokens)
    except InvalidRequest as wrong:
        raise InvalidRequest(str(wrong), param) from None
    made = [prompt.token_ids for prompt in prepared]
    if add_special_tokens is not False and any(not isinstance(item, str) for item in inputs):
        _check_own_tokens(inputs, made, encoder)
    return made if keep is None else [cut(text, keep) for text in made]


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
