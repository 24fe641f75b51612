"""Keys: who may ask, and how much at a time."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.core.errors import ConfigError
from quire.server.errors import ApiError


class Keys:
    """Compares digests, all of them each time: how long it takes says nothing about the keys."""

    def __init__(self, keys: Iterable[str], max_concurrent: int | None = None) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._max_concurrent = max_concurrent
        self._active: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, offered: bytes | None) -> str | None:
        """The name under which a key may appear in logs; None if it is no key."""
        digest = _digest(offered or b"")
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:12] if offered and any(found) else None

    @contextmanager
    def hold(self, name: str | None) -> Iterator[None]:
        """One request of this key, while it lasts. Raises 429 past the limit."""
        limit = self._max_concurrent
        if name is None or limit is None:
            yield
            return
        if self._active[name] >= limit:
            raise ApiError(
                429,
                f"this key has {limit} requests under way already: wait for one to end",
                code="concurrency_limit",
                headers={"Retry-After": "1"},
            )
        self._active[name] += 1
        try:
            yield
        finally:
            self._active[name] -= 1
            if not self._active[name]:
                del self._active[name]


def read_key_file(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and those that start with # don't count."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read ({error})") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key: write one a line")
    return keys


def offered_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """From `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
    found = {name.lower(): value for name, value in headers}
    scheme, _, key = found.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return found.get(b"x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
