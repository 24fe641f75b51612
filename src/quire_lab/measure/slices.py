"""Which slice of a GPU meets an SLO: users that ask again as soon as they are answered, on simulated slices."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quire.bench.report import percentile
from quire.bench.table import counted
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ContextExceeded, InvalidRequest
from quire.core.request import Request
from quire.engine.build.ranks import can_be_cut
from quire.fleet.mig import Card, Profile
from quire.models.registry import describe
from quire_lab.measure.replay import TOKEN, plain
from quire_lab.measure.simulated_runs import build_simulated
from quire_lab.simulate.build import DeviceTooSmall, open_shape
from quire_lab.simulate.clock import VirtualClock

USERS = (1, 2, 4, 8, 16, 32, 64)
MAX_USERS = 512  # that are simulated on one slice, in seconds
MAX_REPLICAS = 64
ROUNDS = 3  # requests of each user
RANKS = (2, 4, 8)  # whole GPUs that are tried for a model that no slice holds


class SloMissed(ConfigError):
    """The largest slice serves, but too slowly: fewer users on it may be served in time."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds per token and per request that 95 of 100 requests must keep, and what a request is."""

    per_token: float = 0.050
    per_request: float = 10.0
    prompt_tokens: int = 512
    output_tokens: int = 128

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Slo":
        """From the names of a fleet file: slo_per_token, slo_request and the two lengths."""
        names = {"slo_per_token": "per_token", "slo_request": "per_request"}
        return cls(**{names.get(name, name): value for name, value in fields.items()})


@dataclass(frozen=True, slots=True)
class SliceLatency:
    """One slice with one number of users. Latencies are 95th percentiles; infinite where the model does not fit."""

    profile: str
    users: int
    per_token: float
    per_request: float
    why: str = ""  # it does not fit

    def meets(self, slo: Slo) -> bool:
        return self.per_token <= slo.per_token and self.per_request <= slo.per_request

    def record(self, slo: Slo) -> dict[str, Any]:
        fits = not self.why
        return {
            "slice": self.profile, "users": self.users, "fits": fits, "meets_slo": self.meets(slo), "why": self.why,
            "per_token_s": self.per_token if fits else None, "per_request_s": self.per_request if fits else None,
        }  # fmt: skip


def latency(settings: Mapping[str, Any], card: Card, profile: Profile, users: int, slo: Slo) -> SliceLatency:
    """Every user sends a prompt, waits for the whole answer, and sends the next one."""
    return _on(f"{card.name}-{profile.name}", profile.name, settings, users, slo)


def _on(device: str, name: str, settings: Mapping[str, Any], users: int, slo: Slo) -> SliceLatency:
    return _latency(json.dumps(settings, sort_keys=True), f"simulated:{device}", name, users, slo)


@cache  # a fleet has models that differ in name only
def _latency(settings: str, device: str, name: str, users: int, slo: Slo) -> SliceLatency:
    given = json.loads(settings)
    try:
        built = build_simulated({**given, "device": device, "enable_prefix_caching": False})
    except DeviceTooSmall as error:
        return _too_small(name, users, error)
    engine, clock = built.engine, built.engine.clock
    assert isinstance(clock, VirtualClock)
    sampling = plain(slo.output_tokens)
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    received: Counter[str] = Counter()
    per_token, per_request = [], []
    asked = dict.fromkeys(range(users), 0)

    def ask(user: int) -> None:
        request = f"{user}-{asked[user]}"
        asked[user] += 1
        sent[request] = clock()
        engine.add(Request(request, [TOKEN] * slo.prompt_tokens, sampling))

    try:
        for user in range(users):
            ask(user)
    except ContextExceeded:  # a larger slice has the same context
        raise
    except InvalidRequest as error:
        if {"kv_cache_memory_bytes", "num_blocks"} & given.keys():
            raise
        return _too_small(name, users, error)
    while engine.has_work:
        for update in engine.step():
            request, now = update.request_id, clock()
            if update.token_ids:
                first.setdefault(request, now)
            received[request] += len(update.token_ids)
            if update.finish_reason is None:
                continue
            if received[request] < slo.output_tokens:
                raise ConfigError(
                    f"prompt_tokens={slo.prompt_tokens} leave room for {received[request]} of "
                    f"output_tokens={slo.output_tokens} in a context of {built.report.limits.max_model_len}: give "
                    "shorter ones"
                )
            per_request.append(now - sent[request])
            per_token.append((now - first[request]) / max(1, slo.output_tokens - 1))
            user = int(request.split("-")[0])
            if asked[user] < ROUNDS:
                ask(user)
    return SliceLatency(name, users, percentile(sorted(per_token), 95), percentile(sorted(per_request), 95))


def _too_small(name: str, users: int, error: Exception) -> SliceLatency:
    """The reason without its advice, which is about one device."""
    return SliceLatency(name, users, float("inf"), float("inf"), str(error).partition(": ")[0])


def curve(
    settings: Mapping[str, Any],
    card: Card,
    slo: Slo,
    users: Sequence[int] = USERS,
    on_point: Callable[[], None] = lambda: None,
) -> list[SliceLatency]:
    """Every slice with every number of users."""
    points = []
    for profile in card.profiles:
        for count in users:
            points.append(latency(settings, card, profile, count, slo))
            on_point()
            if points[-1].why:  # more users change nothing
                break
    return points


def most_users(points: Sequence[SliceLatency], profile: str, slo: Slo) -> int:
    """0 where not even one is served in time."""
    return max((p.users for p in points if p.profile == profile and p.meets(slo)), default=0)


def smallest(settings: Mapping[str, Any], card: Card, slo: Slo, users: int) -> SliceLatency:
    """The first slice, in the order of size, that meets the SLO. ConfigError with the nearest where none does."""
    tried = []
    for profile in card.profiles:
        point = latency(settings, card, profile, users, slo)
        if point.meets(slo):
            return point
        tried.append(point)
    last = tried[-1]
    if last.why:
        why = last.why
        if instead := ", or ".join(_instead(settings, card, slo, users)):
            why = f"{why}; slices cannot be joined: for {counted(users, 'user')}, {instead}"
        raise ConfigError(f"no slice of {card.name} is large enough: {why}")
    raise SloMissed(
        f"no slice of {card.name} meets {1e3 * slo.per_token:g} ms per token and {slo.per_request:g} s per "
        f"request for {counted(users, 'user')}: the whole GPU takes {1e3 * last.per_token:.1f} ms and "
        f"{last.per_request:.1f} s; allow that, use several replicas, or fewer bits (--quantization int4)"
    )


def fewest_replicas(
    settings: Mapping[str, Any], card: Card, slo: Slo, users: int, least: int = 1
) -> tuple[SliceLatency, int]:
    """The smallest slice with as few replicas of it as meet the SLO for all users together, `least` or more."""
    most = max(least, min(MAX_REPLICAS, users))
    tried = max(least, -(-users // MAX_USERS))
    if tried > most:
        raise ConfigError(
            f"{users:,} users at once are more than {most} replicas of {MAX_USERS} users: give fewer users, a lower "
            "rate or a shorter slo_request (rate × slo_request users are there at once), or more replicas"
        )
    failed, served = tried - 1, None
    while (
        served is None or served[1] - failed > 1
    ):  # doubled up to a success, then halved to the last failure
        try:
            served = smallest(settings, card, slo, -(-users // tried)), tried
        except SloMissed:
            if tried == most:
                raise
            failed = tried
        tried = min(2 * tried, most) if served is None else (failed + served[1]) // 2
    return served


def _instead(settings: Mapping[str, Any], card: Card, slo: Slo, users: int) -> Iterator[str]:
    """What holds a model that no slice does, with its simulated times: int4, and whole GPUs that divide it."""

    def first(tries: Iterator[SliceLatency]) -> SliceLatency | None:
        """The first that meets the SLO; where none does, the largest that holds the model."""
        best = None
        for point in tries:
            if not point.why:
                best = point
                if point.meets(slo):
                    break
        return best

    def times(point: SliceLatency) -> str:
        broken = "" if point.meets(slo) else ", misses the SLO"
        return f"{1e3 * point.per_token:.1f} ms per token, {point.per_request:.2f} s per request{broken}"

    fewer = {**settings, "quantization": "int4"}
    if settings.get("quantization") != "int4":
        if point := first(latency(fewer, card, profile, users, slo) for profile in card.profiles):
            yield f"--quantization int4 fits in {point.profile} ({times(point)})"
    architecture = describe(open_shape(EngineConfig.of(**settings)).config).architecture
    if not can_be_cut(architecture):
        return
    on_ranks = (_on(f"{ranks}x{card.name}", f"{ranks}", settings, users, slo) for ranks in RANKS)
    if point := first(on_ranks):
        yield f"{point.profile} whole GPUs with --tensor-parallel-size {point.profile} ({times(point)})"
