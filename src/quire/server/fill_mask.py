"""POST /v1/fill-mask: the most likely tokens in place of mask tokens."""

import time
from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.encoder_requests import encoded, kept_tokens, new_id, token_ids
from quire.server.protocol.scoring import FilledMaskList, FillMaskRequest
from quire.server.reply import JsonReply, answers
from quire.server.service import Service
from quire.text.encoder_texts import masked_request, predictions_of

PATH = "/v1/fill-mask"


def fill_mask_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["encoders"])

    @router.post(PATH, responses=answers(FilledMaskList))
    async def fill_mask(body: FillMaskRequest, request: Request) -> Response:
        """Predictions of each mask token of each text, as transformers' pipeline makes them."""
        service.refuse_if_draining()
        encoder = await service.encoder_named(body.model, PATH)
        service.check_room(encoder.client)
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

    return router
