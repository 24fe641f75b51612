"""Service: what endpoints share. The engine's client, the served model's text side, settings and counters."""

import time
import uuid
from dataclasses import dataclass

from starlette.requests import Request

from quire.core.errors import EngineDead, InvalidRequest, QueueFull
from quire.core.sampling import SamplingParams
from quire.link.admission import Ask
from quire.link.client import EngineClient
from quire.link.messages import Ready
from quire.llm.prompts import PreparedPrompt, ready_to_sample
from quire.server.caller import Caller, caller_of
from quire.server.errors import ApiError, Unavailable, as_api_error
from quire.server.generation import Generation
from quire.server.metrics import Metrics
from quire.server.prompts import PromptMaker
from quire.server.protocol.sampling import SamplingFields
from quire.server.settings import ServerSettings

SICK_AFTER = 5  # engines that failed in a row: then someone else should look at this machine


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    created: int
    ready: Ready
    prompts: PromptMaker


class Service:
    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        self.client = client
        self.settings = settings
        self.metrics = Metrics()
        self.draining = False
        self._model: ServedModel | None = None

    def introduce(self, ready: Ready) -> None:
        """The engine is ready for the first time: from now on there is a model to serve."""
        prompts = PromptMaker(ready, self.settings.chat_template)
        names = self.settings.served_names or (ready.model,)
        self._model = ServedModel(names, int(time.time()), ready, prompts)

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise Unavailable(f"{self.client.status}: try again in some seconds", "starting")
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """The model that a request names; any, if it names none."""
        model = self.model
        if name is not None and name not in model.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {', '.join(model.names)}",
                param="model",
                code="model_not_found",
            )
        return model

    @property
    def is_ready(self) -> bool:
        return self._model is not None and self.client.is_ready and not self.draining

    @property
    def is_sick(self) -> bool:
        return not self.client.is_ready and self.client.num_failures >= SICK_AFTER

    @property
    def status(self) -> str:
        return "shutting down" if self.draining else self.client.status

    # ------------------------------------------------------------------ generating

    def check_room(self) -> None:
        """Refuses before any work is done, where that is certain already."""
        self._refuse_if_draining()
        try:
            self.client.check_room()
        except (EngineDead, QueueFull) as refusal:
            raise self._refusal(refusal) from None

    def generate(
        self,
        request: Request,
        body: SamplingFields,
        prompts: list[PreparedPrompt],
        sampling: SamplingParams,
        kind: str,
    ) -> tuple[str, Generation]:
        """Submits one request per prompt; the answer's id, and the answers as they grow."""
        self._refuse_if_draining()
        caller = caller_of(request)
        response_id = f"{kind}-{uuid.uuid4().hex}"
        model = self.model
        sampling = _within(ready_to_sample(sampling, model.prompts.tokenizer), model.ready)
        fitted = [self._fitted(model, prompt, body, sampling) for prompt in prompts]
        asks = [
            Ask(
                request_id=response_id if len(fitted) == 1 else f"{response_id}-{position}",
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                priority=body.priority or 0,
                cache_salt=self._salt(caller, body.cache_salt),
            )
            for position, prompt in enumerate(fitted)
        ]
        try:
            generation = Generation(self.client, self.metrics, model.prompts.tokenizer, caller, fitted, asks)
        except (EngineDead, QueueFull) as refusal:
            raise self._refusal(refusal) from None
        generation.limit(request.receive, self.settings.request_timeout)
        caller.facts["id"] = response_id
        return response_id, generation

    def _fitted(
        self, model: ServedModel, prompt: PreparedPrompt, body: SamplingFields, sampling: SamplingParams
    ) -> PreparedPrompt:
        token_ids = model.prompts.fitted(prompt, body.truncate_prompt_tokens, sampling.max_tokens)
        if len(token_ids) == len(prompt.token_ids):
            return prompt
        return PreparedPrompt(None, token_ids)  # its text is no longer what the caller sent

    def _refuse_if_draining(self) -> None:
        if self.draining:
            self.metrics.refused("draining")
            raise Unavailable("the server is shutting down: ask another one", "shutting_down")

    def _salt(self, caller: Caller, asked: str | None) -> str:
        return f"{caller.key}\0{asked or ''}" if self.settings.isolate_keys else asked or ""

    def _refusal(self, refusal: EngineDead | QueueFull) -> ApiError:
        if isinstance(refusal, QueueFull):
            self.metrics.refused("queue_full")
            return as_api_error(refusal, self.client.admission.retry_seconds())
        self.metrics.refused("engine_down")
        return Unavailable(str(refusal), "engine_down")


def _within(sampling: SamplingParams, ready: Ready) -> SamplingParams:
    """Numbers beyond what the model has mean the same as its limits, and fit the engine's columns."""
    if sampling.min_tokens >= ready.max_model_len:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} can never be reached in a context of {ready.max_model_len}: lower it",
            "min_tokens",
        )
    max_tokens = sampling.max_tokens
    return sampling.changed(
        top_k=min(sampling.top_k, ready.vocab_size),
        max_tokens=None if max_tokens is None else min(max_tokens, ready.max_model_len),
    )
