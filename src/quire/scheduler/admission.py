"""Admission: waiting groups join the running batch while rows, tokens and memory last."""

from contextlib import nullcontext

from quire.core.stats import SchedulerStats
from quire.memory.paged import PagedMemory
from quire.scheduler.adapter_admission import LOOK_AHEAD, AdapterAdmission, Readiness
from quire.scheduler.plan import StepPlan
from quire.scheduler.preemption import Preemption
from quire.scheduler.queue import SequenceGroup, blocks_promised, blocks_to_resume
from quire.scheduler.running import RunningBatch


class Admission:
    """Admits groups in the queue's order. A group that does not fit blocks those behind it."""

    def __init__(
        self,
        batch: RunningBatch,
        memory: PagedMemory,
        preemption: Preemption,
        adapters: AdapterAdmission | None,
        stats: SchedulerStats,
        max_prompt_chunk: int,
    ) -> None:
        self._batch = batch
        self._waiting = batch.waiting
        self._policy = batch.policy
        self._memory = memory
        self._preemption = preemption
        self._adapters = adapters
        self._stats = stats
        self._max_prompt_chunk = max_prompt_chunk

    def admit(self, plan: StepPlan, budget: int, only_returning: bool) -> None:
        """Adds groups to the plan, at most `budget` tokens. `only_returning`: no group that never ran."""
        waiting, memory = self._waiting, self._memory
        skipped: list[SequenceGroup] = []  # whose adapter is loading: groups behind them may go first
        promised: int | None = None  # blocks that running groups will still take; counted only if one waits
        room = self._policy.room(waiting, self._batch.sequences)
        num_admitted, is_full = 0, False
        while budget > 0 and plan.prompt_budget > 0 and num_admitted < room:
            group = waiting.peek()
            is_full = group is None or group.num_rows > self._batch.num_free_rows
            if group is None or is_full or (only_returning and not group.returns):
                break
            if promised is None:
                promised = self._batch.blocks_promised()
            readiness = self._readiness(group, promised, plan)
            is_full = readiness is Readiness.NO_ROOM
            if is_full or len(skipped) == LOOK_AHEAD:
                break
            if readiness is not Readiness.READY:
                waiting.skip()
                skipped += [group] if readiness is Readiness.LOADING else []
                continue
            may_load = memory.offload_cache is not None and not group.is_swapped
            if may_load and self._preemption.waits_for_disk(group.live[0], memory):
                break
            adapter = group.request.adapter
            with memory.adapter_pages.holding(adapter) if adapter is not None else nullcontext():
                admit = self._swap_in if group.is_swapped else self._start
                num_tokens = admit(group, plan, budget, promised)
            is_full = num_tokens is None
            if num_tokens is None:
                break
            num_admitted += 1
            budget -= num_tokens
            promised += blocks_promised(memory, group.running, [group])
        self._policy.admitted(num_admitted, is_full)
        if is_full:
            self._batch.free_kept()
        if self._adapters is not None:
            reserved = self._batch.blocks_promised() + self._num_spare()
            self._adapters.look_ahead(waiting, skipped, reserved)
        for group in skipped:
            waiting.unskip(group)

    def _readiness(self, group: SequenceGroup, promised: int, plan: StepPlan) -> Readiness:
        if self._adapters is None:
            return Readiness.READY
        alone = not plan.sequences and not (self._adapters.governs_all and self._batch.sequences)
        return self._adapters.ready(group, promised + self._num_spare(), alone)

    def _num_spare(self) -> int:
        """Blocks that an admission leaves free, so that decodes can go on for a while."""
        return max(1, self._memory.num_blocks // 100) if self._batch.sequences else 0

    def _swap_in(self, group: SequenceGroup, plan: StepPlan, budget: int, promised: int) -> int | None:
        """Brings back all of the group or nothing. It advances in the next step: its blocks are copied in this one."""
        memory = self._memory
        swapped = [s for s in group.live if s.host_block_ids]
        num_swapped = len({host for s in swapped for host in s.host_block_ids})
        needed = max(num_swapped, blocks_to_resume(memory, group))
        if needed + promised + self._num_spare() > memory.num_free:
            return None
        self._waiting.pop()
        self._stats.num_swaps_in += 1
        num_full = sum(s.num_computed // memory.block_size for s in swapped)
        for sequence in swapped:
            self._batch.enter(sequence, plan)
        self._preemption.returned(memory.swap.back(swapped), num_full)
        if swapped[0].num_computed >= group.request.num_prompt_tokens:
            # now: a beam that has computed all it knows may have no step in which others could follow it
            self._batch.follow(swapped[0], group.followers, plan)
        if group.is_beams or group.num_rows_to_come:
            self._batch.forking[group.request.request_id] = group
        return 0

    def _start(self, group: SequenceGroup, plan: StepPlan, budget: int, promised: int) -> int | None:
        """Admits all of the group or nothing; returns the tokens that its leader prefills in this step."""
        memory, leader = self._memory, group.live[0]
        num_cached = memory.match_prefix(leader)
        limit = min(budget, plan.prompt_budget, self._max_prompt_chunk)
        if group.request.num_encoder_tokens and not num_cached:  # an encoder takes its input in one step
            whole = memory.blocks_for(group.request.num_encoder_tokens) * memory.block_size
            if whole > budget:
                return None
            limit = max(limit, whole)
        headroom = promised + self._num_spare()
        if not memory.admit(leader, group.num_rows, blocks_to_resume(memory, group), headroom):
            self._batch.release_blocks(leader)
            return None
        self._waiting.pop()
        if leader.num_preemptions:
            num_full = (len(leader.token_ids) - 1) // memory.block_size
            self._preemption.returned(num_cached // memory.block_size, num_full)
        if memory.offload_cache is not None and self._preemption.fetching_pays(memory):
            num_cached += memory.fetch_prefix(leader)
        self._stats.num_admissions += 1
        memory.stats.prefix_queries += len(leader.token_ids)
        memory.stats.prefix_hits += num_cached
        if not leader.num_preemptions:
            leader.num_cached = min(num_cached, group.request.num_encoder_tokens or num_cached)
        leader.num_computed = num_cached
        self._batch.enter(leader, plan)
        num_tokens = min(leader.target - num_cached, limit)
        memory.allocate(leader, num_cached + num_tokens, plan.delta)
        plan.advance(leader, num_tokens)
        if group.num_rows_to_come:
            self._batch.forking[group.request.request_id] = group
        return num_tokens
