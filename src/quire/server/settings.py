"""ServerSettings: everything about serving that is not about the engine."""

from dataclasses import dataclass

from quire.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    admin_key: str | None = None  # none: operators' calls are off
    max_concurrent_per_key: int | None = None
    isolate_keys: bool = False  # keys share no cached prefixes
    max_body_bytes: int = 16 << 20
    request_timeout: float | None = None  # seconds
    shutdown_timeout: float = 25.0
    log_requests: bool = False
    max_queue_requests: int = 1024
    max_queue_tokens: int | None = 1 << 20
    served_names: tuple[str, ...] = ()  # none: the model's own name
    chat_template: str | None = None
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is outside 0 to 65535 (0: any free one)")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both files: give ssl_certfile and ssl_keyfile")
        for name in ("max_concurrent_per_key", "max_body_bytes", "max_queue_requests", "max_queue_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout={self.request_timeout} must be more than 0 seconds")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must not be negative")
        if self.isolate_keys and not self.api_keys:
            raise ConfigError("isolate_keys needs API keys: give api_key or api_key_file")
