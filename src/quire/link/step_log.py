"""The step log: when each step ran and what it computed, in a bounded ring, recorded only while it is switched on."""

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from quire.core.step import Step, StepResult

if TYPE_CHECKING:  # they bring torch, which the client's process does without
    from quire.engine.engine import StepRunner
    from quire.sampling.records import TokenMask

MAX_RECORDS = 50_000  # the oldest are dropped


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Times are seconds of this machine's monotonic clock, which all of its processes share."""

    step_id: int
    started: float  # launched, and the step before it was over
    ended: float  # its result was collected
    device_seconds: float  # forward and sampling
    num_prefill_tokens: int
    num_decode_rows: int


class StepLog:
    """Stands between an engine and its runner. Switched off it only passes calls on."""

    def __init__(self, runner: "StepRunner") -> None:
        self._runner = runner
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._launched: deque[tuple[float, Step]] = deque()
        self._last_end = 0.0
        self._is_on = False

    def start(self) -> None:
        self._records.clear()
        self._launched.clear()
        self._is_on = True

    def stop(self) -> list[StepRecord]:
        """What was recorded since the start, the oldest first."""
        self._is_on = False
        records = list(self._records)
        self._records.clear()
        return records

    def launch(self, step: Step) -> None:
        launched = time.perf_counter()
        self._runner.launch(step)
        if self._is_on:  # not for a step that did not fit
            self._launched.append((launched, step))

    def mask(self, mask: "TokenMask") -> None:
        self._runner.mask(mask)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        if self._is_on:
            self._record(result)
        return result

    def close(self) -> None:
        self._runner.close()

    def _record(self, result: StepResult) -> None:
        while self._launched and self._launched[0][1].step_id < result.step_id:
            self._launched.popleft()  # it was given up
        if not self._launched or self._launched[0][1].step_id != result.step_id:
            return  # launched before the start
        launched, step = self._launched.popleft()
        drafted = {draft.row for draft in step.drafts}
        rows = list(zip(step.rows, step.num_tokens, strict=True))
        num_prefill = sum([count for row, count in rows if count > 1 and row not in drafted])
        num_decodes = sum([count == 1 or row in drafted for row, count in rows])
        ended = time.perf_counter()
        self._records.append(
            StepRecord(
                step.step_id,
                max(launched, self._last_end),
                ended,
                result.seconds,
                num_prefill,
                num_decodes,
            )
        )
        self._last_end = ended
