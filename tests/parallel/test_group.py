"""Collectives of real processes, and the bytes that they count."""

import math
import mmap
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quire.kernels import native
from quire.kernels.collective import cpu
from quire.kernels.collective.cpu import shared_file
from quire.kernels.native import Tape
from quire.parallel.group import LARGEST, Group
from quire.parallel.processes import SharedGroup, SymmetricGroup, TorchGroup
from quire.quant.full import FullPrecision

needs_native = pytest.mark.skipif(not native.available(), reason="shared memory needs the native kernels")
WIDTHS = (3, 1, 4)


def _shared(descriptor: int, rank: int, size: int) -> Group:
    memory = mmap.mmap(descriptor, SharedGroup.num_bytes(cpu, size))
    return SharedGroup(cpu, memory, 0, rank, size)


def _gloo(folder: str, rank: int, size: int) -> Group:
    return TorchGroup("gloo", dist.FileStore(os.path.join(folder, "store"), size), rank, size)


def _run(target: Callable[..., Any], open_group: Callable[..., Group], where: Any, size: int) -> list[Any]:
    """`target(group)` in `size` processes; what each returned."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def work(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        group = open_group(where, rank, size)
        found = target(group)
        group.numbers(0)  # what was sent has been received: the process may end
        results.put((rank, found))

    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    return [found[rank] for rank in range(size)]


def _all_kinds(group: Group) -> dict[str, Any]:
    rank, size = group.rank, group.size
    big = torch.full((1 << 21,), 1.0 + rank)  # two pieces of shared memory
    mine = torch.full((2, WIDTHS[rank]), float(rank))
    found = {
        "sum": group.all_reduce(torch.arange(5.0) * 10**rank, "a").tolist(),
        "int": group.all_reduce(torch.full((3,), 2**30 + rank, dtype=torch.int32), "a").tolist(),
        "largest": group.all_reduce(torch.tensor([rank * 1.0, -rank * 1.0]), "b", LARGEST).tolist(),
        "big": group.all_reduce(big, "big").unique().tolist(),
        "all_gather": group.all_gather(mine, WIDTHS[:size], "c").tolist(),
        "gather": group.gather(mine, WIDTHS[:size], "c").shape[1],
        "broadcast": group.broadcast(torch.full((4,), rank, dtype=torch.int32), "d").tolist(),
        "numbers": group.numbers(2**40 + rank),
    }
    if rank == 0:
        group.send(torch.arange(6.0), 1, "e")
    elif rank == 1:
        found["received"] = group.receive(torch.empty(6), 0, "e").tolist()
    return found | {"traffic": group.traffic()}


def _check_kinds(results: list[dict[str, Any]], size: int) -> None:
    columns = [float(rank) for rank in range(size) for _ in range(WIDTHS[rank])]
    for rank, found in enumerate(results):
        assert found["sum"] == [i * sum(10.0**r for r in range(size)) for i in range(5)]
        wrapped = size * 2**30 + size * (size - 1) // 2
        assert found["int"] == [(wrapped + 2**31) % 2**32 - 2**31] * 3
        assert found["largest"] == [size - 1.0, 0.0]
        assert found["big"] == [size * (size + 1) / 2]
        assert found["all_gather"] == [columns] * 2
        assert found["gather"] == (len(columns) if rank == 0 else WIDTHS[rank])
        assert found["broadcast"] == [0] * 4
        assert found["numbers"] == [2**40 + r for r in range(size)]
        traffic = found["traffic"]
        assert traffic["all_reduce", "a"] == 2 * (size - 1) * (5 + 3) * 4 // size
        assert (
            traffic["all_gather", "c"] == traffic["gather", "c"] == (size - 1) * 2 * len(columns) * 4 // size
        )
        assert traffic["broadcast", "d"] == 16
    assert results[1]["received"] == list(range(6))
    assert results[0]["traffic"]["send", "e"] == results[1]["traffic"]["receive", "e"] == 24


@needs_native
@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_gives_every_rank_the_same(size):
    descriptor = shared_file(SharedGroup.num_bytes(cpu, size))
    _check_kinds(_run(_all_kinds, _shared, descriptor, size), size)
    os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a temporary file takes its place here")
def test_shared_memory_is_limited_by_no_file_system():
    descriptor = shared_file(1 << 40)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
    assert os.fstat(descriptor).st_size == 1 << 40
    os.close(descriptor)


def test_gloo_gives_the_same(tmp_path):
    _check_kinds(_run(_all_kinds, _gloo, str(tmp_path), 2), 2)


class _Mapped:
    """What torch's handle does, over the memory of threads."""

    def __init__(self, memory: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._memory, self._barrier = memory, barrier

    def barrier(self) -> None:
        time.sleep(0.002 * random.random())
        self._barrier.wait(60)
        time.sleep(0.002 * random.random())

    def get_buffer(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        return self._memory[rank].view(dtype)[offset : offset + math.prod(shape)].view(shape)


def _symmetric(group: SymmetricGroup) -> None:
    rank, size = group.rank, group.size
    for turn in range(20):
        whole = group.gather(torch.full((5, WIDTHS[rank]), turn + rank * 100.0), WIDTHS[:size], "a")
        if rank == 0:
            wanted = [turn + 100.0 * each for each in range(size) for _ in range(WIDTHS[each])]
            assert whole.tolist() == [wanted] * 5
        assert group.broadcast(torch.full((3,), turn + rank), "b").tolist() == [turn] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_gpus_take_turns_with_the_memory_that_all_read(monkeypatch, size):
    monkeypatch.setattr("quire.parallel.processes.SUMS", 64)
    monkeypatch.setattr("quire.parallel.processes.EXCHANGE_BYTES", 32)  # of a gather that takes several turns
    memory = [torch.zeros(128, dtype=torch.uint8) for _ in range(size)]
    handle = _Mapped(memory, threading.Barrier(size))
    groups = [SymmetricGroup(rank, size, memory[rank], handle) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(_symmetric, groups))


class _SymmetricSums:
    """What torch.ops.symm_mem does, over the memory of threads; notes the sums that it made."""

    def __init__(self, memory: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._memory, self._barrier = memory, barrier
        self.made: list[tuple[str, torch.dtype, int]] = []

    def _sum(self, own: torch.Tensor, how: str, name: str) -> torch.Tensor:
        assert (how, name) == ("sum", "ranks")
        self._barrier.wait(60)
        whole = torch.zeros_like(own)
        for memory in self._memory:  # in the order of ranks
            whole += memory[: own.nbytes].view(own.dtype)
        self._barrier.wait(60)
        return whole

    def one_shot_all_reduce_out(self, own: torch.Tensor, how: str, name: str, out: torch.Tensor) -> None:
        self.made.append(("one shot", own.dtype, own.nbytes))
        out.copy_(self._sum(own, how, name))

    def two_shot_all_reduce_(self, own: torch.Tensor, how: str, name: str) -> None:
        self.made.append(("two shots", own.dtype, own.nbytes))
        own.copy_(self._sum(own, how, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_bytes", "pieces"), [(64, [64]), (96, [96]), (256, [256]), (600, [256, 256, 88])]
)
def test_sums_over_gpus_are_those_of_ranks_in_pieces_that_fit_their_memory(
    monkeypatch, dtype, num_bytes, pieces
):
    monkeypatch.setattr("quire.parallel.processes.SUMS", 256)
    monkeypatch.setattr("quire.parallel.processes.ONE_SHOT", 64)
    barrier = threading.Barrier(2)
    memory = [torch.zeros(256, dtype=torch.uint8) for _ in range(2)]
    sums = _SymmetricSums(memory, barrier)
    monkeypatch.setattr(torch.ops, "symm_mem", sums, raising=False)
    groups = [SymmetricGroup(rank, 2, memory[rank], _Mapped(memory, barrier), "ranks") for rank in range(2)]
    summed = torch.float32 if dtype is torch.float16 else dtype  # what the GPUs add in
    values = [torch.randn(num_bytes // summed.itemsize).to(dtype) for _ in range(2)]
    wanted = (values[0].to(summed) + values[1].to(summed)).to(dtype)
    with ThreadPoolExecutor(2) as threads:
        given = list(threads.map(lambda group: group.all_reduce(values[group.rank], "a"), groups))
    assert all(
        found is value and torch.equal(found, wanted) for found, value in zip(given, values, strict=True)
    )
    expected = [("one shot" if count <= 64 else "two shots", summed, count) for count in pieces]
    assert sorted(sums.made) == sorted(expected * 2)
    assert groups[0].traffic() == {("all_reduce", "a"): values[0].nbytes}


def test_sums_over_gpus_are_of_floating_point():
    group = SymmetricGroup(0, 2, torch.zeros(4), None)
    with pytest.raises(TypeError, match=r"a sum over GPUs takes floating point, not torch\.int32"):
        group.all_reduce(torch.zeros(2, dtype=torch.int32), "a")
    with pytest.raises(TypeError, match="a largest over GPUs takes floating point"):
        group.all_reduce(torch.zeros(2), "a", LARGEST)


def _many_sent(group: Group) -> int:
    for turn in range(40):
        if group.rank == 0:
            group.send(torch.full((4,), float(turn)), 1, "a")
        else:
            assert group.receive(torch.empty(4), 0, "a").tolist() == [turn] * 4
    return len(group._sent)


def test_gloo_keeps_few_of_the_tensors_that_were_sent(tmp_path):
    assert max(_run(_many_sent, _gloo, str(tmp_path), 2)) <= 5


def _joined(group: Group) -> list[list[float]]:
    """Of deterministic GEMMs, of which the ranks have 64 and 128 columns."""
    torch.manual_seed(0)
    x, weight, bias, residual = torch.randn(3, 192), torch.randn(10, 192), torch.randn(10), torch.randn(3, 10)
    mine = slice(0, 64) if group.rank == 0 else slice(64, 192)
    matrix = FullPrecision(torch.float32, torch.device("cpu"), True).matrix(10, mine.stop - mine.start)
    matrix.load_rows(0, weight[:, mine])
    y = matrix.joined(x[:, mine].contiguous(), bias, residual.clone(), group, "a")
    torch.testing.assert_close(y, x @ weight.T + bias + residual)
    return y.tolist()


@needs_native
def test_each_rank_goes_on_with_the_sums_of_the_ranks_before():
    descriptor = shared_file(SharedGroup.num_bytes(cpu, 2))
    first, second = _run(_joined, _shared, descriptor, 2)
    assert first == second
    os.close(descriptor)


def _taped(group: Group) -> tuple[list[float], dict[tuple[str, str], int]]:
    x, found = torch.empty(4), []
    with Tape() as tape:
        group.all_reduce(x, "taped")
    for turn in range(3):
        x.fill_(turn + group.rank)
        tape.replay()
        found.append(float(x[0]))
    return found, group.traffic()


@needs_native
def test_a_tape_replays_a_collective_and_its_bytes_are_counted_each_time():
    descriptor = shared_file(SharedGroup.num_bytes(cpu, 2))
    for found, traffic in _run(_taped, _shared, descriptor, 2):
        assert found == [1.0, 3.0, 5.0]
        assert traffic == {("all_reduce", "taped"): 4 * 16}
    os.close(descriptor)


@pytest.mark.parametrize("call", ["numbers", "receive"])
@needs_native
def test_a_rank_that_waits_for_another_is_seen_to(call):
    descriptor = shared_file(SharedGroup.num_bytes(cpu, 2))
    group = _shared(descriptor, 0, 2)
    assert not group.waits()
    arguments = (0,) if call == "numbers" else (torch.empty(4), 1, "a")
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(getattr(group, call), *arguments)
        deadline = time.monotonic() + 60
        while not group.waits():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        group.abort()
        result.result(60)
    assert not group.waits()
    os.close(descriptor)


@needs_native
def test_an_abort_ends_a_wait():
    descriptor = shared_file(SharedGroup.num_bytes(cpu, 2))
    group = _shared(descriptor, 0, 2)
    context = multiprocessing.get_context("fork")
    waiting = context.Process(target=lambda: _shared(descriptor, 1, 2).all_reduce(torch.ones(4), "a"))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    group.abort()
    waiting.join(60)
    assert waiting.exitcode == 0
    os.close(descriptor)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_fake_group_counts_by_the_formulas(size):
    group = Group(1 if size > 1 else 0, size)
    group.all_reduce(torch.zeros(3, 16), "h")
    group.gather(torch.zeros(3, 2), (2,) * size, "v")
    expected = {
        ("all_reduce", "h"): 2 * (size - 1) * 3 * 16 * 4 // size,
        ("gather", "v"): (size - 1) * 3 * 2 * 4,
    }
    assert group.traffic() == (dict.fromkeys(expected, 0) if size == 1 else expected)
