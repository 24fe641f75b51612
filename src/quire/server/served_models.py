"""ServedModels: the models of a server, each with an engine process of its own.

The main model and those named by --embedding-model start with the server; the built-in encoder starts when a request
first names it.
"""

import asyncio
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.core.config import EngineConfig, ModelOptions, Task
from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import QueueBounds
from quire.core.stats import VectorFormat
from quire.link.client import EngineClient
from quire.link.messages import Ready
from quire.observe.logs import get_logger
from quire.server.errors import ApiError, Unavailable
from quire.server.prompts import PromptMaker
from quire.server.settings import ServerSettings
from quire.weights.architectures import task_of
from quire.weights.builtin import (
    BUILTIN_ENCODER_NAME,
    BUILTIN_ENCODER_NAMES,
    BUILTIN_MODEL,
    is_builtin_encoder,
)

if TYPE_CHECKING:
    from quire.fleet.replicas import ReplicaSet
    from quire.link.relayed import RelayedEngine

log = get_logger(__name__)
OnProgress = Callable[[str, int, int], None]


class ServedModel:
    """One model: its task, its names, its engine process, its text side. Use it from one event loop."""

    def __init__(
        self,
        task: Task,
        client: "EngineClient | ReplicaSet",
        settings: ServerSettings,
        names: tuple[str, ...] = (),
    ) -> None:
        """Without `names` it goes by its own name, which its engine tells."""
        self.task = task
        self.names = names
        self.client = client
        self.created = int(time.time())
        self._settings = settings
        self._prompts: PromptMaker | None = None  # None: not started
        self._starting: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        task: Task,
        settings: ServerSettings,
        names: tuple[str, ...] = (),
        on_progress: OnProgress | None = None,
        relay: "Callable[[EngineClient], RelayedEngine] | None" = None,
        num_replicas: int | None = None,
    ) -> "ServedModel":
        """`relay` as in EngineClient. Each of several HTTP processes has its share of the queue."""
        count = settings.api_server_count
        bounds = QueueBounds(
            *(
                None if most is None else -(-most // count)
                for most in (settings.max_queue_requests, settings.max_queue_tokens)
            )
        )
        if num_replicas is not None:
            cluster = None
            if settings.data_parallel_backend == "ray":
                ray = importlib.import_module("quire.fleet.ray_cluster")
                cluster = ray.RayCluster(settings.ray_address, settings.data_parallel_rpc_port)
            replicas: type[ReplicaSet] = importlib.import_module("quire.fleet.replicas").ReplicaSet
            policy, timeout = settings.routing_policy, settings.engine_timeout
            several = replicas(
                config, bounds, on_progress, timeout, num_replicas, policy, settings.roles, cluster
            )
            return cls(task, several, settings, names)
        what = "engine" if task == "generate" else "embedding engine"
        client = EngineClient(config, bounds, on_progress, settings.engine_timeout, what, relay)
        return cls(task, client, settings, names)

    @property
    def is_started(self) -> bool:
        """Whether an engine was ready once; it may be down now."""
        return self._prompts is not None

    @property
    def prompts(self) -> PromptMaker:
        assert self._prompts is not None
        return self._prompts

    @property
    def ready(self) -> Ready:
        """What the engine's last start decided."""
        assert self.client.ready is not None
        return self.client.ready

    @property
    def vectors(self) -> VectorFormat:
        """What an encoder makes, once it is started."""
        assert self.ready.vectors is not None
        return self.ready.vectors

    def serves(self, path: str) -> bool:
        """Whether an endpoint of encoders may have it. Only the built-in one is asked before it is started."""
        return path in (self.vectors if self.is_started else VectorFormat(0, True)).paths

    async def start(self) -> None:
        """Returns when it can serve; concurrent calls wait for the same start. A failed start may be repeated."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start-model")
        await asyncio.shield(self._starting)  # a client that leaves must not end it for the others

    def serve(self, ready: Ready) -> None:
        """Makes the text side, when the engine is ready for the first time."""
        settings = self._settings
        formats = (settings.chat_template, settings.tool_call_parser, settings.reasoning_parser)
        self._prompts = PromptMaker(ready, *(formats if self.task == "generate" else ()))
        self.names = self.names or (ready.model,)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self.client.close()
        if self._prompts is not None:
            await self._prompts.close()

    async def _start(self) -> None:
        try:
            self.serve(await self.client.start())
        except QuireError:
            self._starting = None
            raise


class ServedModels:
    def __init__(
        self, settings: ServerSettings, main: ServedModel, config: EngineConfig | None = None
    ) -> None:
        """The encoders beside `main` run on the device and with the threads of `config`."""
        self.main = main
        self._settings = settings
        config = config or EngineConfig()
        self.config = config  # of the main one
        wanted = [
            BUILTIN_ENCODER_NAME if name == BUILTIN_MODEL else name for name in settings.embedding_models
        ]
        self.started_first = [main, *(self._beside(config, name) for name in dict.fromkeys(wanted))]
        self._lazy: list[ServedModel] = []
        if settings.embeddings and not self.knows(BUILTIN_ENCODER_NAME):
            self._lazy.append(self._beside(config, BUILTIN_ENCODER_NAME))

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        settings: ServerSettings,
        on_progress: OnProgress | None = None,
        relay: "Callable[[EngineClient], RelayedEngine] | None" = None,
    ) -> "ServedModels":
        """With the model that `config` names as the main one."""
        task, names = task_of(config.model.model, config.model.revision), settings.served_names
        if task == "embed":
            names = names or _known_as(config.model.model or BUILTIN_ENCODER_NAME)
        count = settings.data_parallel_size if settings.has_replicas else None
        main = ServedModel.of(config, task, settings, names, on_progress, relay, count)
        return cls(settings, main, config)

    @property
    def encoders(self) -> list[ServedModel]:
        return [model for model in (*self.started_first, *self._lazy) if model.task == "embed"]

    @property
    def engines(self) -> list[EngineClient]:
        """All that run, or should; the main model's are the first."""
        models = (self.main, *(model for model in self.encoders if model.is_started))
        clients = dict.fromkeys(model.client for model in models)
        return [engine for client in clients for engine in client.engines]

    def knows(self, name: str | None) -> bool:
        """Whether an encoder has this name."""
        return any(name in model.names for model in self.encoders)

    def encoder(self, name: str | None, path: str = "/v1/embeddings") -> ServedModel:
        """The encoder that a request names; if it names none, the first that `path` takes, a classifier if there is
        one."""
        if not self._settings.embeddings and self.main.task != "embed":
            raise ApiError(
                403, "embeddings are off: start the server without --no-embeddings and --api-server-count"
            )
        starting = [model for model in self.encoders if not model.is_started and model not in self._lazy]
        fitting = [model for model in self.encoders if model.serves(path)] or starting
        if name is None and fitting:
            return next((model for model in fitting if model.is_started and model.vectors.labels), fitting[0])
        for model in self.encoders:
            if name in model.names:
                return model
        missing = (
            f"the embedding model {name!r} does not exist" if name is not None else f"no model serves {path}"
        )
        raise ApiError(
            404,
            f"{missing}: this server has {self.listed()}; --embedding-model adds one",
            param="model",
            code="model_not_found",
        )

    def listed(self) -> str:
        """The encoders with their endpoints, for an error."""
        return ", ".join(
            f"{model.names[0]} ({', '.join(model.vectors.paths)})" if model.is_started else model.names[0]
            for model in self.encoders
        )

    async def started_encoder(self, name: str | None, path: str = "/v1/embeddings") -> ServedModel:
        """As `encoder`, started if need be."""
        model = self.encoder(name, path)
        if not model.is_started:
            if model in self._lazy:
                log.info("first request for %s: starting an embedding engine", model.names[0])
            try:
                await model.start()
            except QuireError as error:
                raise Unavailable(
                    f"the embedding model {model.names[0]} cannot be started: {error}", "engine_down"
                ) from None
            for line in model.ready.lines:
                log.info("%s", line)
        if not model.serves(path):
            paths = ", ".join(model.vectors.paths)
            raise InvalidRequest(
                f"{model.names[0]} {model.vectors.kind} and is served at {paths}, not at {path}: this server has "
                f"{self.listed()}; --embedding-model adds a model",
                "model",
            )
        return model

    async def start(self) -> None:
        """Starts the models of `started_first` together; raises why one cannot start."""
        await asyncio.gather(*(model.start() for model in self.started_first))

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in (*self.started_first, *self._lazy)))

    def _beside(self, config: EngineConfig, name: str) -> ServedModel:
        """Another model than the one that `config` names, on the same device."""
        own = replace(
            EngineConfig(), model=ModelOptions(model=name, seed=config.model.seed), runner=config.runner
        )
        return ServedModel.of(own, "embed", self._settings, _known_as(name))


def _known_as(name: str) -> tuple[str, ...]:
    """The built-in model has several names; a folder goes by its last part too, as other models do."""
    if is_builtin_encoder(name):
        return BUILTIN_ENCODER_NAMES
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return (name.rstrip("/").rpartition("/")[2], name) if is_path else (name,)
