"""Servers: OpenAI-compatible servers that run elsewhere, their health, and which of them gets a request."""

import asyncio
import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.errors import ConfigError
from quire.fleet.policies import DEFAULT, find_policy
from quire.fleet.prefixes import Prefix, prefix_of
from quire.fleet.router import Router
from quire.link.http_client import ConnectionLost, HttpClient
from quire.observe.logs import get_logger

log = get_logger(__name__)
HEALTH_SECONDS = 1.0  # between two looks at a server
HEALTH_TIMEOUT = 5.0
CACHE_TOKENS = 1 << 19  # of a server's prefix cache, until its answers say otherwise
_COUNTS = re.compile(rb'"(prompt_tokens|cached_tokens)"\s*:\s*(\d+)')


# of a request: what concerns its answer only
ANSWER_FIELDS = frozenset(
    ("stream", "stream_options", "n", "best_of", "max_completion_tokens", "min_tokens", "stop", "logprobs")
    + ("top_logprobs", "store", "response_format", "structured_outputs", "guided_json", "guided_regex")
    + ("guided_choice", "guided_grammar")
)


class RoutedBody(msgspec.Struct):
    """What routing looks at in a request; the prompt's JSON as it came, not decoded."""

    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(RoutedBody).decode


def prompt_only(body: bytes) -> bytes | None:
    """The body of a request that computes the prompt and one token; None for one that has no prompt."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    kept = {name: value for name, value in fields.items() if name not in ANSWER_FIELDS}
    return msgspec.json.encode({**kept, "max_tokens": 1})


def prefix_of_body(body: bytes) -> Prefix:
    """By the bytes of the prompt, its parts in the order in which chat templates write them; names of models and
    adapters are kept apart. A body that is no JSON object has none, and its server will say what is wrong."""
    try:
        asked = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Prefix(len(body) // 4, ())
    parts = (asked.tools, asked.system, asked.instructions, asked.messages, asked.prompt, asked.input)
    return prefix_of(b"".join(map(bytes, parts)), f"{asked.model or ''}\0{asked.cache_salt or ''}")


class Server:
    """One of the servers. `fault` says why it gets no requests now."""

    def __init__(self, url: str, role: str = "both") -> None:
        self.role = role
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = HttpClient(self.url)
        self.fault: str | None = "it was not asked yet"
        self.num_failures = 0

    @property
    def is_up(self) -> bool:
        return self.fault is None

    def failed(self, why: str) -> None:
        """Logged once until it answers again."""
        if self.fault is None or self.fault == "it was not asked yet":
            log.error("%s cannot be reached (%s): it gets no requests until it answers", self.url, why)
        self.num_failures += 1
        self.fault = why

    async def look(self) -> None:
        """Any answer but a 5xx is health: other servers may have no /health."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT), self.client.send("GET", "/health") as response:
                await response.read()
        except (ConnectionLost, TimeoutError) as error:
            self.failed(str(error) or f"no answer within {HEALTH_TIMEOUT:g} s")
            return
        if response.status >= 500:
            self.failed(f"/health answers {response.status}")
        elif self.fault is not None:
            log.info("%s serves", self.url)
            self.fault = None


class Servers:
    """Made and used in one event loop; must be closed."""

    def __init__(
        self,
        urls: Sequence[str],
        policy: str = DEFAULT,
        cache_tokens: int | None = None,
        prefill: Sequence[str] = (),
    ) -> None:
        """The servers of `prefill` compute prompts for those of `urls`, with which they share a folder of blocks."""
        self.servers = [Server(url) for url in urls] + [Server(url, "prefill") for url in prefill]
        known = [server.url for server in self.servers]
        twice = next((url for url in known if known.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is named twice: name each server once")
        self.policy = policy
        sizes = [CACHE_TOKENS if cache_tokens is None else cache_tokens] * len(self.servers)
        self.router = Router(find_policy(policy), sizes, is_guess=cache_tokens is None)
        self._ids = map(str, itertools.count())
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when each server was asked once."""
        await asyncio.gather(*(server.look() for server in self.servers))
        self._watching = asyncio.create_task(self._watch(), name="server-health")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(server.client.close() for server in self.servers))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            before = [server.is_up for server in self.servers]
            await asyncio.gather(*(server.look() for server in self.servers))
            for number, server in enumerate(self.servers):
                if server.is_up and not before[number]:  # another process: its cache is empty
                    self.router.loads[number].forget_cache()

    @property
    def num_up(self) -> int:
        return sum(server.is_up for server in self.servers)

    def order(self, prefix: Prefix) -> list[int]:
        """The servers that answer, the best first; prefill servers behind all others."""
        return [*self._order(prefix, "both"), *self._order(prefix, "prefill")]

    def prefill(self, prefix: Prefix, number: int) -> list[int]:
        """Servers that should compute the prompt before that server answers, the best first."""
        wanted = self.servers[number].role != "prefill" and self.router.prefills_elsewhere(prefix, number)
        return self._order(prefix, "prefill") if wanted else []

    def _order(self, prefix: Prefix, role: str) -> list[int]:
        candidates = [n for n, server in enumerate(self.servers) if server.is_up and server.role == role]
        return self.router.order(prefix, candidates)

    def sent(self, prefix: Prefix, number: int) -> str:
        """Notes a request; the id that the router knows it by."""
        request_id = next(self._ids)
        self.router.sent(request_id, prefix, number)
        return request_id

    def counted(self, request_id: str, number: int, prefix: Prefix, piece: bytes, handed_over: bool) -> None:
        """Corrects a server's shadow by the usage in an answer's last bytes, where it counts cached tokens."""
        counts = {name: int(value) for name, value in _COUNTS.findall(piece)}
        prompt, cached = counts.get(b"prompt_tokens", 0), counts.get(b"cached_tokens")
        if prompt and cached is not None:
            if handed_over:
                known = self.router.known_tokens(request_id) * prompt // max(1, prefix.num_tokens)
                self.router.loads[number].stats.handed_over += max(0, cached - known)
            self.router.first_token(request_id, cached * prefix.num_tokens // prompt)

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "url": server.url,
                "role": server.role,
                "status": "ready" if server.is_up else server.fault,
                "failures": server.num_failures,
                **load.described(),
            }
            for server, load in zip(self.servers, self.router.loads, strict=True)
        ]
