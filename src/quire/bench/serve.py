"""`bench serve`: a workload, sent to an OpenAI server at one rate or several, with the time of every token."""

import asyncio
import json
import math
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.arrivals import TraceRow, arrival_times, read_trace, replayed
from quire.bench.http_client import ConnectionLost, HttpClient, Response
from quire.bench.lengths import Lengths, named, within
from quire.core.errors import ConfigError, QuireError

DATASETS = ("random", "sharegpt", "alpaca", "trace")
PREFIX_TOKENS = 512  # of a prompt block that a trace names by a hash
# Each is one token in the vocabularies of most models, alone and after a space: a prompt of n words has n tokens on
# any server. The count that is reported is the server's own (`usage`).
_WORDS = """
the of and to in is that for it was with as on be at by this have from or had not are but what all were when
we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name
should home big give air line set own under read last
"""
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Query:
    """One request: its prompt, and the number of tokens to generate."""

    prompt: str
    lengths: Lengths
    at: float | None = None  # seconds on the trace's clock; None: the plan decides


@dataclass(frozen=True, slots=True)
class Workload:
    queries: Sequence[Query]
    source: str  # a description, for the report
    num_too_long: int = 0  # left out: longer than the server's context

    @property
    def has_times(self) -> bool:
        return all(query.at is not None for query in self.queries)

    def times(self, rate: float | None, burstiness: float, speed: float, seed: int) -> list[float]:
        """When each query is sent, in seconds from the start. Without a rate the trace's own times count."""
        if rate is not None:
            return arrival_times(len(self.queries), rate, burstiness, random.Random(f"arrivals {seed}"))
        if not self.has_times:
            raise ConfigError("the dataset has no times: give --request-rate")
        return replayed([query.at or 0.0 for query in self.queries], speed)


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """`max_total_tokens` is the server's context, where it says one: longer requests are left out."""

    dataset: str = "random"
    path: str | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0  # lengths are uniform within ± this fraction
    seed: int = 0
    max_total_tokens: int | None = None
    part: int = 0  # of a sweep: each part has different prompts


def make_workload(plan: WorkloadPlan) -> Workload:
    """The same plan makes the same prompts."""
    if plan.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {plan.num_prompts}: give at least 1")
    rows, source = _trace_rows(plan)
    limit = plan.max_total_tokens
    kept = rows
    if limit is not None:
        within([row.lengths for row in rows], limit)  # says so if nothing fits
        kept = [row for row in rows if row.lengths.total <= limit]
    words = random.Random(f"words {plan.seed} {plan.part}")
    queries = [Query(_prompt(row, words, f"{plan.seed} {plan.part}"), row.lengths, row.at) for row in kept]
    return Workload(queries, source, len(rows) - len(kept))


def _trace_rows(plan: WorkloadPlan) -> tuple[list[TraceRow], str]:
    count, seed = plan.num_prompts, plan.seed
    if plan.path is not None and plan.dataset == "trace":
        rows = read_trace(plan.path)
        return [rows[i % len(rows)] for i in range(count)] if rows[0].at is None else rows[:count], plan.path
    if plan.path is not None:  # lengths from a file, in random order
        rows = read_trace(plan.path)
        chance = random.Random(seed)
        return [TraceRow(chance.choice(rows).lengths) for _ in range(count)], plan.path
    if plan.dataset == "trace":
        raise ConfigError("--dataset trace needs the trace: give --dataset-path FILE")
    if plan.dataset != "random":
        return [
            TraceRow(lengths) for lengths in named(plan.dataset, count, seed)
        ], f"{plan.dataset}-like lengths"
    return [TraceRow(lengths) for lengths in _random_lengths(plan)], _description(plan)


def _random_lengths(plan: WorkloadPlan) -> list[Lengths]:
    if plan.input_len < 1 or plan.output_len < 1:
        raise ConfigError(
            f"--random-input-len and --random-output-len are {plan.input_len} and {plan.output_len}: give at least 1"
        )
    if not 0 <= plan.range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {plan.range_ratio:g} is outside 0 to 1")
    chance = random.Random(f"lengths {plan.seed}")

    def near(middle: int) -> int:
        spread = int(middle * plan.range_ratio)
        return max(1, chance.randint(middle - spread, middle + spread))

    return [Lengths(near(plan.input_len), near(plan.output_len)) for _ in range(plan.num_prompts)]


def _description(plan: WorkloadPlan) -> str:
    spread = f", ± {plan.range_ratio:.0%}" if plan.range_ratio else ""
    return f"{plan.input_len} in, {plan.output_len} out{spread}"


def _prompt(row: TraceRow, words: random.Random, seed: str) -> str:
    """Random words; prompt blocks with the same hash in a trace are the same words."""
    count = row.lengths.num_prompt_tokens
    if not row.prefix_ids:
        return " ".join(words.choices(WORDS, k=count))
    prompt: list[str] = []
    for name in row.prefix_ids:
        prompt += random.Random(f"piece {seed} {name}").choices(WORDS, k=PREFIX_TOKENS)
    prompt += words.choices(WORDS, k=max(0, count - len(prompt)))
    return " ".join(prompt[:count])


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A streamed request to one endpoint."""

    path: str
    body: Mapping[str, Any]

    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(slots=True)
class Outcome:
    """The response and its times, in seconds on this process's monotonic clock. Complete if `error` is None."""

    sent: float = 0.0
    first_token: float | None = None
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of text that came one after the other
    texts: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None  # short and without details, so that equal failures can be counted

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def seconds(self) -> float:
        """From sending to the last piece."""
        return self.ended - self.sent

    @property
    def to_first(self) -> float:
        """TTFT."""
        return (self.first_token or self.ended) - self.sent

    @property
    def per_token(self) -> float | None:
        """TPOT, (end to end − first token) / (outputs − 1); one token has none."""
        if self.num_output_tokens < 2:
            return None
        return (self.seconds - self.to_first) / (self.num_output_tokens - 1)


def completion_call(
    path: str, model: str | None, prompt: str, max_tokens: int, extra: Mapping[str, Any]
) -> StreamedCall:
    """A streamed completion; for the chat endpoint the prompt becomes a user message."""
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
    }
    if path.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if model is not None:
        body["model"] = model
    return StreamedCall(path, {**body, **extra})


async def make_call(client: HttpClient, call: StreamedCall, timeout: float | None = None) -> Outcome:
    """Sends one request and times its tokens. Server and network failures end up in `Outcome.error`, not raised."""
    outcome = Outcome(sent=time.perf_counter())
    try:
        async with asyncio.timeout(timeout), client.send("POST", call.path, call.encoded()) as response:
            outcome.status = response.status
            if response.status == 200:
                await _read_stream(response, outcome)
            else:
                outcome.error = _refusal(response.status, await response.read())
    except ConnectionLost as fault:
        outcome.error = str(fault)
    except TimeoutError:
        outcome.error = f"no end within {timeout:g} s"
    outcome.ended = outcome.ended if outcome.error is None else time.perf_counter()
    return outcome


async def _read_stream(response: Response, outcome: Outcome) -> None:
    last = 0.0
    done = False
    num_pieces = 0
    async for data in response.events():
        if data == b"[DONE]":
            done = True
            continue
        event = _parsed(data)
        if "error" in event:
            outcome.error = outcome.error or f"error event: {_error_name(event)}"
            continue
        if event.get("usage"):
            outcome.num_prompt_tokens = event["usage"].get("prompt_tokens", 0)
            outcome.num_output_tokens = event["usage"].get("completion_tokens", 0)
        for choice in event.get("choices", ()):
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if text := _text(choice):
                now = time.perf_counter()
                outcome.texts.append(text)
                num_pieces += 1
                if outcome.first_token is None:
                    outcome.first_token = now
                else:
                    outcome.gaps.append(now - last)
                last = now
    outcome.ended = last or time.perf_counter()
    outcome.num_output_tokens = outcome.num_output_tokens or num_pieces  # a server without usage
    if outcome.error is None and not done:
        outcome.error = "the stream ended without [DONE]"
    elif outcome.error is None and outcome.finish_reason is None:
        outcome.error = "the stream ended without a finish_reason"


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"error": "an event is no JSON object"}


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status} {_error_name(json.loads(body))}".rstrip()
    except ValueError:
        return f"HTTP {status}"


def _error_name(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return str(error or "")[:80]
    return str(error.get("code") or error.get("type") or error.get("message") or "")[:80]


@dataclass(frozen=True, slots=True)
class ServePlan:
    base_url: str
    workload: WorkloadPlan
    endpoint: str = "/v1/completions"
    model: str | None = None  # None: the first that the server names
    api_key: str | None = None
    rates: Sequence[float | None] = (math.inf,)  # per second; None: as the trace has it
    burstiness: float = 1.0
    trace_speed: float = 1.0
    max_concurrency: int | None = None
    timeout: float | None = 3600.0  # seconds for one request
    num_warm_ups: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every request's body


@dataclass(frozen=True, slots=True)
class Round:
    """One rate's run."""

    rate: float | None
    seconds: float  # from the first request to the end of the last
    outcomes: Sequence[Outcome]
    lateness: Sequence[float]  # delay of each send behind its schedule, without waits for max_concurrency
    cpu_seconds: float  # of this process, the load generator
    peak_open: int  # requests under way at once


@dataclass(frozen=True, slots=True)
class Served:
    model: str | None
    workload: Workload
    rounds: Sequence[Round]
    num_connections: int  # opened; keep-alive serves many requests with few


async def run_serve(
    plan: ServePlan,
    on_round: Callable[[float | None, int], None] = lambda _rate, _count: None,
    on_end: Callable[[Outcome], None] = lambda _outcome: None,
) -> Served:
    """Raises one clear error if the server cannot be reached or refuses the first request."""
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    client = HttpClient(plan.base_url, headers)
    try:
        model, limit = await _server_model(client, plan)
        limited = replace(plan.workload, max_total_tokens=limit)
        # The same lengths in each round, but other words: no round hits the prefix cache of another.
        workloads = [make_workload(replace(limited, part=part)) for part in range(len(plan.rates))]
        schedules = [
            workload.times(rate, plan.burstiness, plan.trace_speed, limited.seed)
            for rate, workload in zip(plan.rates, workloads, strict=True)
        ]
        await _warm_up(client, plan, model)
        rounds = []
        for rate, workload, times in zip(plan.rates, workloads, schedules, strict=True):
            calls = _calls(plan, model, workload)
            on_round(rate, len(calls))
            rounds.append(await _run_round(client, plan, rate, calls, times, on_end))
        return Served(model, workloads[0], rounds, client.num_opened)
    finally:
        await client.close()


def _calls(plan: ServePlan, model: str | None, workload: Workload) -> list[StreamedCall]:
    return [
        completion_call(
            plan.endpoint, model, query.prompt, query.lengths.num_output_tokens, {"seed": index, **plan.extra}
        )
        for index, query in enumerate(workload.queries)
    ]


async def _run_round(
    client: HttpClient,
    plan: ServePlan,
    rate: float | None,
    calls: Sequence[StreamedCall],
    times: Sequence[float],
    on_end: Callable[[Outcome], None],
) -> Round:
    slots = asyncio.Semaphore(plan.max_concurrency or len(calls))
    num_open = peak_open = 0
    lateness: list[float] = []

    async def send(call: StreamedCall) -> Outcome:
        nonlocal num_open, peak_open
        async with slots:
            num_open += 1
            peak_open = max(peak_open, num_open)
            outcome = await make_call(client, call, plan.timeout)
            num_open -= 1
        on_end(outcome)
        return outcome

    cpu, started = _cpu_seconds(), time.perf_counter()
    tasks = []
    for call, at in zip(calls, times, strict=True):
        if (wait := started + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        lateness.append(max(0.0, time.perf_counter() - started - at))
        tasks.append(asyncio.create_task(send(call)))
    outcomes = await asyncio.gather(*tasks)
    seconds = max(outcome.ended for outcome in outcomes) - started
    return Round(rate, seconds, outcomes, lateness, _cpu_seconds() - cpu, peak_open)


async def _server_model(client: HttpClient, plan: ServePlan) -> tuple[str | None, int | None]:
    """The model to request, and its context length if the server reports one."""
    try:
        async with client.send("GET", "/v1/models") as response:
            body = await response.read()
    except ConnectionLost as fault:
        raise QuireError(f"{plan.base_url} cannot be reached ({fault}): is the server running?") from None
    try:
        models = {model["id"]: model for model in json.loads(body)["data"]} if response.status == 200 else {}
    except (ValueError, KeyError, TypeError):
        models = {}
    name = plan.model or next(iter(models), None)
    limit = models.get(name, {}).get("max_model_len")
    return name, limit if isinstance(limit, int) else None


async def _warm_up(client: HttpClient, plan: ServePlan, model: str | None) -> None:
    """A few short requests, so that a wrong URL or key fails before the measurement."""
    call = completion_call(plan.endpoint, model, "the time has come", 4, plan.extra)
    for _ in range(plan.num_warm_ups):
        outcome = await make_call(client, call, plan.timeout)
        if outcome.error is not None:
            hint = ": give --api-key" if outcome.error.startswith("HTTP 401") else ""
            where = f"{plan.base_url}{plan.endpoint}"
            raise QuireError(f"the first request to {where} failed: {outcome.error}{hint}")


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
