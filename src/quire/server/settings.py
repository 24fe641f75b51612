"""ServerSettings: everything about serving that is not about the engine."""

from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.text.reader import choose_formats

_PER_KEY = ("max_concurrent_per_key", "max_requests_per_minute_per_key", "max_tokens_per_minute_per_key")
MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""
    api_server_count: int = 1  # HTTP processes
    data_parallel_size: int = 1  # engines that serve the main model
    roles: tuple[str, ...] = ()  # of each of them, where some compute prompts for others
    routing_policy: str = "prefix-work"  # which of them gets a request
    data_parallel_backend: str = "mp"  # who starts them: mp, this process; ray, a Ray cluster
    data_parallel_rpc_port: int = 0  # of the first one's link with Ray, the others' follow; 0: any free ones
    ray_address: str | None = None  # None: the cluster that this machine belongs to
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    admin_key: str | None = None  # none: operators' calls are off
    max_concurrent_per_key: int | None = None
    max_requests_per_minute_per_key: int | None = None
    max_tokens_per_minute_per_key: int | None = None  # prompt and answer together
    isolate_keys: bool = False  # keys share no cached prefixes
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    header_timeout: float = 20.0  # seconds for the headers of a request to be complete
    body_timeout: float = 30.0  # seconds in which a body must make some progress
    request_timeout: float | None = None  # seconds
    sse_keep_alive: float = 15.0  # seconds of silence on a stream before a comment is sent; 0: never
    shutdown_timeout: float = 25.0
    keep_alive: float | None = None  # seconds without a request after which the server ends
    engine_timeout: float = 300.0  # for one step; then the engine hangs, and is replaced
    log_requests: bool = False
    page: bool = True  # for browsers, at `/`
    otlp_traces_endpoint: str | None = None  # none: no traces
    max_queue_requests: int | None = 1024  # None: no bound
    max_queue_tokens: int | None = 1 << 20
    served_names: tuple[str, ...] = ()  # none: the model's own name; answers report the first
    model_aliases: tuple[str, ...] = ()  # NAME for the model, NAME=MODEL for another one; not listed
    any_model_name: bool = False  # an unknown name means the model, or the first embedding model
    embeddings: bool = True  # False: only an encoder that is the main model embeds
    embedding_truncate: bool = False  # texts longer than an encoder takes are cut, unless a request says how
    embedding_models: tuple[str, ...] = ()  # started with the server, not when asked for
    data_dir: str | None = None  # of files and stores; None: in the cache folder; "none": there are none
    train_share: float = 0.5  # of the cores, for a fine-tuning job
    vector_store: str | None = None  # address of the indexes' server; None: in data_dir
    max_file_bytes: int = 512 << 20  # of an uploaded file, and of a part of one
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None  # none: as the chat template shows
    reasoning_parser: str | None = None  # likewise
    max_stored_responses: int = 1000  # with chat completions and conversations, in memory; 0 keeps none
    max_stored_responses_bytes: int = 256 << 20
    max_stored_responses_seconds: float = 30 * 86400.0  # since they were last used

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
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is outside 0 to 65535 (0: any free one)")
        if self.api_server_count != 1:
            self._check_processes()
        count = self.data_parallel_size
        if self.data_parallel_backend not in ("mp", "ray"):
            raise ConfigError(f"data_parallel_backend={self.data_parallel_backend!r}: choose mp or ray")
        if self.data_parallel_backend == "mp" and (self.ray_address or self.data_parallel_rpc_port):
            raise ConfigError("ray_address and data_parallel_rpc_port need data_parallel_backend=ray")
        if not 0 <= self.data_parallel_rpc_port <= 65536 - count:
            raise ConfigError(
                f"data_parallel_rpc_port={self.data_parallel_rpc_port} is outside 0 to {65536 - count} "
                "(0: any free ones)"
            )
        if self.roles and (count == 1 or len(self.roles) != count or set(self.roles) == {"prefill"}):
            raise ConfigError(
                f"roles={','.join(self.roles)} and data_parallel_size={count}: name a role, prefill, decode or both, "
                "for each of two or more replicas, and not prefill for all of them"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both files: give ssl_certfile and ssl_keyfile")
        if self.vector_store is not None and not self.vector_store.startswith(("qdrant://", "qdrants://")):
            raise ConfigError(
                f"vector_store={self.vector_store!r}: write qdrant://HOST:6333, or qdrants:// for TLS"
            )
        choose_formats(None, self.tool_call_parser, self.reasoning_parser)
        if not all(self.aliases) or not all(self.served_names):
            raise ConfigError("served_model_name or model_alias is empty: give a name")
        for name in (
            *_PER_KEY,
            "max_body_bytes",
            "max_file_bytes",
            "max_header_bytes",
            "max_queue_requests",
            "max_queue_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout={self.request_timeout} must be more than 0 seconds")
        if self.sse_keep_alive < 0:
            raise ConfigError(f"sse_keep_alive={self.sse_keep_alive} must not be negative (0: no comments)")
        if self.keep_alive is not None and self.keep_alive <= 0:
            raise ConfigError(f"keep_alive={self.keep_alive:g} must be more than 0 seconds (-1: never ends)")
        for name in ("engine_timeout", "header_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0 seconds")
        for name in ("max_stored_responses", "max_stored_responses_bytes", "max_stored_responses_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative (0 keeps none)")
        if self.embedding_models and not self.embeddings:
            raise ConfigError("embedding_model and no_embeddings contradict each other: give one of them")
        if not 0 < self.train_share <= 1:
            raise ConfigError(f"train_share={self.train_share} must be above 0 and at most 1")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must not be negative")
        for name in ("isolate_keys", *_PER_KEY):
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
        for name in _PER_KEY:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is counted in one process and api_server_count={count}: leave one of them out"
                )
        if self.keep_alive is not None:
            raise ConfigError(
                f"keep_alive={self.keep_alive:g} needs one process and api_server_count={count}"
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
