"""`bench serve`: sends a workload to an OpenAI server at one rate or several, and times every token."""

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.http_client import ConnectionLost, HttpClient
from quire.bench.serve_call import Call, Outcome, completion_call, make_call
from quire.bench.serve_workload import Workload, WorkloadPlan, make_workload
from quire.core.errors import QuireError


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
    lateness: Sequence[float]  # how long after its time each was sent; max_concurrency's waits not counted
    cpu_seconds: float  # of this process: what the load generator itself took
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
        # The same lengths in each round, but other words: no round finds what another left in a cache.
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


def _calls(plan: ServePlan, model: str | None, workload: Workload) -> list[Call]:
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
    calls: Sequence[Call],
    times: Sequence[float],
    on_end: Callable[[Outcome], None],
) -> Round:
    room = asyncio.Semaphore(plan.max_concurrency or len(calls))
    num_open = peak_open = 0
    lateness: list[float] = []

    async def one(call: Call) -> Outcome:
        nonlocal num_open, peak_open
        async with room:
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
        tasks.append(asyncio.create_task(one(call)))
    outcomes = await asyncio.gather(*tasks)
    seconds = max(outcome.ended for outcome in outcomes) - started
    return Round(rate, seconds, outcomes, lateness, _cpu_seconds() - cpu, peak_open)


async def _server_model(client: HttpClient, plan: ServePlan) -> tuple[str | None, int | None]:
    """The model to ask, and its context where the server says it."""
    try:
        async with client.send("GET", "/v1/models") as response:
            body = await response.read()
    except ConnectionLost as fault:
        raise QuireError(f"{plan.base_url} cannot be reached ({fault}): is the server running?") from None
    try:
        models = {one["id"]: one for one in json.loads(body)["data"]} if response.status == 200 else {}
    except (ValueError, KeyError, TypeError):
        models = {}
    name = plan.model or next(iter(models), None)
    limit = models.get(name, {}).get("max_model_len")
    return name, limit if isinstance(limit, int) else None


async def _warm_up(client: HttpClient, plan: ServePlan, model: str | None) -> None:
    """A few short requests; what fails here would fail a thousand times."""
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
