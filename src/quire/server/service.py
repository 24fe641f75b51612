"""Service: what endpoints share. The engines' clients, the served model's text side, settings and counters."""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ContextExceeded, EngineDead, InvalidRequest, QueueFull
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.stats import VectorFormat
from quire.link.client import EngineClient
from quire.link.messages import Ready
from quire.observe.heap import FreedMemory
from quire.server.access import RequestContext, context_of
from quire.server.connection import TextLimit
from quire.server.errors import ApiError, Unavailable, as_api_error, context_exceeded
from quire.server.generation import Generation
from quire.server.metrics import Metrics
from quire.server.protocol.base import SamplingFields
from quire.server.retrieval import LazyRetrieval
from quire.server.served_models import OnProgress, ServedModel, ServedModels
from quire.server.settings import ServerSettings
from quire.server.stored import ObjectStore
from quire.server.traces import open_traces
from quire.text.prompts import PreparedPrompt

if TYPE_CHECKING:
    from quire.fleet.replicas import ReplicaSet
    from quire.link.relayed import RelayedEngine

PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
# Engines that failed in a row; then /health says 503, so that an orchestrator replaces the server.
SICK_AFTER = 5


class Service:
    def __init__(self, models: ServedModels, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.metrics = Metrics()
        self.store = ObjectStore(
            settings.max_stored_responses,
            settings.max_stored_responses_bytes,
            settings.max_stored_responses_seconds,
            self.metrics.registry,
        )
        self.traces = open_traces(settings.otlp_traces_endpoint)
        self.retrieval = LazyRetrieval(self)
        self.draining = False
        self.freed = FreedMemory()
        self._aliases = settings.aliases

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        settings: ServerSettings,
        on_progress: OnProgress | None = None,
        relay: "Callable[[EngineClient], RelayedEngine] | None" = None,
    ) -> "Service":
        """The service of the model that `config` names, for its task; `relay` as in EngineClient."""
        return cls(ServedModels.of(config, settings, on_progress, relay), settings)

    async def start(self) -> None:
        """Returns when all engines can serve; raises why one cannot."""
        await self.models.start()
        for alias, target in self._aliases.items():
            if target is not None and not self._serves(target):
                raise ConfigError(
                    f"--model-alias {alias}={target}: there is no model {target!r} here: this server has "
                    f"{', '.join(self.names)}"
                )
        await self.retrieval.resume()

    async def close(self) -> None:
        """After the last request: ends the engines and template workers, and sends the last traces."""
        await self.retrieval.close()
        await self.models.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    @property
    def main(self) -> "EngineClient | ReplicaSet":
        """The engine that the server was started for."""
        return self.models.main.client

    @property
    def client(self) -> "EngineClient | ReplicaSet":
        """The generating engine's."""
        main = self.models.main
        if main.task != "generate":
            raise ApiError(
                400,
                f"this server has only {main.names[0]}, which {_use(main)}",
                param="model",
            )
        return main.client

    @property
    def model(self) -> ServedModel:
        """The generating model, once it is started."""
        client = self.client
        if not self.models.main.is_started:
            raise Unavailable(f"{client.status}: try again in some seconds", "starting")
        return self.models.main

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models that the server was started for, the main one's first; adapters are not among them."""
        main = self.models.main
        own = main.names if main.task == "generate" else ()
        return (*own, *(encoder.names[0] for encoder in self.models.encoders))

    def known_name(self, name: str | None) -> str | None:
        """The served name that a request's name stands for; None where it names none, or any will do.

        An alias never hides a model of that name. A name that stands for nothing is returned as it is.
        """
        if name is None or self._serves(name):
            return name
        if name in self._aliases:
            return self._aliases[name] or self.names[0]
        return None if self.settings.any_model_name else name

    def _serves(self, name: str) -> bool:
        main = self.models.main
        if main.task == "generate" and (name in main.names or main.client.adapters.knows(name)):
            return True
        return self.models.knows(name)

    def model_named(self, name: str | None) -> ServedModel:
        """The model that a request names; any, if it names none."""
        model, name = self.model, self.known_name(name)
        if name is not None and name not in model.names and not self.client.adapters.knows(name):
            if self.models.knows(name):
                raise InvalidRequest(f"{name} {_use(self.models.encoder(name))}", "model")
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {', '.join(self.names)}; --model-alias adds "
                "a name, and --any-model-name accepts every one",
                param="model",
                code="model_not_found",
            )
        return model

    def adapter_named(self, name: str | None) -> str | None:
        """The adapter that a request names instead of the model, if it does."""
        name = self.known_name(name)
        return None if name is None or name in self.model.names else name

    def answer_name(self, name: str | None) -> str:
        """What an answer calls the model that a request named: the first of its names, or the adapter's."""
        return self.adapter_named(name) or self.model.names[0]

    async def encoder_named(self, name: str | None, path: str) -> ServedModel:
        """The encoder that a request of `path` names, started if need be."""
        name, main = self.known_name(name), self.models.main
        if main.task == "generate" and name in main.names:
            raise InvalidRequest(
                f"{name} generates text and is not served at {path}: name a model that is, such as "
                f"{self.models.encoder(None, path).names[0]}",
                "model",
            )
        return await self.models.started_encoder(name, path)

    @property
    def is_ready(self) -> bool:
        return self.models.main.is_started and self.main.is_ready and not self.draining

    @property
    def is_sick(self) -> bool:
        return not self.main.is_ready and self.main.num_failures >= SICK_AFTER

    @property
    def seconds_left(self) -> float | None:
        """Until the server ends for want of requests; None without `keep_alive`."""
        limit = self.settings.keep_alive
        if limit is None or any(engine.has_work for engine in self.models.engines):
            return limit
        return max(0.0, limit - (time.monotonic() - self.metrics.last_used))

    @property
    def status(self) -> str:
        return "shutting down" if self.draining else self.main.status

    # ------------------------------------------------------------------ generating

    def text_limit(self, path: str) -> TextLimit | None:
        """For a body that is sent to this path; None where there is no limit, or not yet."""
        main, param = self.models.main, PROMPT_FIELDS.get(path)
        longest = main.prompts.longest_prompt if param is not None and main.is_started else None
        if param is None or longest is None or main.task != "generate":
            return None
        max_characters, num_tokens = longest
        error = context_exceeded(num_tokens, None, main.ready.max_model_len, param)
        return TextLimit(max_characters, error.renamed({"prompt": param}))

    def check_room(
        self,
        engine: "EngineClient | ReplicaSet | None" = None,
        num_prompts: int = 1,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Refuses before any work is done, where that is certain already; `engine` is the generating one by default."""
        self.refuse_if_draining()
        if sampling is not None:
            self.model.ready.limits.check_sampling(sampling)
        num_sequences = sampling.num_sequences if sampling is not None else 1
        try:
            (engine or self.client).check_room(num_prompts, num_sequences)
        except (EngineDead, QueueFull) as refusal:
            raise self.refusal(refusal, engine) from None

    def generate(
        self,
        request: HttpRequest,
        body: SamplingFields,
        prompts: list[PreparedPrompt],
        sampling: SamplingParams,
        kind: str,
        kept_ids: frozenset[int] = frozenset(),
    ) -> tuple[str, Generation]:
        """Submits one request per prompt; the answer's id, and the answers as they grow.

        `sampling` is ready to sample: it has the token ids of its bad words.

        Special tokens with `kept_ids` stay in the text.
        """
        self.refuse_if_draining()
        context = context_of(request)
        response_id = f"{kind}-{uuid.uuid4().hex}"
        model = self.model
        sampling = _within(sampling, model.ready)
        keep = body.truncate_prompt_tokens
        fitted = [model.prompts.fitted(prompt, keep, sampling.max_tokens) for prompt in prompts]
        requests = [
            Request(
                request_id=response_id if len(fitted) == 1 else f"{response_id}-{position}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                priority=body.priority or 0,
                cache_salt=self._salt(context, body.cache_salt),
                tenant=context.key or body.user or "",
                adapter=self.adapter_named(body.model),
            )
            for position, prompt in enumerate(fitted)
        ]
        _check_limits(model.ready, requests, "messages" if kind == "chatcmpl" else "prompt")
        num_tokens = sum(len(prompt.token_ids) for prompt in fitted)
        self.check_allowance(context, num_tokens)
        try:
            generation = Generation(
                self.client, self.metrics, model.prompts.tokenizer, context, fitted, requests, kept_ids
            )
        except (EngineDead, QueueFull) as refusal:
            raise self.refusal(refusal) from None
        context.allowance.spend_tokens(num_tokens)
        generation.limit(request.receive, self.settings.request_timeout)
        context.facts.update(id=response_id, model=self.answer_name(body.model))
        return response_id, generation

    def check_allowance(self, context: RequestContext, num_tokens: int) -> None:
        try:
            context.allowance.check_tokens(num_tokens)
        except ApiError:
            self.metrics.refused("rate_limit")
            raise

    def refuse_if_draining(self) -> None:
        if self.draining:
            self.metrics.refused("draining")
            raise Unavailable("the server is shutting down: ask another one", "shutting_down")

    def _salt(self, context: RequestContext, requested: str | None) -> str:
        return f"{context.key}\0{requested or ''}" if self.settings.isolate_keys else requested or ""

    def refusal(
        self, refusal: EngineDead | QueueFull, engine: "EngineClient | ReplicaSet | None" = None
    ) -> ApiError:
        """The error for a request that `engine` (the generating one by default) does not take now."""
        if isinstance(refusal, QueueFull):
            self.metrics.refused("queue_full")
            return as_api_error(refusal, (engine or self.client).admission.retry_seconds())
        self.metrics.refused("engine_down")
        return Unavailable(str(refusal), "engine_down")


def _use(encoder: ServedModel) -> str:
    vectors = encoder.vectors if encoder.is_started else VectorFormat(0, True)
    return f"{vectors.kind} and no text: use {', '.join(vectors.paths)}"


def _check_limits(ready: Ready, requests: list[Request], what: str) -> None:
    """Refuses here what the engine would refuse by the same limits; `what` is what OpenAI's API calls a prompt."""
    for request in requests:
        try:
            ready.limits.check(request)
        except ContextExceeded:
            num_tokens, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
            raise context_exceeded(num_tokens, max_tokens, ready.max_model_len, what) from None


def _within(sampling: SamplingParams, ready: Ready) -> SamplingParams:
    """Numbers beyond what the model has mean the same as its limits, and fit the engine's columns."""
    max_tokens = sampling.max_tokens
    return sampling.changed(
        top_k=min(sampling.top_k, ready.vocab_size),
        max_tokens=None if max_tokens is None else min(max_tokens, ready.max_model_len),
    )
