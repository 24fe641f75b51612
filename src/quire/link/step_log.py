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


class WatchedRunner:
    """Stands between an engine and its runner and notes the steps. Switched off it only passes calls on."""

    def __init__(self, runner: "StepRunner") -> None:
        self._runner = runner
        self._launched: deque[tuple[float, Step]] = deque()
        self.is_on = False

    def launch(self, step: Step) -> None:
        launched = time.perf_counter()
        self._runner.launch(step)
        if self.is_on:  # not for a step that did not fit
            self._launched.append((launched, step))

    def mask(self, mask: "TokenMask") -> None:
        self._runner.mask(mask)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        while self.is_on and self._launched and self._launched[0][1].step_id <= result.step_id:
            launched, step = self._launched.popleft()
            if step.step_id == result.step_id:  # else it was given up
                self._note(launched, step, result)
        return result

    def close(self) -> None:
        self._runner.close()

    def _note(self, launched: float, step: Step, result: StepResult) -> None:
        """A step has ended that was launched then, while this was switched on."""
        raise NotImplementedError


def divided(step: Step) -> tuple[list[int], int, list[int]]:
    """Tokens of each prefill; the number of decodes; tokens of each row that verifies a draft."""
    drafted = {draft.row for draft in step.drafts}
    rows = list(zip(step.rows, step.num_tokens, strict=True))
    prefills = [count for row, count in rows if count > 1 and row not in drafted]
    verified = [count for row, count in rows if row in drafted]
    return prefills, len(rows) - len(prefills) - len(verified), verified


class StepLog(WatchedRunner):
    """What was recorded stays here until the log is stopped."""

    def __init__(self, runner: "StepRunner") -> None:
        super().__init__(runner)
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._last_end = 0.0

    def start(self) -> None:
        self._records.clear()
        self._launched.clear()
        self.is_on = True

    def stop(self) -> list[StepRecord]:
        """What was recorded since the start, the oldest first."""
        self.is_on = False
        records = list(self._records)
        self._records.clear()
        return records

    def _note(self, launched: float, step: Step, result: StepResult) -> None:
        prefills, num_decodes, verified = divided(step)
        ended = time.perf_counter()
        self._records.append(
            StepRecord(
                step.step_id,
                max(launched, self._last_end),
                ended,
                result.seconds,
                sum(prefills),
                num_decodes + len(verified),
            )
        )
        self._last_end = ended
