"""Requests that arrive over time, on the engine's own clock: wall time, or a simulated device's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.bench.drive import BenchRequest, RequestTimes
from quire.core.errors import QuireError
from quire.core.request import Request
from quire.engine.engine import Engine
from quire_lab.simulate.clock import VirtualClock


@dataclass(slots=True)
class Loaded:
    """What came of them; all times in seconds."""

    seconds: float = 0.0  # from the first arrival to the last token
    num_output_tokens: int = 0
    requests: list[RequestTimes] = field(default_factory=list)  # in the order of finishing

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def normalised_latency(self) -> float:
        """Seconds per output token from arrival to end, mean over requests: as the Orca and vLLM papers have it."""
        return sum(one.last_token / one.num_output_tokens for one in self.requests) / len(self.requests)

    @property
    def mean_latency(self) -> float:
        return sum(one.last_token for one in self.requests) / len(self.requests)


@dataclass(slots=True)
class _Open:
    arrival: float
    first: float | None = None
    num_tokens: int = 0


def serve_at(
    engine: Engine,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    on_finish: Callable[[], None] = lambda: None,
    on_step: Callable[[], None] = lambda: None,
    names: Sequence[str] | None = None,
) -> Loaded:
    """Each request at its time, in seconds from now; times are in order. Latency counts from the time, kept or not."""
    started, loaded, next_index = engine.clock(), Loaded(), 0
    names = names or [f"load-{time.monotonic_ns()}-{index}" for index in range(len(requests))]
    opened: dict[str, _Open] = {}
    while next_index < len(requests) or engine.has_work:
        while next_index < len(requests) and started + times[next_index] <= engine.clock():
            request = requests[next_index]
            engine.add(Request(names[next_index], request.prompt_token_ids, request.sampling))
            opened[names[next_index]] = _Open(started + times[next_index])
            next_index += 1
        if not engine.has_work:
            _wait_until(engine, started + times[next_index])
            continue
        for update in engine.step():
            if update.error is not None:
                raise QuireError(update.error)
            known, now = opened[update.request_id], engine.clock()
            known.num_tokens += len(update.token_ids)
            if update.token_ids and known.first is None:
                known.first = now - known.arrival
            if update.finish_reason is not None:
                loaded.requests.append(
                    RequestTimes(known.first or 0.0, now - known.arrival, known.num_tokens)
                )
                loaded.num_output_tokens += known.num_tokens
                on_finish()
        on_step()
    loaded.seconds = engine.clock() - started
    return loaded


def _wait_until(engine: Engine, moment: float) -> None:
    if isinstance(engine.clock, VirtualClock):
        engine.clock.advance_to(moment)
    else:
        time.sleep(max(0.0, moment - engine.clock()))
