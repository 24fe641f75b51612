"""Rates: how many requests and tokens each key may have per minute. Token buckets, with OpenAI's errors and headers."""

import math
import time
from collections.abc import Callable

from quire.server.errors import ApiError

Clock = Callable[[], float]
_KINDS = ("requests", "tokens")
RATE_HEADERS = tuple(
    f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in _KINDS
)


class Bucket:
    """Starts full and refills evenly: a minute's worth may come at once, then as fast as it refills.

    It may be overdrawn by what nobody could know before, an answer's length; the debt is waited for.
    """

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.limit = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60)
        self._at = now
        return self._level

    def spend(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """Until so much is there, if nobody takes any."""
        return max(0.0, (amount - self.level) * 60 / self.limit)


class Allowance:
    """One key's two buckets; None is no limit."""

    def __init__(self, requests: Bucket | None = None, tokens: Bucket | None = None) -> None:
        self._requests = requests
        self._tokens = tokens

    def take_request(self) -> None:
        """Counts one more request, or raises 429."""
        _check("requests", self._requests, 1)
        _check("tokens", self._tokens, 1)  # a key in debt hears so before any work is done
        if self._requests is not None:
            self._requests.spend(1)

    def check_tokens(self, amount: int) -> None:
        """Raises 429 if a prompt of so many tokens may not come now."""
        _check("tokens", self._tokens, amount)

    def spend_tokens(self, amount: int) -> None:
        if self._tokens is not None:
            self._tokens.spend(amount)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-…`, as OpenAI sends them with every answer."""
        found = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = shown_duration(bucket.seconds_until(bucket.limit))
        return found


class Rates:
    """An allowance for every key that has asked so far."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}

    def of(self, key: str | None) -> Allowance:
        """Without a key there is no limit: whoever sets one sets keys too."""
        if key is None:
            return Allowance()
        if key not in self._allowances:
            self._allowances[key] = Allowance(self._bucket(self._requests), self._bucket(self._tokens))
        return self._allowances[key]

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._clock)


def shown_duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    shown = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


def _check(what: str, bucket: Bucket | None, amount: int) -> None:
    if bucket is None or bucket.level >= amount:
        return
    flag = f"--max-{what}-per-minute-per-key"
    if amount > bucket.limit:
        message = (
            f"the request has {amount} {what} and this key may have {bucket.limit} per minute: "
            f"send a shorter one, or raise {flag}"
        )
        headers = {"x-should-retry": "false"}  # OpenAI's clients would try again in vain
    else:
        seconds = bucket.seconds_until(amount)
        message = (
            f"this key may have {bucket.limit} {what} per minute: try again in {shown_duration(seconds)}"
        )
        headers = {
            "Retry-After": str(max(1, math.ceil(seconds))),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
        }
    raise ApiError(429, message, kind=what, code="rate_limit_exceeded", headers=headers)
