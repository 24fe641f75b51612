"""Scheduler: gives each sequence some tokens to compute. No phases; who is first is the schedule's to say."""

import time
from collections.abc import Callable, Iterator, Mapping

from quire.core.clock import Clock
from quire.core.config import SchedulerConfig
from quire.core.draft import TokenTree
from quire.core.request import FinishReason, Phase, Request, Sequence
from quire.core.stats import SchedulerStats
from quire.memory.interface import Memory
from quire.memory.paged import PagedMemory
from quire.scheduler.adapter_admission import LOOK_AHEAD, AdapterAdmission, Readiness
from quire.scheduler.batching.policy import choose_batching
from quire.scheduler.demand import blocks_promised, blocks_to_resume
from quire.scheduler.drafts import Drafter, find_drafts, waits_for_drafts
from quire.scheduler.ended import FinishedRows
from quire.scheduler.group import SequenceGroup
from quire.scheduler.order.policy import make_queue
from quire.scheduler.plan import StepPlan
from quire.scheduler.planned import ScheduledStep
from quire.scheduler.preemption import Preemption


class Scheduler:
    """Running sequences advance in the schedule's order; waiting groups are admitted while memory lasts.

    When a running sequence finds no block, the group that is last in that order (first come, first served: the
    newest) gives up everything, to host memory or for good, and returns to the queue at its old place. The first
    group is never preempted for another, and no single request may need more than the pool, so something always
    finishes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        drafter: Drafter | None = None,
        preemption: Preemption | None = None,
        clock: Clock = time.monotonic,
        adapters: AdapterAdmission | None = None,
    ) -> None:
        max_num_seqs, self._max_num_batched_tokens = config.limits
        self._max_prompt_chunk = config.max_prompt_chunk or self._max_num_batched_tokens
        self.batching = choose_batching(config, clock)
        self.memory = memory
        self._drafter = drafter  # None: nobody speculates
        self._adapters = adapters  # None: no request has one
        self.preemption = preemption or Preemption(config.preemption_mode)
        self._admits_new = config.admit_after == "resumed"  # else once all who were preempted have finished
        self._preempted: set[str] = set()  # requests that were, and have not finished
        self.waiting = make_queue(config, by_adapter=adapters is not None)
        self.running: list[Sequence] = []  # in the schedule's order
        self.ended = FinishedRows()  # rows that a static batch keeps until its last sequence ends
        self.watchers: list[Callable[[ScheduledStep], None]] = []  # told of every step as it is planned
        self.stats = SchedulerStats()
        self._groups: dict[str, SequenceGroup] = {}
        self._forking: dict[
            str, SequenceGroup
        ] = {}  # running groups whose forks or followers are still to come
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0
        self._next_step_id = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queues the request or raises QueueFull."""
        group = SequenceGroup(request, self._num_arrivals)
        self.waiting.add(group)
        self._num_arrivals += 1
        self._groups[request.request_id] = group

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """Ends whatever of the request still lives, at once; returns the sequences that it ended."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        ended = group.live
        for sequence in ended:
            self._end(sequence, reason, None, keep=reason is FinishReason.STOP)
        self._forget(group)
        if reason is not FinishReason.STOP:
            self._give_back(self.ended.take(request_id))
        self._end_batch_if_over()
        return ended

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sequence; the request's others go on."""
        group = self._groups.get(request_id)
        if group is None or group.is_beams:  # beams' indices mean nothing outside
            return False
        sequence = next((s for s in group.live if s.index == index), None)
        if sequence is not None:
            self.finish(sequence, FinishReason.STOP)
        return sequence is not None

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Releases the sequence's blocks and row, or keeps them while its batch lasts. A token still in flight for it
        will be discarded.
        """
        group = self._groups[sequence.request.request_id]
        led = group.live[0] is sequence
        self._end(sequence, reason, stop_reason, keep=True)
        if group.finished:
            self._forget(group)
        elif led and group.followers and group.request.request_id in self._forking:
            self._send_back(group)  # they cannot follow any more: another must lead
        self._end_batch_if_over()

    def _end(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None, keep: bool = False
    ) -> None:
        if keep and self.batching.keeps_ended and sequence.row >= 0:
            self.running.remove(sequence)
            self.ended.keep(sequence)
        else:
            self._leave_row(sequence)
            self.memory.release(sequence)
        sequence.phase = Phase.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

    def _forget(self, group: SequenceGroup) -> None:
        if group.queued:
            self.waiting.remove(group)
        self._groups.pop(group.request.request_id, None)
        self._preempted.discard(group.request.request_id)
        self._forking.pop(group.request.request_id, None)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that may hold blocks, once."""
        known = {id(s): s for group in self._groups.values() for s in group.sequences}
        known.update((id(s), s) for s in self.ended.sequences)
        return iter(known.values())

    # ------------------------------------------------------------------ one step

    def schedule(self) -> ScheduledStep | None:
        """Decides the next step, or None when nothing can advance before a result is committed."""
        if self._drafter is not None and waits_for_drafts(self._drafter, self.running):
            return None
        plan = StepPlan(self._next_step_id)
        budget, preempted = self._advance_running(plan, self._max_num_batched_tokens)
        if not preempted:
            self._admit(plan, budget)
            if not plan.sequences and plan.starts:  # only those came whose blocks are coming back
                self._advance_running(plan, budget)
        if not plan.sequences:
            return None
        self._fork_finished_prompts(plan)
        plan.force_beam_tokens()
        self.waiting.charge(plan.receivers)
        if self.ended:
            self.ended.compute(plan, self._max_num_batched_tokens - sum(plan.num_tokens))
        step = plan.step(self.memory.moves.take(), self._adapters)
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            sequence.num_computed += num_tokens
        for sequence in plan.receivers:
            sequence.num_pending += not sequence.is_beam
        self._next_step_id += 1
        self.stats.num_steps += 1
        planned = ScheduledStep(step, plan.sequences, plan.receivers)
        for watch in self.watchers:
            watch(planned)
        return planned

    def _advance_running(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Returns the tokens left and whether anyone was preempted. Decodes are never crowded out by chunks."""
        running, memory = self.running, self.memory
        decodes_left: int | None = None  # counted only if a prompt competes with them
        preempted = False
        position = 0
        drafts: dict[int, TokenTree] = {}
        if self._drafter is not None:
            drafts = find_drafts(self._drafter, running, memory, budget - len(running), plan.delta)
        while position < len(running) and budget > 0:
            sequence = running[position]
            position += 1
            distance = sequence.target - sequence.num_computed
            draft = drafts.get(sequence.row)
            if draft is not None:
                plan.verify(sequence, draft)
                budget -= 1 + len(draft)
                continue
            if distance == 1 and memory.has_room(sequence):
                plan.advance(sequence, 1)
                budget -= 1
                continue
            if distance > 1:
                if decodes_left is None:
                    decodes_left = sum(1 for s in running if s.target - s.num_computed == 1)
                planned_decodes = plan.num_decodes
                distance = min(
                    distance, budget - max(0, decodes_left - planned_decodes), self._max_prompt_chunk
                )
            if distance <= 0:
                continue
            while not memory.grow(sequence, sequence.num_computed + distance, plan.delta):
                preempted = True
                budget += self._preempt(running[-1], plan)
                if sequence.phase is not Phase.RUNNING:  # it was its own group's turn to go
                    return budget, True
            plan.advance(sequence, distance)
            budget -= distance
        return budget, preempted

    def _preempt(self, victim: Sequence, plan: StepPlan) -> int:
        """Sends the victim's whole group back to the queue; returns the tokens that this frees in the plan."""
        group = self._groups[victim.request.request_id]
        first = next((s for s in group.live if s in plan.sequences), group.live[0])
        freed = plan.drop_from(first)
        plan.starts = [s for s in plan.starts if s not in group.live]
        origins = plan.delta.take_back(group.live)
        running = [s for s in group.live if s.phase is Phase.RUNNING]
        swapped = self._swap_out(running, origins)
        self._send_back(group, keep=swapped)
        self._preempted.add(group.request.request_id)
        self.stats.num_preemptions += 1
        self.stats.num_swaps_out += swapped
        return freed

    def _swap_out(self, running: list[Sequence], origins: Mapping[int, int]) -> bool:
        memory = self.memory
        if not isinstance(memory, PagedMemory):
            return False  # memory that is reserved has nobody to preempt
        return self.preemption.swaps(running, memory) and memory.swap.out(running, origins)

    def _send_back(self, group: SequenceGroup, keep: bool = False) -> None:
        """Back to the queue. With `keep` what was computed waits in host memory."""
        for sequence in group.live:
            self._leave_row(sequence)
            if not keep:
                self.memory.release(sequence)
            sequence.phase = Phase.WAITING
            sequence.num_preemptions += 1
        self._forking.pop(group.request.request_id, None)
        self.waiting.put_back(group)
        self._end_batch_if_over()

    def shed(self, planned: ScheduledStep) -> list[Sequence]:
        """Takes back a step that did not fit: its newest request ends, the others compute again.

        From then on steps are half as large. Returns the sequences that ended.
        """
        self._max_num_batched_tokens = max(len(planned.sequences), self._max_num_batched_tokens // 2)
        for sequence in planned.receivers:
            sequence.num_pending -= not sequence.is_beam
        living = [s.request.request_id for s in planned.sequences if s.phase is Phase.RUNNING]
        groups = {request_id: self._groups[request_id] for request_id in living}
        if not groups:
            return []  # all of them ended while the step waited for its mask
        newest = max(groups.values(), key=lambda group: group.order)
        for group in groups.values():
            if group is not newest:
                self._send_back(group)
                group.unfork()
        return self.abort(newest.request.request_id, FinishReason.ERROR)

    # ------------------------------------------------------------------ admission

    def _admit(self, plan: StepPlan, budget: int) -> None:
        parked: list[SequenceGroup] = []  # whose adapter is on its way: others may go first
        promised = None  # blocks that running prompts will still take; counted only if someone waits
        room = self.batching.room(self.waiting, idle=not self.running and not self.ended)
        while budget > 0 and room > 0:
            group = self.waiting.peek()
            spoken_for = sum(g.num_rows_to_come for g in self._forking.values())
            if group is None or group.num_rows > len(self._free_rows) - spoken_for:
                self._close_batch()
                break
            if self._preempted and not (group.returns or self._admits_new):
                break
            if promised is None:
                promised = blocks_promised(self.memory, self.running, self._forking.values())
            ready = Readiness.READY
            if self._adapters is not None:
                alone = not plan.sequences and not (self._adapters.governs_all and self.running)
                ready = self._adapters.ready(group, promised + self._num_spare(), alone)
            if ready is Readiness.NO_ROOM:
                self._close_batch()
                break
            if len(parked) == LOOK_AHEAD:
                break
            if ready is not Readiness.READY:
                self.waiting.lay_aside()
                parked += [group] if ready is Readiness.LOADING else []
                continue
            if not group.is_swapped and self.preemption.waits_for_shelf(group.live[0], self.memory):
                break
            with self.memory.adapter_pages.holding(group.request.adapter):
                admit = self._swap_in_group if group.is_swapped else self._admit_group
                admitted = admit(group, plan, budget, promised)
            if admitted is None:
                self._close_batch()
                break
            self.batching.admitted()
            room -= 1
            budget -= admitted
            came = [s for s in group.live if s.phase is Phase.RUNNING]
            promised += blocks_promised(self.memory, came, [group])
        if self._adapters is not None:
            promised = blocks_promised(self.memory, self.running, self._forking.values())
            self._adapters.look_ahead(self.waiting, parked, promised + self._num_spare())
        for group in parked:
            self.waiting.take_up(group)

    def _num_spare(self) -> int:
        """Blocks that an admission leaves, so that decodes can go on a while."""
        return max(1, self.memory.num_blocks // 100) if self.running else 0

    def _has_room(self, needed: int, promised: int) -> bool:
        return needed + promised + self._num_spare() <= self.memory.num_free

    def _swap_in_group(self, group: SequenceGroup, plan: StepPlan, budget: int, promised: int) -> int | None:
        """Brings back all of the group or nothing. It advances in the next step: its blocks travel during this one."""
        swapped = [s for s in group.live if s.host_block_ids]
        num_away = len({host for s in swapped for host in s.host_block_ids})
        if not self._has_room(max(num_away, blocks_to_resume(self.memory, group)), promised):
            return None
        self.waiting.pop()
        self.stats.num_swaps_in += 1
        num_full = sum(s.num_computed // self.memory.block_size for s in swapped)
        for sequence in swapped:
            sequence.phase = Phase.RUNNING
            self._enter_row(sequence, plan)
        self.preemption.returned(self.memory.swap.back(swapped), num_full)
        if swapped[0].num_computed >= group.request.num_prompt_tokens:
            # now, for a beam that has computed all it knows may have no step in which others could follow it
            self._follow(swapped[0], [s for s in group.live if s.phase is Phase.WAITING], plan)
        if group.is_beams or group.num_rows_to_come:
            self._forking[group.request.request_id] = group
        return 0

    def _admit_group(self, group: SequenceGroup, plan: StepPlan, budget: int, promised: int) -> int | None:
        """Admits all of the group or nothing; returns the tokens that its leader computes now."""
        leader = group.live[0]
        num_found = self.memory.match(leader)
        if not self._fits(group, promised):
            self.memory.release(leader)
            return None
        self.waiting.pop()
        if leader.num_preemptions:
            num_full = (len(leader.token_ids) - 1) // self.memory.block_size
            self.preemption.returned(num_found // self.memory.block_size, num_full)
        if self.memory.home is not None and self.preemption.fetching_pays(self.memory):
            num_found += self.memory.fetch(leader)
        self.stats.num_admissions += 1
        self.memory.stats.prefix_queries += len(leader.token_ids)
        self.memory.stats.prefix_hits += num_found
        if not leader.num_preemptions:
            leader.num_cached = num_found
        leader.phase = Phase.RUNNING
        leader.num_computed = num_found
        self._enter_row(leader, plan)
        distance = min(leader.target - num_found, budget, self._max_prompt_chunk)
        self.memory.grow(leader, num_found + distance, plan.delta)
        plan.advance(leader, distance)
        if group.num_rows_to_come:
            self._forking[group.request.request_id] = group
        return distance

    def _fits(self, group: SequenceGroup, promised: int) -> bool:
        """Whether there is memory for the group, beside what is promised. What is reserved is taken here."""
        leader = group.live[0]
        if self.memory.reserves:
            return self.memory.reserve(leader, group.num_rows)
        return self._has_room(blocks_to_resume(self.memory, group) - len(leader.block_ids), promised)

    # ------------------------------------------------------------------ rows, samples, forks

    def _enter_row(self, sequence: Sequence, plan: StepPlan) -> None:
        sequence.row = self._take_row(sequence)
        plan.starts.append(sequence)
        running = self.running
        rank = self._groups[sequence.request.request_id].rank
        position = len(running)
        while position and self._groups[running[position - 1].request.request_id].rank > rank:
            position -= 1
        running.insert(position, sequence)

    def _take_row(self, sequence: Sequence) -> int:
        """A row for as long as the sequence runs; its adapter stays in its pages as long."""
        if sequence.request.adapter is not None:
            self.memory.adapter_pages.acquire(sequence.request.adapter)
        return self._free_rows.pop()

    def _leave_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            if sequence.request.adapter is not None:
                self.memory.adapter_pages.release(sequence.request.adapter)
            self._free_rows.append(sequence.row)
            self.running.remove(sequence)
            sequence.row = -1

    def _close_batch(self) -> None:
        """Nobody else fits. Where nobody runs either, those that ended make room."""
        self.batching.close()
        self._end_batch_if_over()

    def _end_batch_if_over(self) -> None:
        if self.ended and not self.running and not self.batching.is_open(self.waiting):
            self._give_back(self.ended.take())

    def _give_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.request.adapter is not None:
                self.memory.adapter_pages.release(sequence.request.adapter)
            self._free_rows.append(sequence.row)
            sequence.row = -1
            self.memory.release(sequence)

    @property
    def starts_at(self) -> float | None:
        """When those who only wait for company start at the latest, by the clock; None where nobody does."""
        return None if self.running or self.ended else self.batching.starts_at(self.waiting)

    def beams(self, request_id: str) -> list[Sequence]:
        """A request's beams, best first."""
        return self._groups[request_id].live

    def branch(self, branches: list[tuple[Sequence, int, float]]) -> list[Sequence]:
        """Beams go on: each branch is a beam of one request, its next token and its score with it, best first.

        A beam's first branch keeps its row and its blocks, others share the blocks; a beam without any dies.
        Returns the beams in the branches' order.
        """
        request = branches[0][0].request
        group = self._groups[request.request_id]
        parents = {id(beam) for beam, _, _ in branches}
        for beam in group.sequences:
            if id(beam) not in parents:
                self._end(beam, FinishReason.ABORT, None)
        indices = iter(set(range(len(branches) + len(parents))) - {b.index for b, _, _ in branches})
        beams: list[Sequence] = []
        for parent, _, _ in branches:
            if id(parent) in parents:
                parents.remove(id(parent))
                beams.append(parent)
                continue
            child = Sequence(request, next(indices), parent.token_ids[:], num_cached=parent.num_cached)
            self.memory.fork(parent, child, parent.num_computed)
            child.phase, child.num_preemptions = parent.phase, parent.num_preemptions
            if parent.row >= 0:
                child.row = self._take_row(child)
            beams.append(child)
        for beam, (_, token_id, score) in zip(beams, branches, strict=True):
            beam.token_ids.append(token_id)
            beam.score = score
        self._replace(group, beams)
        return beams

    def _replace(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Rows run in the beams' order, so that ties between candidates go to the better beam."""
        running = self.running
        group.sequences[:] = beams
        if any(beam.row >= 0 for beam in beams):
            request = group.request
            first = next(i for i, s in enumerate(running) if s.request is request)
            end = next(
                (i for i in range(first, len(running)) if running[i].request is not request), len(running)
            )
            running[first:end] = [beam for beam in beams if beam.row >= 0]

    def _fork_finished_prompts(self, plan: StepPlan) -> None:
        """Where this step completes a prompt, the request's other sequences begin from its blocks."""
        for group in list(self._forking.values()):
            leader, request = group.live[0], group.request
            if leader not in plan.sequences:
                continue
            source = plan.sequences.index(leader)
            num_computed = leader.num_computed + plan.num_tokens[source]
            if num_computed < request.num_prompt_tokens:
                continue
            if not group.is_beams:  # whose rows are kept for them as long as they run
                del self._forking[request.request_id]
            self._follow(leader, group.followers, plan)
            while group.num_unforked:  # these have no token of their own yet: they sample beside their leader
                child = Sequence(request, index=len(group.sequences), token_ids=leader.token_ids[:])
                group.sequences.append(child)
                child.phase = Phase.RUNNING
                child.num_cached = leader.num_cached
                self.memory.fork(leader, child, num_computed)
                self._enter_row(child, plan)
                plan.sample(source, child)

    def _follow(self, leader: Sequence, followers: list[Sequence], plan: StepPlan) -> None:
        """They begin from the prompt's full blocks, which their leader has computed."""
        full = leader.request.num_prompt_tokens // self.memory.block_size * self.memory.block_size
        for follower in followers:
            self.memory.fork(leader, follower, full)
            follower.phase = Phase.RUNNING
            self._enter_row(follower, plan)
