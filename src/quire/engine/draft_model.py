"""DraftModel: a small model proposes what the large one verifies. A second runner, with pages under the same ids."""

import time
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from quire.core.draft import DraftRoom
from quire.core.ints import Ints, ints
from quire.core.request import Sequence
from quire.core.step import RowStart, Step
from quire.engine.engine import StepRunner

NEWEST = 0.25  # how much the newest measurement counts


@dataclass(slots=True)
class _Place:
    """How far the draft model has read a sequence, in the blocks that the sequence has now."""

    num_computed: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class _Drafting:
    """One sequence while its draft is made."""

    room: DraftRoom
    place: _Place
    token_ids: Ints = field(default_factory=ints)  # drafted so far


class DraftModel:
    """Draws with the request's own parameters and random numbers: where both models agree, so do their tokens.

    It reads a sequence's tokens itself, when it first drafts for it and after a preemption; a wrong page could make
    a draft worse, never an answer.
    """

    guesses = False

    def __init__(self, runner: StepRunner, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._max_tokens = max_num_batched_tokens
        self._places: dict[str, dict[int, _Place]] = {}
        self._num_steps = 0
        self._pass_seconds = 0.0  # of one drafted token for everyone

    def guess(self, sequence: Sequence) -> int | None:
        return None

    def is_strong(self, sequence: Sequence) -> bool:
        return True

    def can_draft(self, sequence: Sequence) -> bool:
        return True

    def seconds(self, length: int) -> float:
        return length * self._pass_seconds

    def draft(self, rooms: Listed[DraftRoom]) -> list[Ints]:
        drafting = [_Drafting(room, self._place(room.sequence)) for room in rooms]
        self._read(drafting)
        while unfinished := [one for one in drafting if len(one.token_ids) < one.room.num_tokens]:
            started = time.perf_counter()
            self._extend(unfinished)
            taken = time.perf_counter() - started
            self._pass_seconds += NEWEST * (taken - self._pass_seconds) if self._pass_seconds else taken
        return [one.token_ids for one in drafting]

    def forget(self, request_id: str) -> None:
        self._places.pop(request_id, None)

    def close(self) -> None:
        self._runner.close()

    def _place(self, sequence: Sequence) -> _Place:
        """A preempted sequence has other blocks; a refused draft is read again from where it went wrong."""
        of_request = self._places.setdefault(sequence.request.request_id, {})
        place = of_request.setdefault(sequence.index, _Place())
        if place.num_preemptions != sequence.num_preemptions:
            place.num_computed, place.num_preemptions = 0, sequence.num_preemptions
        place.num_computed = min(place.num_computed, len(sequence.token_ids) - 1)
        return place

    def _read(self, drafting: list[_Drafting]) -> None:
        """Everyone's known tokens, as many steps as that takes; the last of each gives the first drafted token."""
        starts = tuple(_row_start(one.room.sequence) for one in drafting)
        waiting = list(drafting)
        while waiting:
            budget, rows = self._max_tokens, []
            for one in waiting:
                count = min(len(one.room.sequence.token_ids) - one.place.num_computed, budget)
                if count:
                    rows.append((one, count))
                    budget -= count
            self._run(rows, starts)
            starts = ()
            waiting = [one for one in waiting if not one.token_ids]

    def _extend(self, drafting: list[_Drafting]) -> None:
        for first in range(0, len(drafting), self._max_tokens):
            self._run([(one, 1) for one in drafting[first : first + self._max_tokens]], ())

    def _run(self, rows: list[tuple[_Drafting, int]], starts: tuple[RowStart, ...]) -> None:
        """Each computes so many tokens, and gets one more if then all it has is computed."""
        sampled = [
            i
            for i, (one, count) in enumerate(rows)
            if one.place.num_computed + count == len(one.room.sequence.token_ids) + len(one.token_ids)
        ]
        nothing = ints()
        row_ids = [one.room.sequence.row for one, _ in rows]
        self._runner.launch(
            Step(
                step_id=self._num_steps,
                starts=starts,
                rows=ints(row_ids),
                num_computed=ints(one.place.num_computed for one, _ in rows),
                num_tokens=ints(count for _, count in rows),
                table_rows=nothing,
                table_indices=nothing,
                table_blocks=nothing,
                copy_sources=nothing,
                copy_targets=nothing,
                sample_sources=ints(sampled),
                sample_rows=ints(row_ids[i] for i in sampled),
            )
        )
        self._num_steps += 1
        result = self._runner.collect()
        for one, count in rows:
            one.place.num_computed += count
        for i, token_id in zip(sampled, result.token_ids, strict=True):
            rows[i][0].token_ids.append(token_id)


def _row_start(sequence: Sequence) -> RowStart:
    request = sequence.request
    return RowStart(
        row=sequence.row,
        token_ids=sequence.token_ids[:],
        block_ids=ints(sequence.block_ids),
        sampling=request.sampling.changed(structured=None, logprobs=None, prompt_logprobs=None),
        seed=request.seed,
        sample_index=sequence.index,
        num_prompt_tokens=request.num_prompt_tokens,
        stop_token_ids=request.stop_token_ids,
    )
