"""/api/…: Ollama's API, translated to chats and back, so that its clients need only this server's address.

Answers are streamed as lines of JSON, which is the default there. Options of the runtime that have no meaning here
(`num_ctx`, `num_gpu`, …) are accepted without effect, as are `keep_alive` and the tag `latest` of a name.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire import __version__
from quire.core.config import Task
from quire.core.errors import InvalidRequest
from quire.server.encoders import embedded
from quire.server.errors import ApiError, validated
from quire.server.generation import Generation
from quire.server.protocol.base import Many, Usage
from quire.server.protocol.models import EmbeddingRequest
from quire.server.reply import EventStream, JsonReply
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.server.translation import TranslatedEvents, build_whole, call_input, string_field, translated_chat

OLLAMA_VERSION = "0.12.0"  # of Ollama's API that this follows: some clients refuse older ones
_OPTIONS = {  # theirs -> a chat's
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "num_predict": "max_tokens", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
_NAMES = {chats: f"options.{theirs}" for theirs, chats in _OPTIONS.items()} | {"response_format": "format"}
_REFUSED = {
    "suffix": "/v1/completions",
    "raw": "/v1/completions",
    "template": "--chat-template",
    "context": "/api/chat",
}


class _OllamaRequest(BaseModel):
    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class OllamaChat(_OllamaRequest):
    messages: Many[dict[str, Any]] = []
    tools: Many[dict[str, Any]] | None = None


class OllamaGenerate(_OllamaRequest):
    prompt: str = ""
    system: str | None = None
    images: Many[str] | None = None
    suffix: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: Many[int] | None = None


class OllamaEmbed(BaseModel):
    model: str
    input: str | Many[str] = ""
    prompt: str | None = None  # of the older /api/embeddings
    truncate: bool = True
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaModel(BaseModel):
    model: str | None = None
    name: str | None = None  # older clients
    verbose: bool = False


def ollama_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["ollama"])

    @router.post("/api/chat")
    async def chat(body: OllamaChat, request: Request) -> Response:
        """Answers a conversation."""
        if not body.messages:
            return _loaded(service, body.model, {"message": {"role": "assistant", "content": ""}})
        fields = {**_fields(service, body), "messages": _messages(body.messages), "tools": body.tools or None}
        return await _answer(service, request, fields, body, is_chat=True)

    @router.post("/api/generate")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        """Answers one prompt, in the model's chat template."""
        for name, instead in _REFUSED.items():
            if getattr(body, name):
                raise InvalidRequest(f"{name} is not supported here: use {instead}", name)
        if not body.prompt:
            return _loaded(service, body.model, {"response": ""})
        system = [{"role": "system", "content": body.system}] if body.system else []
        message = {"role": "user", "content": body.prompt, "images": body.images}
        fields = {**_fields(service, body), "messages": _messages([*system, message])}
        return await _answer(service, request, fields, body, is_chat=False)

    @router.post("/api/embed")
    async def embed(body: OllamaEmbed, request: Request) -> Response:
        """One vector for each text."""
        began = time.perf_counter()
        vectors, num_tokens = await _embedded(service, body, request)
        return JsonReply(
            {
                "model": body.model,
                "embeddings": vectors,
                "total_duration": int(1e9 * (time.perf_counter() - began)),
                "load_duration": 0,
                "prompt_eval_count": num_tokens,
            }
        )

    @router.post("/api/embeddings")
    async def embeddings(body: OllamaEmbed, request: Request) -> Response:
        """The older form: one prompt, one vector."""
        single = body.model_copy(update={"input": body.prompt or body.input})
        return JsonReply({"embedding": (await _embedded(service, single, request))[0][0]})

    @router.get("/api/tags")
    async def tags() -> Response:
        """All models that a request may name."""
        return JsonReply({"models": [_listed(name, model) for name, model in _served(service)]})

    @router.get("/api/ps")
    async def running() -> Response:
        """Models whose engine runs."""
        models = [
            {**_listed(name, model), **_loaded_fields(model)}
            for name, model in _served(service)
            if model.is_started
        ]
        return JsonReply({"models": models})

    @router.post("/api/show")
    async def show(body: OllamaModel) -> Response:
        """What a model is, and what it can do."""
        name = body.model or body.name or ""
        shown = dict(_served(service)).get(_plain(service, name))
        if shown is None:
            raise ApiError(
                404, f"model {name[:80]!r} not found: GET /api/tags lists what is served", param="model"
            )
        return JsonReply(_shown(shown))

    @router.get("/api/version")
    async def version() -> Response:
        return JsonReply({"version": OLLAMA_VERSION, "quire": __version__})

    return router


# ---------------------------------------------------------------------- requests


def _plain(service: Service, name: str) -> str:
    """Without the tag that Ollama's clients add."""
    known = {served for served, _ in _served(service)}
    return name.removesuffix(":latest") if name not in known else name


def _fields(service: Service, body: _OllamaRequest) -> dict[str, Any]:
    options = body.options or {}
    fields = {chats: options[theirs] for theirs, chats in _OPTIONS.items() if options.get(theirs) is not None}
    if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] < 0:
        del fields["max_tokens"]  # -1: as long as the context allows
    if fields.get("top_k") == 0:
        del fields["top_k"]
    if isinstance(body.format, dict):
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": body.format},
        }
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise InvalidRequest(f'format is {body.format[:40]!r}: give "json" or a JSON schema', "format")
    if body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
    # A stream says its usage at its end in any case.
    return {**fields, "model": _plain(service, body.model), "stream": body.stream}


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat's. Calls have no ids there: they are numbered, and a tool's answers follow in the order of the calls."""
    translated: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        if message.get("images"):
            raise InvalidRequest(
                "images are not supported: this server reads text", f"messages.{index}.images"
            )
        role = string_field(message, "role", f"messages[{index}]")
        translated.append({"role": role, "content": message.get("content") or ""})
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise InvalidRequest.at(f"messages[{index}]", "has tool_calls that are no list: send a list")
            numbered = [_call(call, f"call_{index}_{number}") for number, call in enumerate(calls)]
            translated[-1]["tool_calls"] = numbered
            open_calls = [call["id"] for call in numbered]
        if role == "tool":
            translated[-1]["tool_call_id"] = open_calls.pop(0) if open_calls else f"call_{index}"
    return translated


def _call(call: Any, call_id: str) -> dict[str, Any]:
    function = call.get("function") or {} if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest("a tool call must be an object with a function, an object too", "messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }


async def _answer(
    service: Service, request: Request, fields: dict[str, Any], body: _OllamaRequest, is_chat: bool
) -> Response:
    reply = await translated_chat(service, request, fields, _NAMES)
    builder = AnswerBuilder(body.model, is_chat, reply.generation)
    if body.stream:
        return LineStream(TranslatedEvents(reply, builder, _NAMES, encode=lines), reply.response_id)
    await build_whole(reply, builder, _NAMES)
    return JsonReply(builder.whole)


async def _embedded(service: Service, body: OllamaEmbed, request: Request) -> tuple[list[Any], int]:
    """The vectors, and the number of tokens."""
    fields = {"model": _plain(service, body.model), "input": body.input, "dimensions": body.dimensions}
    fields["truncate_prompt_tokens"] = -1 if body.truncate else None
    _, vectors, num_tokens = await embedded(service, request, validated(EmbeddingRequest, fields))
    return vectors, num_tokens


# ---------------------------------------------------------------------- answers


class AnswerBuilder:
    """A chat's deltas as records of Ollama's: one for each piece of text, the last with counts and times."""

    def __init__(self, model: str, is_chat: bool, generation: Generation) -> None:
        self._model, self._is_chat, self._generation = model, is_chat, generation
        self._text = self._thinking = ""
        self._calls: dict[int, dict[str, str]] = {}  # by the chat's number
        self.whole: dict[str, Any] = {}

    def begin(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def take(self, delta: dict[str, Any], _logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
        text, thinking = delta.get("content") or "", delta.get("reasoning_content") or ""
        self._text += text
        self._thinking += thinking
        for call in delta.get("tool_calls") or ():
            known = self._calls.setdefault(call["index"], {"name": "", "arguments": ""})
            function = call.get("function") or {}
            known["name"] += function.get("name") or ""
            known["arguments"] += function.get("arguments") or ""
        return [self._record(text, thinking, ())] if text or thinking else []

    def end(
        self, finish_reason: str | None, _stop_reason: int | str | None, usage: Usage
    ) -> list[dict[str, Any]]:
        answer, now = self._generation.answers[0], time.monotonic()
        first = answer.first_token or now
        prompt_ns, answer_ns = int((first - answer.arrival) * 1e9), int((now - first) * 1e9)
        calls = [
            {"function": {"name": call["name"], "arguments": call_input(call["arguments"])}}
            for _, call in sorted(self._calls.items())
        ]
        before = [self._record("", "", calls)] if calls else []
        counts = {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage["completion_tokens"],
            "eval_duration": answer_ns,
        }
        self.whole = {**self._record(self._text, self._thinking, calls), **counts}
        return [*before, {**self._record("", "", ()), **counts}]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        return [{"error": str(error)}]

    def _record(self, text: str, thinking: str, calls: Sequence[Any]) -> dict[str, Any]:
        record: dict[str, Any] = {"model": self._model, "created_at": _now(), "done": False}
        if not self._is_chat:
            return {**record, "response": text, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {**record, "message": message}


def lines(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join([msgspec.json.encode(payload) + b"\n" for payload in payloads])


class LineStream(EventStream):
    """Lines of JSON. There is no comment in this format, so nothing is sent in silence."""

    media_type = "application/x-ndjson"
    keeps_alive = False


def _loaded(service: Service, name: str, empty: dict[str, Any]) -> Response:
    """To nothing at all: clients load a model so."""
    service.model_named(_plain(service, name))
    return JsonReply({"model": name, "created_at": _now(), **empty, "done": True, "done_reason": "load"})


def _now() -> str:
    return _moment(time.time())


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# ---------------------------------------------------------------------- models


def _served(service: Service) -> list[tuple[str, ServedModel]]:
    models: list[tuple[str, ServedModel]] = []
    if service.models.main.task == "generate":
        names = (*service.model.names, *service.client.adapters.names())
        models += [(name, service.model) for name in names]
    return models + [(encoder.names[0], encoder) for encoder in service.models.encoders]


def _listed(name: str, model: ServedModel) -> dict[str, Any]:
    size = model.ready.start.weights_bytes if model.is_started else 0
    return {
        "name": name,
        "model": name,
        "modified_at": _moment(model.created),
        "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details(model.task),
    }


def details(task: Task | None) -> dict[str, Any]:
    family = "encoder" if task == "embed" else "decoder"
    return {
        "parent_model": "", "format": "safetensors", "family": family, "families": [family],
        "parameter_size": "", "quantization_level": "",
    }  # fmt: skip


def _loaded_fields(model: ServedModel) -> dict[str, Any]:
    ready = model.ready
    return {
        "expires_at": _moment(time.time() + 10 * 365 * 86400),  # it stays
        "size_vram": ready.start.weights_bytes,
        "context_length": ready.max_model_len,
    }


def _shown(model: ServedModel) -> dict[str, Any]:
    info: dict[str, Any] = {"general.architecture": "quire"}
    template = ""
    if model.is_started:
        info["quire.context_length"] = model.ready.max_model_len
        template = str(model.ready.described.tokenizer_config.get("chat_template") or "")
    return {
        "modelfile": "", "parameters": "", "template": template, "license": "", "modified_at": _moment(model.created),
        **shown_in_short(model.task), "model_info": info,
    }  # fmt: skip


def shown_in_short(task: Task | None) -> dict[str, Any]:
    """What is known of a model that has not been started."""
    capabilities = ["embedding"] if task == "embed" else ["completion", "tools"]
    return {"details": details(task), "model_info": {}, "capabilities": capabilities}
