"""DraftModel: a small model proposes tokens that the target verifies. A second runner under the same block ids."""

import time
from collections import deque
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from statistics import median

from quire.core.draft import ROOT, Draft, DraftRoom, TokenTree
from quire.core.errors import DeviceMemoryFull
from quire.core.request import Ints, Sequence, ints
from quire.core.step import RowStart, Step, StepResult
from quire.engine.engine import StepRunner
from quire.engine.speculation import reads_history
from quire.observe.logs import get_logger
from quire.scheduler.plan import row_start
from quire.speculate.tree import parted

logger = get_logger(__name__)
RECENT_PASSES = 9  # whose median is what a pass takes: one that was disturbed does not count


@dataclass(slots=True)
class _Progress:
    """How far the draft model has computed a sequence, in the blocks that the sequence has now."""

    num_computed: int = 0
    num_preemptions: int = 0
    is_broken: bool = False  # its logits were not finite: nothing is drafted for it any more


@dataclass(slots=True)
class _Drafting:
    """One sequence while its draft is made: a token of each branch per level, branches parting at the root."""

    room: DraftRoom
    progress: _Progress
    is_drawn: bool  # its tokens are drawn, for rejection sampling
    decoder_start: int  # where its decoder's tokens begin; 0 without an encoder
    levels: list[Ints] = field(default_factory=list)

    @property
    def width(self) -> int:
        return len(self.levels[0]) if self.levels else 1

    @property
    def num_known(self) -> int:
        return len(self.room.sequence.token_ids)

    def next_step(self, budget: int) -> "_DraftRow":
        """What it computes next: known tokens, as many as the budget allows, or the level that was drafted last."""
        computed = self.progress.num_computed
        if not self.levels:
            count = min(self.num_known - computed, budget)
            cut = computed + count < self.decoder_start  # which an encoder's input must not be
            return _DraftRow(self, computed, 0 if cut else count, None)
        if self.width == 1 and not self.is_drawn:
            return _DraftRow(self, computed, 1, None)
        num_before = (len(self.levels) - 1) * self.width
        nodes, parents = ints(), ints([ROOT] * self.width + list(range(num_before)))
        for level in self.levels:
            nodes.extend(level)
        row = self.room.sequence.row
        grown = Draft(row, self.num_known, nodes, parents, is_growing=True)
        return _DraftRow(self, self.num_known + num_before, self.width, grown)

    def tree(self) -> TokenTree:
        if self.progress.is_broken:
            return TokenTree()
        tree = parted([[level[branch] for level in self.levels] for branch in range(self.width)])
        return replace(tree, drawn=len(self.levels)) if self.is_drawn else tree


@dataclass(frozen=True, slots=True)
class _DraftRow:
    """What one sequence computes in a step of the draft model."""

    draft: _Drafting
    num_computed: int
    count: int
    grown: Draft | None  # its tree so far, where it has several branches

    @property
    def num_samples(self) -> int:
        if self.grown is not None:
            return self.count
        known = self.draft.num_known + len(self.draft.levels)
        return int(self.num_computed + self.count == known)


class DraftModel:
    """Draws with the request's own parameters and random numbers: where both models agree, so do their tokens.

    It reads a sequence's tokens itself, when it first drafts for it and after a preemption, and its encoder reads a
    request's prompt for all its samples; a wrong page could make a draft worse, never an answer.
    """

    guesses = False

    def __init__(
        self, runner: StepRunner, max_num_batched_tokens: int, draws: bool = False, block_size: int = 1
    ) -> None:
        """`draws`: tokens of requests without a seed are drawn from its own distribution, for rejection sampling."""
        self._runner = runner
        self._block_size = block_size
        self._draws = draws
        self._max_tokens = max_num_batched_tokens
        self._progress_of: dict[str, dict[int, _Progress]] = {}
        self._num_steps = 0
        # of one drafted token of all sequences
        self._pass_seconds: deque[float] = deque(maxlen=RECENT_PASSES)
        self._pass_sizes: set[int] = set()  # of passes that have run: the first of a size is slow
        self._is_warned = False

    def guess(self, sequence: Sequence) -> int | None:
        return None

    def is_long_match(self, sequence: Sequence) -> bool:
        return True

    def can_draft(self, sequence: Sequence) -> bool:
        progress = self._progress_of.get(sequence.request.request_id, {}).get(sequence.index)
        return progress is None or not progress.is_broken

    def seconds(self, length: int) -> float:
        return length * median(self._pass_seconds) if self._pass_seconds else 0.0

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]:
        drafts = [self._drafting(room) for room in rooms]
        try:
            self._read(drafts)
            while unfinished := [
                d for d in drafts if len(d.levels) < d.room.length and not d.progress.is_broken
            ]:
                self._extend(unfinished)
        except DeviceMemoryFull as full:  # no request depends on a draft
            logger.warning("nothing is drafted in this step: %s", full)
            for draft in drafts:  # drafted tokens are not tokens of the sequence
                draft.progress.num_computed = min(draft.progress.num_computed, draft.num_known)
            return [TokenTree() for _ in rooms]
        return [draft.tree() for draft in drafts]

    def forget(self, request_id: str) -> None:
        self._progress_of.pop(request_id, None)

    def close(self) -> None:
        self._runner.close()

    def _drafting(self, room: DraftRoom) -> _Drafting:
        start = -(-room.sequence.request.num_encoder_tokens // self._block_size) * self._block_size
        return _Drafting(room, self._progress(room.sequence), self._draws and may_draw(room), start)

    def _progress(self, sequence: Sequence) -> _Progress:
        """A preempted sequence has other blocks; a refused draft is read again from where it went wrong."""
        of_request = self._progress_of.setdefault(sequence.request.request_id, {})
        progress = of_request.setdefault(sequence.index, _Progress())
        if progress.num_preemptions != sequence.num_preemptions:
            progress.num_computed, progress.num_preemptions = 0, sequence.num_preemptions
            progress.is_broken = False
        progress.num_computed = min(progress.num_computed, len(sequence.token_ids) - 1)
        return progress

    def _read(self, drafts: list[_Drafting]) -> None:
        """Computes all known tokens, in as many steps as needed; the last of each gives the first drafted tokens."""
        waiting = list(drafts)
        while waiting:
            budget, parts = self._max_tokens, list[_DraftRow]()
            encoding = set[str]()  # requests
            for draft in waiting:
                request_id = draft.room.sequence.request.request_id
                if not self._is_encoded(draft):
                    if request_id in encoding:
                        continue
                    encoding.add(request_id)
                part = draft.next_step(budget)
                if part.count:
                    parts.append(part)
                    budget -= part.count
            # a row whose prompt is encoded starts in the same step
            self._run(parts, tuple(_row_start(part.draft.room) for part in parts))
            waiting = [draft for draft in waiting if not (draft.levels or draft.progress.is_broken)]

    def _is_encoded(self, draft: _Drafting) -> bool:
        """Whether the prompt is, by this sequence or by another of its request, which has the encoder's blocks too."""
        own, start, request = draft.progress, draft.decoder_start, draft.room.sequence.request
        if own.num_computed < start and any(
            other.num_computed >= start and other.num_preemptions == own.num_preemptions
            for other in self._progress_of[request.request_id].values()
        ):
            own.num_computed = start
        return own.num_computed >= start

    def _extend(self, drafts: list[_Drafting]) -> None:
        parts: list[_DraftRow] = []
        for draft in drafts:
            if parts and sum(part.count for part in parts) + draft.width > self._max_tokens:
                self._run(parts, ())
                parts = []
            parts.append(draft.next_step(self._max_tokens))
        self._run(parts, ())

    def _run(self, parts: list[_DraftRow], starts: tuple[RowStart, ...]) -> None:
        """Each computes its part, and gets a token more at each of its ends if then all it has is computed."""
        samples = [
            (i, offset) for i, part in enumerate(parts) for offset in reversed(range(part.num_samples))
        ]
        rows = [part.draft.room.sequence.row for part in parts]
        grown = tuple(part.grown for part in parts if part.grown is not None)
        started = time.perf_counter()
        self._runner.launch(
            Step(
                step_id=self._num_steps,
                starts=starts,
                rows=ints(rows),
                num_computed=ints(part.num_computed for part in parts),
                num_tokens=ints(part.count for part in parts),
                sample_sources=ints(i for i, _ in samples),
                sample_rows=ints(rows[i] for i, _ in samples),
                drafts=grown,
                sample_offsets=ints(offset for _, offset in samples) if grown else ints(),
                drawn=self._drawn(parts),
            )
        )
        self._num_steps += 1
        result = self._runner.collect()
        self._note_seconds(parts, time.perf_counter() - started)
        self._take(parts, result)

    def _note_seconds(self, parts: list[_DraftRow], seconds: float) -> None:
        """Of passes that draft a token, also the first one of a draft; prefills are left out, and warm-up."""
        size = sum(part.count for part in parts)
        if size in self._pass_sizes and all(part.count <= max(2, part.num_samples) for part in parts):
            self._pass_seconds.append(seconds)
        self._pass_sizes.add(size)

    def _drawn(self, parts: list[_DraftRow]) -> Ints:
        """How many tokens each sample draws: one more of a branch, or as many as there are branches."""
        if not any(part.draft.is_drawn for part in parts):
            return ints()
        counts = ints()
        for part in parts:
            wanted = 1 if part.draft.levels else min(part.draft.room.width, self._max_tokens)
            counts.extend([wanted * part.draft.is_drawn] * part.num_samples)
        return counts

    def _take(self, parts: list[_DraftRow], result: StepResult) -> None:
        """A tree's pages are not moved when part of it is accepted: it is read again from its root."""
        first, failed = 0, set(result.failed)
        for part in parts:
            draft, samples = part.draft, range(first, first + part.num_samples)
            if part.grown is None:
                draft.progress.num_computed += part.count
            tokens = result.token_ids[first : samples.stop]
            if draft.is_drawn:
                tokens = ints(token_id for drawn in result.drawn[first : samples.stop] for token_id in drawn)
            elif tokens and not draft.levels and draft.room.width > 1:
                entry = result.logprobs[first]
                others = [] if entry is None else [t for t in entry.top_ids if t != tokens[0]]
                tokens.extend(others[: min(draft.room.width, self._max_tokens) - 1])
            first = samples.stop
            if len(tokens) < len(samples) or not failed.isdisjoint(samples):
                self._give_up(draft)
            elif tokens:
                draft.levels.append(tokens)

    def _give_up(self, draft: _Drafting) -> None:
        """No answer depends on a draft: its sequence goes on without."""
        draft.progress.is_broken = True
        draft.progress.num_computed = min(draft.progress.num_computed, draft.num_known)
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "the draft model gave logits that are not finite: sequences with such logits go on without drafts; "
                "check its weights, or try another dtype"
            )


def _row_start(room: DraftRoom) -> RowStart:
    num_top = room.width if room.width > 1 else None  # the likeliest first tokens, one of each branch
    start = row_start(room.sequence)
    sampling = start.sampling.changed(structured=None, logprobs=num_top, prompt_logprobs=None)
    return replace(start, sampling=sampling, adapter=None)


def may_draw(room: DraftRoom) -> bool:
    """Whether a draft's probabilities may decide: of requests that are drawn, without a seed, and plainly."""
    sampling = room.sequence.request.sampling
    plain = sampling.structured is None and sampling.logprobs is None and not reads_history(sampling)
    return plain and sampling.seed is None and not sampling.greedy
