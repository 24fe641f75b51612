"""ServerSettings: everything about serving that is not about the engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from ssl import PROTOCOL_TLS_SERVER, SSLContext

from quire.core.config import setting
from quire.core.errors import ConfigError
from quire.text.reader import choose_formats
from quire.text.reasoning import REASONING_PARSERS
from quire.text.tool_formats import TOOL_PARSERS

PER_KEY = ("max_concurrent_per_key", "max_requests_per_minute_per_key", "max_tokens_per_minute_per_key")
BOUNDS = ("max_body_bytes", "max_file_bytes", "max_header_bytes", "max_queue_requests", "max_queue_tokens")
MAX_PROCESSES = 64
SWITCH = {"action": "store_true"}  # a flag that has no --no- form


def _formats(what: str, parsers: Iterable[str]) -> str:
    return f"format of {what}: {', '.join(parsers)} or none (default: detected from the chat template)"


def _separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Fields with a help text are flags of `quire serve`."""

    host: str = setting(
        "127.0.0.1", "address to listen on (default: 127.0.0.1, this machine only)", metavar="HOST"
    )
    port: int = setting(8000, "port, 0 for any free one")
    api_server_count: int = setting(
        1, "HTTP processes on the port, for one engine; more than one store no files and responses"
    )
    root_path: str = setting("", "path prefix that a proxy adds", metavar="PATH")
    ssl_certfile: str | None = setting(None, "certificate, to serve HTTPS", metavar="FILE")
    ssl_keyfile: str | None = setting(None, "private key of the certificate", metavar="FILE")
    sse_keep_alive: float = setting(
        15, "seconds of silence before a stream gets a comment (default: 15; 0: never)"
    )
    page: bool = setting(True, "no page for browsers at /", "--no-page", action="store_false")
    allowed_origins: tuple[str, ...] = setting(
        (), "CORS: allow browsers from this origin, or * for all (repeatable)", metavar="ORIGIN"
    )
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    # none: operators' calls are off
    admin_key: str | None = setting(None, "key of the admin endpoints (also: QUIRE_ADMIN_KEY)", metavar="KEY")
    max_concurrent_per_key: int | None = setting(None, "requests of one key at a time (default: no limit)")
    max_requests_per_minute_per_key: int | None = setting(
        None, "requests of one key per minute (default: no limit)"
    )
    max_tokens_per_minute_per_key: int | None = setting(
        None, "tokens of one key per minute (default: no limit)"
    )  # prompt and answer together
    isolate_keys: bool = setting(False, "keys do not share cached prefixes", **SWITCH)
    max_queue_requests: int | None = setting(1024, "requests that may wait")  # None: no bound
    max_queue_tokens: int | None = setting(1 << 20, "prompt tokens that may wait")
    max_body_bytes: int = setting(
        16 << 20, "maximum size of a request body (default: 16MiB)", metavar="BYTES"
    )
    header_timeout: float = setting(20, "seconds for a request's headers to arrive")
    body_timeout: float = setting(30, "seconds in which a request's body must make progress")
    request_timeout: float | None = setting(None, "seconds for one request (default: no limit)")
    engine_timeout: float = setting(300, "seconds for one engine step; the engine is restarted after that")
    max_stored_responses: int = setting(
        1000, "responses, chat completions (store: true) and conversations kept in memory"
    )  # 0 keeps none
    max_stored_responses_bytes: int = setting(
        256 << 20, "maximum size of all of these (default: 256MiB)", metavar="BYTES"
    )
    max_stored_responses_seconds: float = setting(
        30 * 86400.0, "seconds for which they are kept unused (default: 30 days)"
    )
    shutdown_timeout: float = setting(25, "seconds to finish running requests after SIGTERM")
    max_header_bytes: int = setting(
        64 << 10,
        "maximum size of a request's headers (default: 64KiB)",
        *("--max-header-bytes", "--h11-max-incomplete-event-size"),
        metavar="BYTES",
    )
    chat_template: str | None = None
    trust_request_chat_template: bool = setting(False, "accept chat templates in requests", **SWITCH)
    tool_call_parser: str | None = setting(None, _formats("tool calls", TOOL_PARSERS), metavar="NAME")
    reasoning_parser: str | None = setting(None, _formats("reasoning", REASONING_PARSERS), metavar="NAME")
    served_names: tuple[str, ...] = setting(
        (),
        "names of the model in the API; answers report the first, /v1/models lists all",
        "--served-model-name",
        nargs="+",
        metavar="NAME",
    )  # none: the model's own name
    model_aliases: tuple[str, ...] = setting(
        (),
        "another name for the model, or for an embedding model or adapter; not listed (repeatable)",
        "--model-alias",
        metavar="NAME[=MODEL]",
    )
    any_model_name: bool = setting(
        False, "accept every name: an unknown one means the model, or the first embedding model", **SWITCH
    )
    keep_alive: float | None = None  # seconds without a request after which the server ends
    embeddings: bool = True  # False: only an encoder that is the main model embeds
    embedding_models: tuple[str, ...] = setting(
        (),
        "also serve this embedding model, classifier or reranker: builtin, a folder or a hub id (repeatable; "
        "default: the built-in one, started by the first request for it)",
        *("--embedding-model", "--encoder-model"),
        metavar="MODEL",
    )
    embedding_truncate: bool = setting(
        False, "cut texts that are longer than the embedding model takes (default: refuse them)", **SWITCH
    )  # unless a request says how
    data_dir: str | None = setting(
        None,
        "folder of files, vector stores and batches, or none (default: `data` in the cache folder)",
        metavar="FOLDER",
    )
    train_share: float = setting(0.5, "share of the cores that a fine-tuning job may use")
    vector_store: str | None = setting(
        None,
        "keep the indexes of vector stores in a Qdrant server, qdrant://HOST:6333 (default: in the data folder)",
        metavar="URL",
    )
    max_file_bytes: int = setting(
        512 << 20, "maximum size of an uploaded file (default: 512MiB)", metavar="BYTES"
    )  # and of a part of one
    data_parallel_size: int = setting(
        1,
        "replicas: engines that serve the model, each on its own GPU or with its share of the cores",
        *("--data-parallel-size", "-dp"),
    )
    data_parallel_backend: str = setting(
        "mp",
        "mp: on this machine; ray: on the machines of a Ray cluster",
        *("--data-parallel-backend", "-dpb"),
        metavar="NAME",
    )
    ray_address: str | None = setting(
        None, "head of the Ray cluster (default: the cluster of this machine)", metavar="HOST:PORT"
    )
    data_parallel_rpc_port: int = setting(
        0,
        "with ray: port for the first engine's connection; others take the next ones (default: any free ones)",
        metavar="PORT",
    )
    roles: tuple[str, ...] = setting(
        (),
        "role of each replica: prefill computes prompts, decode the answers, both does both",
        metavar="ROLE,…",
        type=_separated,
    )
    routing_policy: str = setting(
        "prefix-work",
        "which replica gets a request: prefix-work, least-work, least-requests or round-robin",
        metavar="NAME",
    )
    log_requests: bool = setting(False, "log one line for each request", **SWITCH)
    otlp_traces_endpoint: str | None = setting(
        None, "send OpenTelemetry traces to this URL (needs the extra `otel`)", metavar="URL"
    )

    @property
    def aliases(self) -> dict[str, str | None]:
        """The name that each alias stands for; None: the model's own."""
        pairs = [alias.partition("=") for alias in self.model_aliases]
        return {name.strip(): target.strip() or None for name, _, target in pairs}

    @property
    def has_replicas(self) -> bool:
        return self.data_parallel_size != 1 or self.data_parallel_backend == "ray"

    @property
    def keeps_files(self) -> bool:
        return self.data_dir != "none" and self.api_server_count == 1

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host is empty: give an address such as 127.0.0.1, or 0.0.0.0 for any network")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is outside 0 to 65535 (0: any free one)")
        if self.api_server_count != 1:
            self._check_processes()
        count = self.data_parallel_size
        if self.data_parallel_backend not in ("mp", "ray"):
            raise ConfigError(f"data_parallel_backend={self.data_parallel_backend!r}: choose mp or ray")
        if self.data_parallel_backend == "mp" and (self.ray_address or self.data_parallel_rpc_port):
            raise ConfigError("ray_address and data_parallel_rpc_port need data_parallel_backend=ray")
        first, last = self.data_parallel_rpc_port, 65536 - count
        if not 0 <= first <= last:
            raise ConfigError(f"data_parallel_rpc_port={first} is outside 0 to {last} (0: any free ones)")
        if self.roles and (count == 1 or len(self.roles) != count or set(self.roles) == {"prefill"}):
            raise ConfigError(
                f"roles={','.join(self.roles)} and data_parallel_size={count}: name a role, prefill, decode or both, "
                "for each of two or more replicas, and not prefill for all of them"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both files: give ssl_certfile and ssl_keyfile")
        if self.ssl_certfile is not None:
            try:
                SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except OSError as error:
                pair = f"ssl_certfile={self.ssl_certfile!r} and ssl_keyfile={self.ssl_keyfile!r}"
                raise ConfigError(f"{pair}: {error}: give a certificate and its key as PEM files") from error
        if self.root_path[:1] not in ("", "/"):
            raise ConfigError(f"root_path={self.root_path!r} begins with no slash: give /{self.root_path}")
        if self.vector_store is not None and not self.vector_store.startswith(("qdrant://", "qdrants://")):
            raise ConfigError(
                f"vector_store={self.vector_store!r}: write qdrant://HOST:6333, or qdrants:// for TLS"
            )
        choose_formats(None, self.tool_call_parser, self.reasoning_parser)
        if not all(self.aliases) or not all(self.served_names):
            raise ConfigError("served_model_name or model_alias is empty: give a name")
        for name in (*PER_KEY, *BOUNDS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.sse_keep_alive < 0:
            raise ConfigError(f"sse_keep_alive={self.sse_keep_alive} must not be negative (0: no comments)")
        if self.keep_alive is not None and self.keep_alive <= 0:
            raise ConfigError(f"keep_alive={self.keep_alive:g} must be more than 0 seconds (-1: never ends)")
        for name in ("engine_timeout", "header_timeout", "body_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0 seconds")
        for name in ("max_stored_responses", "max_stored_responses_bytes", "max_stored_responses_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative (0 keeps none)")
        if self.embedding_models and not self.embeddings:
            raise ConfigError("embedding_model and no_embeddings contradict each other: give one of them")
        if not 0 < self.train_share <= 1:
            raise ConfigError(f"train_share={self.train_share} must be above 0 and at most 1")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must not be negative")
        for name in ("isolate_keys", *PER_KEY):
            if getattr(self, name) and not self.api_keys:
                raise ConfigError(f"{name} needs API keys: give api_key or api_key_file")

    def _check_processes(self) -> None:
        """Several HTTP processes share the engine and its adapters, and nothing that is kept beside it."""
        count = self.api_server_count
        if not 1 <= count <= MAX_PROCESSES:
            raise ConfigError(f"api_server_count={count} is outside 1 to {MAX_PROCESSES}")
        if self.has_replicas:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} needs one HTTP process, which knows what each replica "
                f"has to do, and api_server_count={count}: leave one out, or start several servers behind quire route"
            )
        for name in (*PER_KEY, "keep_alive"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is counted in one process and api_server_count={count}: leave one of them out"
                )
        if self.max_stored_responses:
            raise ConfigError(
                f"max_stored_responses={self.max_stored_responses} are kept in one process and "
                f"api_server_count={count}: set it to 0, or use one process"
            )
        if self.data_dir not in (None, "none"):
            raise ConfigError(
                f"data_dir={self.data_dir!r} needs one process and api_server_count={count}: leave one of them out"
            )
        if self.embeddings:
            raise ConfigError(
                f"embeddings beside a generating model need one process and api_server_count={count}: give "
                "no_embeddings, or serve the embedding model as the main one"
            )
