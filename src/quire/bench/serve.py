"""`bench serve`: a workload, sent to an OpenAI server at one rate or several, with the time of every token."""

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.workload import Workload, WorkloadPlan, make_workload
from quire.core.errors import QuireError
from quire.link.http_client import ConnectionLost, HttpClient, Response


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
    with_steps: bool = False  # asks the server for its step log
    admin_key: str | None = None  # for the step log, where the server has one


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
class EngineStep:
    """A step of the server's engine, on this process's clock."""

    step_id: int
    started: float
    ended: float
    num_prefill_tokens: int
    num_decode_rows: int

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Served:
    model: str | None
    workload: Workload
    rounds: Sequence[Round]
    num_connections: int  # opened; keep-alive serves many requests with few
    steps: Sequence[EngineStep] = ()  # in order, if the plan asks for them


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
        if plan.with_steps:
            await _step_log(plan, "/start_step_log")
        rounds = []
        for rate, workload, times in zip(plan.rates, workloads, schedules, strict=True):
            calls = _calls(plan, model, workload)
            on_round(rate, len(calls))
            rounds.append(await _run_round(client, plan, rate, calls, times, on_end))
        steps = await _logged_steps(plan) if plan.with_steps else ()
        return Served(model, workloads[0], rounds, client.num_opened, steps)
    finally:
        await client.close()


async def _step_log(plan: ServePlan, path: str) -> dict[str, Any]:
    key = plan.admin_key or plan.api_key
    client = HttpClient(plan.base_url, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        async with client.send("POST", path, b"") as response:
            body = await response.read()
    except ConnectionLost as fault:
        raise QuireError(f"--timeline: {plan.base_url}{path} cannot be reached ({fault})") from None
    finally:
        await client.close()
    if response.status != 200:
        hint = (
            "give --admin-key" if response.status in (401, 403) else "it needs a Quire server of this version"
        )
        raise QuireError(f"--timeline: {path} was refused ({_refusal(response.status, body)}): {hint}")
    return _parsed(body)


async def _logged_steps(plan: ServePlan) -> list[EngineStep]:
    """The server's clock is set to ours by the middle of the exchange, so a step is off by half of it at most."""
    asked = time.perf_counter()
    log = await _step_log(plan, "/stop_step_log")
    offset = (asked + time.perf_counter()) / 2 - log["now"]
    return [
        EngineStep(
            step["step_id"],
            step["started"] + offset,
            step["ended"] + offset,
            step["num_prefill_tokens"],
            step["num_decode_rows"],
        )
        for step in log["steps"]
    ]


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
