"""/v1/models and /v1/models/{id}; POST /tokenize and /detokenize, GET /tokenizer_info."""

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response

from quire.core.errors import InvalidRequest
from quire.server.access import path_of
from quire.server.errors import speaks_anthropic
from quire.server.logprobs import token_text
from quire.server.operations import engine_call
from quire.server.prompts import PromptMaker
from quire.server.protocol.base import Deleted
from quire.server.protocol.models import (
    AnthropicModel,
    AnthropicModelList,
    Detokenized,
    DetokenizeRequest,
    Model,
    ModelList,
    Tokenized,
    TokenizeRequest,
)
from quire.server.reply import ERRORS, JsonReply, answers
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.server.stored import page_limit
from quire.server.tools import served_tools
from quire.text.prompts import PreparedPrompt

MAX_TOKENS = 131_072  # that /detokenize takes, where the context is not longer


def models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=answers(ModelList))
    async def list_models(request: Request) -> Response:
        """All that a request may name; an embedding model under the first of its names."""
        data: list[Model] = []
        if service.models.main.task == "generate":
            model = service.model
            data = [_described(name, model) for name in model.names]
            data += [_described(name, model, model.names[0]) for name in service.client.adapters.names()]
        data += [_described(encoder.names[0], encoder) for encoder in service.models.encoders]
        if for_anthropic(request):
            return JsonReply(anthropic_page(data, request.query_params))
        listed: ModelList = {"object": "list", "data": data}
        return JsonReply(listed)

    @router.get("/v1/models/{model_id:path}", responses=answers(Model))
    async def retrieve_model(model_id: str, request: Request) -> Response:
        """A model under the name that was asked for, aliases included."""
        known = service.known_name(model_id)
        if service.models.knows(known) or service.models.main.task == "embed":
            described = _described(model_id, service.models.encoder(known))
        else:
            model = service.model_named(model_id)
            is_adapter = service.adapter_named(model_id) is not None
            described = _described(model_id, model, model.names[0] if is_adapter else None)
        return JsonReply(anthropic_model(described) if for_anthropic(request) else described)

    @router.delete("/v1/models/{model_id:path}", responses=answers(Deleted))
    async def delete_model(model_id: str) -> Response:
        """Unloads an adapter, with the admin key; requests that run with it go on."""
        if service.models.knows(model_id) or not service.client.adapters.knows(model_id):
            if not service.models.knows(model_id):
                service.model_named(model_id)  # 404 for an unknown name
            raise InvalidRequest(f"{model_id} is no adapter: only adapters can be deleted", "model")
        with engine_call():
            await service.client.unload_adapter(model_id)
        gone: Deleted = {"id": model_id, "object": "model", "deleted": True}
        return JsonReply(gone)

    return router


def for_anthropic(request: Request) -> bool:
    return speaks_anthropic(path_of(request.scope), request.scope["headers"])


def anthropic_model(model: Model) -> AnthropicModel:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.get("max_model_len"),
        "max_tokens": model.get("max_model_len"),
    }


def anthropic_page(models: list[Model], query: QueryParams) -> AnthropicModelList:
    """One page, by the query's limit and after_id or before_id."""
    limit = page_limit(query.get("limit", "20"), 1000)
    ids = [model["id"] for model in models]
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise InvalidRequest(f"{name}={query[name][:80]!r} is no model of this server", name)
    start = ids.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = start + limit
    if "before_id" in query:
        end = ids.index(query["before_id"])
        start = max(start, end - limit)
    shown = models[start:end]
    return {
        "data": [anthropic_model(model) for model in shown],
        "has_more": start > 0 if "before_id" in query else end < len(models),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _described(name: str, model: ServedModel, parent: str | None = None) -> Model:
    """`parent`: the model that an adapter of this name belongs to."""
    described: Model = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "task": model.task,
    }
    if model.is_started:
        described["max_model_len"] = model.ready.max_model_len
    if parent is not None:
        described["parent"] = parent
    return described


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", responses=answers(Tokenized))
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
            tokenized["token_strs"] = await asyncio.to_thread(_token_texts, token_ids, model.prompts)
        return JsonReply(tokenized)

    @router.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> Response:
        """The model's tokenizer_config.json, its chat template included, in vLLM's shape."""
        described = service.model.ready.described
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **described.tokenizer_config}
        if "chat_template" in described.template_config:
            config["chat_template"] = described.template_config["chat_template"]
        return JSONResponse(config)  # its numbers may be larger than msgspec writes

    @router.post("/detokenize", responses=answers(Detokenized))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = service.model_named(body.model)
        tokenizer, limit = model.prompts.tokenizer, model.ready.vocab_size
        if tokenizer is None:
            raise InvalidRequest("this model has no tokenizer", "tokens")
        most = max(MAX_TOKENS, model.ready.max_model_len)
        if len(body.tokens) > most:
            raise InvalidRequest(
                f"tokens holds {len(body.tokens)} ids and {most} are allowed: send several requests", "tokens"
            )
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {limit}", "tokens")
        decoded = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        text: Detokenized = {"prompt": decoded}
        return JsonReply(text)

    return router


def _token_texts(token_ids: list[int], prompts: PromptMaker) -> list[str]:
    return [token_text(token_id, prompts.tokenizer) for token_id in token_ids]


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
