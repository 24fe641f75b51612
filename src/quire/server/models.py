"""GET /v1/models and /v1/models/{id}; POST /tokenize and /detokenize."""

from fastapi import APIRouter
from starlette.responses import Response

from quire.core.errors import InvalidRequest
from quire.server.encoders import ServedEncoder
from quire.server.logprobs import token_text
from quire.server.prompts import PromptMaker
from quire.server.protocol.models import (
    Detokenized,
    DetokenizeRequest,
    Model,
    ModelList,
    Tokenized,
    TokenizeRequest,
)
from quire.server.reply import ERRORS, JsonReply, answers
from quire.server.service import ServedModel, Service
from quire.server.tools import served_tools
from quire.text.prompts import PreparedPrompt


def models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses={**answers(ModelList), **ERRORS})
    async def list_models() -> Response:
        """All that a request may name; an embedding model under the first of its names."""
        data: list[Model] = []
        if service.encoders.main is None:
            model = service.model
            data = [_described(name, model) for name in model.names]
            data += [_described(name, model, model.names[0]) for name in service.client.adapters.names()]
        data += [_described(encoder.names[0], encoder) for encoder in service.encoders.all]
        listed: ModelList = {"object": "list", "data": data}
        return JsonReply(listed)

    @router.get("/v1/models/{model_id:path}", responses={**answers(Model), **ERRORS})
    async def retrieve_model(model_id: str) -> Response:
        """A model under the name that was asked for, aliases included."""
        known = service.known_name(model_id)
        if service.encoders.knows(known) or service.encoders.main is not None:
            return JsonReply(_described(model_id, service.encoders.find(known)))
        model = service.model_named(model_id)
        is_adapter = service.adapter_named(model_id) is not None
        return JsonReply(_described(model_id, model, model.names[0] if is_adapter else None))

    return router


def _described(name: str, model: ServedModel | ServedEncoder, parent: str | None = None) -> Model:
    """`parent`: the model that an adapter of this name belongs to."""
    described: Model = {"id": name, "object": "model", "created": model.created, "owned_by": "quire"}
    if model.ready is not None:
        described["max_model_len"] = model.ready.max_model_len
    if parent is not None:
        described["parent"] = parent
    return described


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", responses={**answers(Tokenized), **ERRORS})
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of messages in the chat template."""
        model = service.model_named(body.model)
        token_ids = (await _prompt_of(body, model.prompts)).token_ids
        tokenized: Tokenized = {
            "count": len(token_ids),
            "max_model_len": model.ready.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            tokenized["token_strs"] = [
                token_text(token_id, model.prompts.tokenizer) for token_id in token_ids
            ]
        return JsonReply(tokenized)

    @router.post("/detokenize", responses={**answers(Detokenized), **ERRORS})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = service.model_named(body.model)
        tokenizer, limit = model.prompts.tokenizer, model.ready.vocab_size
        if tokenizer is None:
            raise InvalidRequest("this model has no tokenizer", "tokens")
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {limit}", "tokens")
        text: Detokenized = {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
        return JsonReply(text)

    return router


async def _prompt_of(body: TokenizeRequest, prompts: PromptMaker) -> PreparedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is not None:
        return await prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            tools=served_tools(body.tools)[0],
            variables=body.chat_template_kwargs,
        )
    assert body.prompt is not None
    return (await prompts.completions(body.prompt, body.add_special_tokens))[0]
