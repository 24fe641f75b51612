"""Scheduler: decides how many tokens each sequence computes in the next step. Prefill and decode are not phases."""

from collections.abc import Iterator

from quire.core.config import SchedulerConfig
from quire.core.draft import TokenTree
from quire.core.request import FinishReason, Phase, Request, Sequence
from quire.core.stats import SchedulerStats
from quire.core.step import Step
from quire.memory.paged import PagedMemory
from quire.scheduler.adapter_admission import AdapterAdmission
from quire.scheduler.admission import Admission
from quire.scheduler.drafts import Drafter, find_drafts, waits_for_drafts
from quire.scheduler.ordering import FairQueue, make_queue
from quire.scheduler.pacing import Pacing
from quire.scheduler.plan import ScheduledStep, StepPlan
from quire.scheduler.preemption import Preemption
from quire.scheduler.queue import SequenceGroup
from quire.scheduler.running import AdmissionPolicy, Branch, RunningBatch


class Scheduler:
    """Running sequences advance in the schedule's order; waiting groups are admitted while memory lasts.

    When a running sequence finds no block, the last group in that order (first come, first served: the newest) is
    preempted: its blocks are swapped out or freed, and it returns to the queue at its old position. The first group is
    never preempted for another, and no single request may need more than the pool, so some request always finishes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: PagedMemory,
        drafter: Drafter | None = None,
        preemption: Preemption | None = None,
        adapters: AdapterAdmission | None = None,
        policy: AdmissionPolicy | None = None,
    ) -> None:
        """`drafter`, `adapters`: None if no request speculates or has an adapter."""
        max_num_seqs, self._max_num_batched_tokens = config.limits
        self._max_prompt_chunk = config.max_prompt_chunk or self._max_num_batched_tokens  # chunked prefill
        self._pacing = Pacing(config.itl_seconds) if config.itl_goal != "off" else None
        self.memory = memory
        self.policy = policy or AdmissionPolicy()
        self.preemption = preemption or Preemption(config.preemption_mode)
        self.stats = SchedulerStats()
        self.waiting = make_queue(config, by_adapter=adapters is not None)
        # called by commit with the sequence of each output token; None: no share is charged
        self.charge = self.waiting.charge if isinstance(self.waiting, FairQueue) else None
        self._batch = RunningBatch(max_num_seqs, memory, self.waiting, self.policy)
        self._groups = self._batch.groups
        self.running = self._batch.sequences  # in the schedule's order
        self._admission = Admission(
            self._batch, memory, self.preemption, adapters, self.stats, self._max_prompt_chunk
        )
        self._drafter = drafter
        self._adapters = adapters
        self._finish_preempted_first = config.admit_after == "completed"
        self._preempted: set[str] = set()  # requests that were preempted and have not finished
        self._num_arrivals = 0
        self._stages = max(1, config.steps_in_flight)  # steps that run at the same time

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queues the request or raises QueueFull."""
        group = SequenceGroup(request, self._num_arrivals)
        self.waiting.add(group)
        self._num_arrivals += 1
        self._groups[request.request_id] = group

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """Ends the request's living sequences at once; returns them."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        ended = group.live
        for sequence in ended:
            self._batch.end(sequence, reason, keep=reason is FinishReason.STOP)
        self._forget(group)
        if reason is not FinishReason.STOP:
            self._batch.free_kept(request_id)
        self._batch.free_kept()
        return ended

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sequence that has an output; the request's others go on."""
        group = self._groups.get(request_id)
        if group is None or group.is_beams:  # indices of beams mean nothing to callers
            return False
        for sequence in group.live:
            # before that, others are still to be forked from it
            if sequence.index == index and sequence.num_outputs:
                self.finish(sequence, FinishReason.STOP)
                return True
        return False

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the sequence and frees its blocks and row. A token still in flight for it will be discarded."""
        group = self._groups[sequence.request.request_id]
        led = group.live[0] is sequence
        self._batch.end(sequence, reason, stop_reason, keep=True)
        if group.finished:
            self._forget(group)
        elif led and group.followers and group.request.request_id in self._batch.forking:
            self._batch.send_back(group)  # its followers need another leader
        self._batch.free_kept()

    def _forget(self, group: SequenceGroup) -> None:
        self._batch.forget(group)
        self._preempted.discard(group.request.request_id)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that may hold blocks, once."""
        living = (s for group in self._groups.values() for s in group.sequences)
        return iter({id(s): s for s in (*living, *self.policy.kept)}.values())

    # ------------------------------------------------------------------ one step

    def schedule(self) -> ScheduledStep | None:
        """Decides the next step, or None when nothing can advance before a result is committed."""
        if self._drafter is not None and waits_for_drafts(self._drafter, self.running):
            return None
        plan = StepPlan(self.stats.num_steps, self._prompt_budget())
        budget, preempted = self._advance(plan, self._max_num_batched_tokens)
        if not preempted:
            self._admission.admit(plan, budget, self._finish_preempted_first and bool(self._preempted))
            if not plan.sequences and plan.starts:  # only groups that are being swapped in
                self._advance(plan, budget)
        if not plan.sequences:
            return None
        self._batch.fork_finished_prompts(plan)
        plan.force_beam_tokens()
        if self.policy.kept:
            self.policy.extend(plan, self._max_num_batched_tokens - sum(plan.num_tokens))
        step = plan.step(self.memory.take_transfers(), self._adapters)
        for sequence, position, count in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True):
            sequence.num_computed = position + count
        for sequence in plan.receivers:
            sequence.num_pending += not sequence.is_beam
        self.stats.num_steps += 1
        return ScheduledStep(step, plan.sequences, plan.receivers)

    def _prompt_budget(self) -> int:
        """Tokens that prefills may take in the next step."""
        if self._pacing is None or not any(s.target - s.num_computed == 1 for s in self.running):
            return self._max_num_batched_tokens
        return self._pacing.prompt_tokens(len(self.running), self.waiting.num_tokens)

    def _advance(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Plans running sequences; returns the tokens left and whether a group was preempted.

        A chunk of a prefill never takes tokens that a decode or a draft needs.
        """
        running, memory = self.running, self.memory
        decodes_left: int | None = None  # counted only if a prefill competes with them
        preempted, position, drafts = False, 0, dict[int, TokenTree]()
        most = -(-len(running) // self._stages)  # decodes of a step, so that every stage has one
        if self._drafter is not None:
            drafts = find_drafts(self._drafter, running, memory, budget - len(running), plan.delta)
        while position < len(running) and budget > 0:
            sequence = running[position]
            position += 1
            distance = sequence.target - sequence.num_computed
            if self._stages > 1 and (sequence.num_pending or (distance == 1 and plan.num_decodes >= most)):
                continue  # its token is in another step of the pipeline, or its turn is in the next one
            draft = drafts.pop(sequence.row, None)
            if draft is not None:
                plan.verify(sequence, draft)
                budget -= 1 + len(draft)
                continue
            if distance == 1 and memory.has_room(sequence):  # decode
                plan.advance(sequence, 1)
                budget -= 1
                continue
            if distance > 1:  # prefill, or the rest of one
                if decodes_left is None:
                    decodes_left = sum(1 for s in running if s.target - s.num_computed == 1)
                reserved = max(0, decodes_left - plan.num_decodes) + sum(map(len, drafts.values()))
                distance = min(distance, budget - reserved, plan.prompt_budget, self._max_prompt_chunk)
            if distance <= 0:
                continue
            while not memory.allocate(sequence, sequence.num_computed + distance, plan.delta):
                preempted = True
                budget += self._preempt(running[-1], plan)
                if sequence.phase is not Phase.RUNNING:  # its own group was the last
                    return budget, True
            plan.advance(sequence, distance)
            budget -= distance
        return budget, preempted

    def _preempt(self, victim: Sequence, plan: StepPlan) -> int:
        """Sends the victim's whole group back to the queue; returns the tokens that this frees in the plan."""
        group = self._groups[victim.request.request_id]
        freed, origins = plan.take_back(group.live)
        running = group.running
        swapped = self.preemption.swaps(running, self.memory) and self.memory.swap.out(running, origins)
        self._batch.send_back(group, swapped=swapped)
        self._preempted.add(group.request.request_id)
        self.stats.num_preemptions += 1
        self.stats.num_swaps_out += swapped
        return freed

    # ------------------------------------------------------------------ results

    def committed(self, scheduled: ScheduledStep, is_valid: bool = True) -> None:
        """The step's result is known: its samples are no longer pending, and full blocks are cached if `is_valid`."""
        if is_valid:
            self._batch.cache_blocks(scheduled)
        for sequence in scheduled.receivers:
            if not sequence.is_beam and sequence.phase is not Phase.FINISHED:
                sequence.num_pending -= 1

    def measured(self, step: Step, seconds: float) -> None:
        """The step took so long."""
        num_tokens = sum(step.num_tokens)
        self.preemption.speed.note(num_tokens, seconds)
        if self._pacing is not None and not step.drafts:
            self._pacing.note(num_tokens, len(step.rows), seconds)

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Drops the positions of rejected draft tokens."""
        if sequence.phase is Phase.RUNNING:
            sequence.num_computed = num_computed

    def shed(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Takes back a step that did not fit the device: its newest request ends, the others compute again.

        From then on steps are half as large. Returns the sequences that ended.
        """
        self._max_num_batched_tokens = max(len(scheduled.sequences), self._max_num_batched_tokens // 2)
        newest = self._batch.take_back(scheduled)
        return [] if newest is None else self.abort(newest.request.request_id, FinishReason.ERROR)

    # ------------------------------------------------------------------ beams

    def beams(self, request_id: str) -> list[Sequence]:
        """A request's beams, best first."""
        return self._groups[request_id].live

    def branch(self, branches: list[Branch]) -> list[Sequence]:
        """Continues one request with these branches, best first; a beam without a branch ends. Returns its beams."""
        return self._batch.branch(self._groups[branches[0].beam.request.request_id], branches)
