"""RunningBatch: the sequences that hold a row of the runner. AdmissionPolicy: when waiting groups may join them."""

import operator
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from quire.core.request import FinishReason, Phase, Sequence
from quire.memory.paged import PagedMemory
from quire.scheduler.plan import ScheduledStep, StepPlan
from quire.scheduler.queue import SequenceGroup, WaitingQueue, blocks_promised


class AdmissionPolicy:
    """Continuous batching (Orca's iteration-level scheduling): waiting groups join at every step, and the row of a
    finished sequence is free at once. Other policies override these hooks.
    """

    kept: Listed[Sequence] = ()  # finished sequences that still hold their rows and blocks

    def room(self, waiting: WaitingQueue, running: Listed[Sequence]) -> int:
        """The number of waiting groups that may be admitted in this step, rows and memory permitting."""
        return len(waiting)

    def admitted(self, num_groups: int, is_full: bool) -> None:
        """Called after each step's admission. `is_full`: the next waiting group does not fit, or none waits."""

    def keep(self, sequence: Sequence) -> bool:
        """Whether a sequence that finishes keeps its row and blocks until `release` returns it."""
        return False

    def release(
        self, waiting: WaitingQueue, running: Listed[Sequence], request_id: str | None = None
    ) -> Listed[Sequence]:
        """Kept sequences that are to be freed now: of an aborted request, or of a batch that is over."""
        return ()

    def extend(self, plan: StepPlan, num_tokens: int) -> None:
        """Adds kept sequences to a step that has `num_tokens` left."""

    def wait(self, waiting: WaitingQueue) -> None:
        """Called when the engine is idle: a policy that delays a batch waits a moment here."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A beam with its next token, and its score with that token."""

    beam: Sequence
    token_id: int
    score: float


class RunningBatch:
    """Sequences in the schedule's order. A sequence keeps one row for as long as it runs."""

    def __init__(
        self, max_num_seqs: int, memory: PagedMemory, waiting: WaitingQueue, policy: AdmissionPolicy
    ) -> None:
        self.sequences: list[Sequence] = []
        self.groups: dict[str, SequenceGroup] = {}  # by request id: all that wait or run
        self.forking: dict[str, SequenceGroup] = {}  # running groups with forks or followers to come
        self.waiting = waiting
        self.policy = policy
        self._memory = memory
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Rows for new groups: forks to come have theirs kept free."""
        return len(self._free_rows) - sum(group.num_rows_to_come for group in self.forking.values())

    def blocks_promised(self) -> int:
        return blocks_promised(self._memory, self.sequences, self.forking.values())

    def enter(self, sequence: Sequence, plan: StepPlan) -> None:
        """The sequence runs from this step on."""
        sequence.phase = Phase.RUNNING
        self._take_row(sequence)
        plan.starts.append(sequence)
        running = self.sequences
        rank = self.groups[sequence.request.request_id].rank
        position = len(running)
        while position and self.groups[running[position - 1].request.request_id].rank > rank:
            position -= 1
        running.insert(position, sequence)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        keep: bool = False,
    ) -> None:
        """Frees the sequence's row and blocks. `keep`: unless the admission policy keeps them for now."""
        if keep and sequence.row >= 0 and self.policy.keep(sequence):
            self.sequences.remove(sequence)
        else:
            self._leave(sequence)
            self.release_blocks(sequence)
        sequence.phase = Phase.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

    def send_back(self, group: SequenceGroup, swapped: bool = False) -> None:
        """Returns the group to the queue. If `swapped`, host memory holds what it computed."""
        for sequence in group.live:
            self._leave(sequence)
            if not swapped:
                self.release_blocks(sequence)
            sequence.phase = Phase.WAITING
            sequence.num_preemptions += 1
        self.forking.pop(group.request.request_id, None)
        self.waiting.put_back(group)
        self.free_kept()

    def take_back(self, scheduled: ScheduledStep) -> SequenceGroup | None:
        """Takes back a step that was not computed: its groups return to the queue, but for the newest.

        Returns that one; None if all of them ended while the step waited for its mask.
        """
        for sequence in scheduled.receivers:
            sequence.num_pending -= not sequence.is_beam
        running = [s.request.request_id for s in scheduled.sequences if s.phase is Phase.RUNNING]
        groups = [self.groups[request_id] for request_id in dict.fromkeys(running)]
        newest = max(groups, key=lambda group: group.order, default=None)
        for group in groups:
            if group is not newest:
                self.send_back(group)
                group.unfork()
        return newest

    def cache_blocks(self, scheduled: ScheduledStep) -> None:
        """Enters the blocks that a computed step has filled into the prefix cache."""
        step, block_size = scheduled.step, self._memory.block_size
        ends = map(operator.add, step.num_computed, step.num_tokens)
        for sequence, end in zip(scheduled.sequences, ends, strict=True):
            if end // block_size > sequence.num_indexed and sequence.phase is Phase.RUNNING:
                self._memory.cache_full_blocks(sequence, end)

    def forget(self, group: SequenceGroup) -> None:
        """Drops a group whose sequences have all ended."""
        if group.queued:
            self.waiting.remove(group)
        self.groups.pop(group.request.request_id, None)
        self.forking.pop(group.request.request_id, None)

    def free_kept(self, request_id: str | None = None) -> None:
        """Frees what the policy keeps no longer: of an aborted request, or of a batch that is over."""
        if self.policy.kept:
            for sequence in self.policy.release(self.waiting, self.sequences, request_id):
                self._free_row(sequence)
                self.release_blocks(sequence)

    def release_blocks(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        sequence.num_computed = 0

    def _leave(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self.sequences.remove(sequence)
            self._free_row(sequence)

    def _take_row(self, sequence: Sequence) -> None:
        """The sequence's adapter stays in its pages for as long as it has the row."""
        if sequence.request.adapter is not None:
            self._memory.adapter_pages.acquire(sequence.request.adapter)
        sequence.row = self._free_rows.pop()

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.request.adapter is not None:
            self._memory.adapter_pages.release(sequence.request.adapter)
        self._free_rows.append(sequence.row)
        sequence.row = -1

    # ------------------------------------------------------------------ samples of one request

    def fork_finished_prompts(self, plan: StepPlan) -> None:
        """Where this step completes a prefill, the request's other sequences begin from its blocks."""
        for group in list(self.forking.values()):
            leader, request = group.live[0], group.request
            if leader not in plan.sequences:
                continue
            source = plan.sequences.index(leader)
            num_computed = leader.num_computed + plan.num_tokens[source]
            if num_computed < request.num_prompt_tokens:
                continue
            if not group.is_beams:  # rows for more beams are kept free as long as these run
                del self.forking[request.request_id]
            self.follow(leader, group.followers, plan)
            while group.num_unforked:  # forks have no token of their own yet: they sample beside their leader
                child = Sequence(request, index=len(group.sequences), token_ids=leader.token_ids[:])
                group.sequences.append(child)
                child.num_cached = leader.num_cached
                self._fork(leader, child, num_computed)
                self.enter(child, plan)
                plan.sample(source, child)

    def follow(self, leader: Sequence, followers: list[Sequence], plan: StepPlan) -> None:
        """Followers begin from the prompt's full blocks, which their leader has computed."""
        full = leader.request.num_prompt_tokens // self._memory.block_size * self._memory.block_size
        for follower in followers:
            self._fork(leader, follower, full)
            self.enter(follower, plan)

    def _fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        child.num_computed = self._memory.fork(parent, child, num_computed)

    # ------------------------------------------------------------------ beams of one request

    def branch(self, group: SequenceGroup, branches: list[Branch]) -> list[Sequence]:
        """Makes each branch a beam. A beam's first branch keeps its row and blocks, others share the blocks.

        A beam without a branch ends. Returns the beams in the branches' order.
        """
        parents = {id(branch.beam) for branch in branches}
        for beam in group.sequences:
            if id(beam) not in parents:
                self.end(beam, FinishReason.ABORT)
        used = {branch.beam.index for branch in branches}
        indices = iter(set(range(len(branches) + len(parents))) - used)
        beams: list[Sequence] = []
        for branch in branches:
            parent = branch.beam
            if id(parent) in parents:
                parents.remove(id(parent))
                beams.append(parent)
                continue
            child = Sequence(group.request, next(indices), parent.token_ids[:], num_cached=parent.num_cached)
            self._fork(parent, child, parent.num_computed)
            child.phase, child.num_preemptions = parent.phase, parent.num_preemptions
            if parent.row >= 0:
                self._take_row(child)
            beams.append(child)
        for beam, branch in zip(beams, branches, strict=True):
            beam.token_ids.append(branch.token_id)
            beam.score = branch.score
        self._replace(group, beams)
        return beams

    def _replace(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Rows run in the beams' order, so that ties between candidates go to the better beam."""
        running = self.sequences
        group.sequences[:] = beams
        if any(beam.row >= 0 for beam in beams):
            request = group.request
            first = next(i for i, s in enumerate(running) if s.request is request)
            end = next(
                (i for i in range(first, len(running)) if running[i].request is not request), len(running)
            )
            running[first:end] = [beam for beam in beams if beam.row >= 0]
