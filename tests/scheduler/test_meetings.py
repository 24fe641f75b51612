"""Where features meet: forks that return twice, adapters beside static batches and full pools, swaps in one plan."""

from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from quire.adapters.store import AdapterStore, HostLimits
from quire.core.config import SchedulerConfig
from quire.core.request import FinishReason, Phase, Request
from quire.core.sampling import SamplingParams
from quire.engine.policies import make_admission_policy
from quire.memory.paged import PagedMemory
from quire.scheduler.adapter_admission import AdapterAdmission
from quire.scheduler.plan import ScheduledStep, StepPlan
from quire.scheduler.preemption import Preemption
from quire.scheduler.queue import SequenceGroup
from quire.scheduler.running import Branch
from quire.scheduler.scheduler import Scheduler
from quire_lab.simulate.clock import VirtualClock


def _request(name: str, prompt: range, n: int, max_tokens: int, adapter: str | None = None) -> Request:
    sampling = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(name, tuple(prompt), sampling, 0, len(prompt) + max_tokens, adapter=adapter)


def _scheduler(
    memory: PagedMemory, mode: str, adapters: AdapterAdmission | None = None, **settings: Any
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128, **settings)
    policy = make_admission_policy(config, VirtualClock())
    return Scheduler(config, memory, preemption=Preemption(mode), adapters=adapters, policy=policy)


def _commit(scheduler: Scheduler, planned: ScheduledStep) -> None:
    """As the engine does; every sample of a request says something else."""
    scheduler.committed(planned)
    for sequence in planned.receivers:
        if sequence.phase is Phase.FINISHED:
            continue
        sequence.token_ids.append(100 + 50 * sequence.index + len(sequence.token_ids))
        if len(sequence.token_ids) >= sequence.request.max_len:
            scheduler.finish(sequence, FinishReason.LENGTH)


def _preempt(scheduler: Scheduler) -> None:
    scheduler._preempt(scheduler.running[-1], StepPlan(999, 64))


def test_a_sample_that_returns_twice_never_finds_anothers_blocks() -> None:
    memory = PagedMemory(40, 4, "f")
    scheduler = _scheduler(memory, "recompute")
    scheduler.add(_request("g", range(1, 9), 2, 40))
    for _ in range(10):
        _commit(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    _preempt(scheduler)
    for _ in range(4):
        _commit(scheduler, scheduler.schedule())  # type: ignore[arg-type]
    first, second = scheduler.beams("g")
    assert first.block_hashes[:2] == second.block_hashes[:2]  # the prompt's
    assert not set(first.block_hashes[2:]) & set(second.block_hashes[2:])
    theirs = set(first.block_ids[2:])
    scheduler.finish(first, FinishReason.STOP)
    _preempt(scheduler)
    planned = scheduler.schedule()
    assert planned is not None
    assert not theirs & set(second.block_ids[: planned.step.num_computed[0] // 4])


def test_a_beam_that_is_swapped_out_before_it_computed_anything_goes_on() -> None:
    """Its leader has computed all it knows and waits for it: nobody else would bring it back."""
    memory = PagedMemory(40, 4, "f", num_swap_blocks=8)
    preemption = Preemption("recompute")
    scheduler = Scheduler(SchedulerConfig(32, 128), memory, preemption=preemption)
    sampling = SamplingParams(use_beam_search=True, n=2, max_tokens=20)
    scheduler.add(Request("b", (1, 2, 3), sampling, 0, 23))  # no full block, which a follower would share
    assert scheduler.schedule() is not None
    leader = scheduler.beams("b")[0]
    leader, follower = scheduler.branch([Branch(leader, 10, -1.0), Branch(leader, 11, -2.0)])
    _preempt(scheduler)
    planned = scheduler.schedule()
    assert planned is not None
    assert planned.sequences == [leader]
    preemption._mode = "swap"
    _preempt(scheduler)
    assert scheduler.stats.num_swaps_out == 1
    planned = scheduler.schedule()
    assert planned is not None
    assert planned.sequences == [follower]
    memory.check_integrity(scheduler.sequences())


class _Copy:
    num_blocks = 4
    content = "c"


class _Copies:
    def want(self, key: str) -> _Copy:
        return _Copy()

    def hold(self, key: str) -> None: ...

    def let_go(self, key: str) -> None: ...


def _run(scheduler: Scheduler) -> None:
    for _ in range(200):
        planned = scheduler.schedule()
        if planned is not None:
            _commit(scheduler, planned)
        if not scheduler.has_work:
            break
        for group, _ in scheduler._adapters.take_failed() if scheduler._adapters else ():
            scheduler.abort(group.request.request_id)
    scheduler.memory.check_integrity(scheduler.sequences())


@pytest.mark.parametrize("resident", [False, True])
def test_a_request_that_can_never_fit_beside_its_adapter_fails_alone(resident: bool) -> None:
    memory = PagedMemory(12, 4, "f")
    line = AdapterAdmission(_Copies(), memory)
    scheduler = _scheduler(memory, "recompute", line)
    if resident:
        scheduler.add(_request("small", range(4), 1, 4, "A"))
        _run(scheduler)
    scheduler.add(_request("big", range(4), 1, 43, "A"))
    scheduler.add(_request("next", range(4), 1, 4, "A"))
    _run(scheduler)
    assert not scheduler.has_work


@pytest.mark.parametrize(("num_blocks", "most"), [(12, None), (40, 1)])
def test_a_static_batch_gives_its_adapters_back(num_blocks: int, most: int | None) -> None:
    memory = PagedMemory(num_blocks, 4, "f")
    scheduler = _scheduler(memory, "recompute", AdapterAdmission(_Copies(), memory, most), batching="static")
    for name in "ABCD":
        scheduler.add(_request(name, range(4), 1, 4, name))
    _run(scheduler)
    assert not scheduler.has_work
    assert memory.adapter_pages.in_use() == []


def test_who_leaves_in_the_plan_that_brings_it_back_starts_no_row() -> None:
    memory = PagedMemory(19, 4, "f", num_swap_blocks=64)
    scheduler = _scheduler(memory, "swap")
    scheduler.add(_request("old", range(200, 246), 1, 6))
    scheduler.add(_request("g1", range(1, 11), 8, 6))
    scheduler.add(_request("g2", range(51, 61), 8, 6))
    flying: deque[ScheduledStep] = deque()
    for _ in range(200):
        planned = scheduler.schedule()
        if planned is not None:
            flying.append(planned)
            assert all(start.row >= 0 for start in planned.step.starts)
        if len(flying) > 1 or (planned is None and flying):
            _commit(scheduler, flying.popleft())
        memory.check_integrity(scheduler.sequences())
        if not scheduler.has_work:
            break
    assert not scheduler.has_work


class _Packed:
    num_blocks, rank, num_bytes = 1, 1, 10

    def __init__(self, content: str) -> None:
        self.content = content


class _Reader:
    def read_folder(self, name: str, folder: Path) -> _Packed:
        return _Packed(name)


def test_a_copy_that_a_step_is_about_to_make_outlasts_the_limits(tmp_path: Path) -> None:
    library = AdapterStore(_Reader(), HostLimits(1 << 30, 1), None, 1)  # type: ignore[arg-type]
    keys = []
    for name in "AB":
        library.register(name, tmp_path)
        keys.append(library.resolve(name))
        library.begin(keys[-1])
    for key in keys:
        while library.want(key) is None:
            pass
        if key is keys[0]:
            library.hold(key)
    assert library.want(keys[0]) is not None
    library.let_go(keys[0])
    library.close()


def test_an_adapter_that_is_evicted_before_a_step_carried_it_is_held_once() -> None:
    """Held twice and let go once, its host copy could never be dropped."""
    held: Counter[str] = Counter()

    class Copies(_Copies):
        def hold(self, key: str) -> None:
            held[key] += 1

        def let_go(self, key: str) -> None:
            held[key] -= 1

    memory = PagedMemory(8, 4)
    line = AdapterAdmission(Copies(), memory)
    group = SequenceGroup(_request("r", range(1, 4), 1, 2, "A"), 0)
    line.prepare(group, 1)
    taken = [memory._take() for _ in range(8)]  # others need all blocks
    for block in taken:
        memory.pool.release(block, keep=False)
    assert not memory.adapter_pages.is_resident("A")
    line.prepare(group, 1)
    assert [load.key for load in line.take_loads()] == ["A"]
    assert held["A"] == 1  # until the step that carries it is launched
    line.take_loads()
    assert held["A"] == 0
