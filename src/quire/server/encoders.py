"""Encoders: the embedding models of a server, each an engine process of its own.

Models named by --embedding-model start with the server; the built-in one starts when a request first names it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from quire.core.config import EngineConfig, ModelOptions
from quire.core.errors import QuireError
from quire.core.request import QueueBounds
from quire.link.client import EngineClient
from quire.link.messages import Ready
from quire.observe.logs import get_logger
from quire.server.errors import ApiError, Unavailable
from quire.server.prompts import TextThreads
from quire.server.settings import ServerSettings
from quire.text.tokenizer import Tokenizer
from quire.weights.builtin import BUILTIN_ENCODER_NAME, BUILTIN_ENCODER_NAMES, is_builtin_encoder

log = get_logger(__name__)
OnProgress = Callable[[str, int, int], None]
BUILTIN = "builtin"  # what --embedding-model calls it


class ServedEncoder:
    """One embedding model: its names, its process, its tokenizer. Started once, by the first request that needs it."""

    def __init__(
        self,
        names: Iterable[str],
        config: EngineConfig,
        settings: ServerSettings,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.threads = TextThreads()
        bounds = QueueBounds(settings.max_queue_requests, settings.max_queue_tokens)
        self.client = EngineClient(config, bounds, on_progress, settings.engine_timeout, "embedding engine")
        self._starting: asyncio.Task[Ready] | None = None

    @property
    def ready(self) -> Ready | None:
        """What the engine decided; None before its first start."""
        return self.client.ready

    async def start(self) -> Ready:
        """Returns when it can serve; concurrent calls wait for the same start. A failed start may be repeated."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name=f"start-{self.names[0]}")
        return await asyncio.shield(self._starting)  # a client that leaves must not end it for the others

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self.client.close()

    async def _start(self) -> Ready:
        try:
            ready = await self.client.start()
        except QuireError:
            self._starting = None
            raise
        described = ready.described
        if described.tokenizer_json is not None:
            self.tokenizer = Tokenizer(described.tokenizer_json, described.tokenizer_config)
        for line in ready.lines:
            log.info("%s", line)
        return ready


class Encoders:
    """Use it from one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        config: EngineConfig | None = None,
        is_main: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`config` is the generating engine's, whose device and threads are used; or, with `is_main`, the config of an
        encoder that is all that this server serves."""
        self._settings = settings
        config = config or EngineConfig()
        self.main: ServedEncoder | None = None
        if is_main:
            self.main = ServedEncoder(_names(config, settings), config, settings, on_progress)
        wanted = [BUILTIN_ENCODER_NAME if name == BUILTIN else name for name in settings.embedding_models]
        self._asked = [self._beside(config, name) for name in dict.fromkeys(wanted)]
        self._lazy: list[ServedEncoder] = []
        if settings.embeddings and not any(
            BUILTIN_ENCODER_NAME in encoder.names for encoder in self.started_first
        ):
            self._lazy.append(self._beside(config, BUILTIN_ENCODER_NAME))

    @property
    def started_first(self) -> list[ServedEncoder]:
        """The models that start before the server reports that it serves."""
        return [*([self.main] if self.main is not None else []), *self._asked]

    @property
    def all(self) -> list[ServedEncoder]:
        return [*self.started_first, *self._lazy]

    @property
    def clients(self) -> list[EngineClient]:
        """Of the models that run, or should."""
        return [one.client for one in self.all if one.ready is not None]

    async def named(self, name: str | None) -> ServedEncoder:
        """The model that a request names, started if need be; the first, if it names none."""
        encoder = self.find(name)
        if encoder.ready is None:
            if encoder in self._lazy:
                log.info("first request for %s: starting an embedding engine", encoder.names[0])
            try:
                await encoder.start()
            except QuireError as error:
                raise Unavailable(
                    f"the embedding model {encoder.names[0]} cannot be started: {error}", "engine_down"
                ) from None
        return encoder

    def find(self, name: str | None) -> ServedEncoder:
        if not self._settings.embeddings and self.main is None:
            raise ApiError(403, "embeddings are off: start the server without --no-embeddings")
        for encoder in self.all:
            if name is None or name in encoder.names:
                return encoder
        raise ApiError(
            404,
            f"the embedding model {name!r} does not exist: this server has "
            f"{', '.join(encoder.names[0] for encoder in self.all)}; --embedding-model adds one",
            param="model",
            code="model_not_found",
        )

    def knows(self, name: str | None) -> bool:
        return any(name in one.names for one in self.all)

    async def start(self) -> None:
        """Starts the models of `started_first` together; raises why one cannot start."""
        await asyncio.gather(*(one.start() for one in self.started_first))

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.all))

    def _beside(self, config: EngineConfig, name: str) -> ServedEncoder:
        """Another model than the one that `config` names, on the same device."""
        own = replace(
            EngineConfig(), model=ModelOptions(model=name, seed=config.model.seed), runner=config.runner
        )
        return ServedEncoder(_known_as(name), own, self._settings)


def _names(config: EngineConfig, settings: ServerSettings) -> tuple[str, ...]:
    return settings.served_names or _known_as(config.model.model or BUILTIN_ENCODER_NAME)


def _known_as(name: str) -> tuple[str, ...]:
    """The built-in model has several names; a folder goes by its last part too, as other models do."""
    if is_builtin_encoder(name):
        return BUILTIN_ENCODER_NAMES
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return (name.rstrip("/").rpartition("/")[2], name) if is_path else (name,)
