"""Groups for tensors on GPUs: torch's symmetric memory, whose sums a CUDA graph records, or NCCL.

Bytes are counted where Python calls: a graph that is replayed counts once, when it is captured.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.observe.logs import get_logger
from quire.parallel.group import SUM, Group
from quire.parallel.processes import TorchGroup

BACKEND = "QUIRE_COLLECTIVES"  # the environment's choice: symmetric (default) or nccl
BUFFER = 32 << 20  # bytes of each rank that others read
ONE_SHOT = 512 << 10  # bytes up to which every rank reads all: longer sums are divided among the ranks
log = get_logger(__name__)


def device_groups(path: str, rank: int, size: int, device: torch.device) -> tuple[Group, Group]:
    """The group of tensors on `device`, and one for tensors on the CPU. `path`: a file for the ranks to meet at."""
    nccl = os.environ.get(BACKEND) == "nccl"
    host = TorchGroup("cpu:gloo,cuda:nccl" if nccl else "gloo", FileStore(path, size), rank, size)
    return host if nccl else SymmetricGroup(rank, size, device), host


class SymmetricGroup(Group):
    """Each rank has a buffer that all others map. A message goes there; kernels wait for each other on the device."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        world = dist.group.WORLD
        assert world is not None, "the ranks have met"
        self._name = world.group_name
        self._memory = symm_mem.empty(BUFFER, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._memory, world)

    def all_reduce(self, x: Tensor, tag: str, how: str = SUM) -> Tensor:
        if how != SUM or x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"a {how} over GPUs takes float32 or bfloat16, not {x.dtype}")
        flat, most = x.view(-1), BUFFER // x.element_size()
        for piece in flat.split(most):
            own = self._memory.view(x.dtype)[: piece.numel()]
            own.copy_(piece)
            if piece.nbytes <= ONE_SHOT:
                piece.copy_(torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._name))
            else:
                torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._name)
                piece.copy_(own)
        return super().all_reduce(x, tag, how)

    def _gathered(self, x: Tensor, widths: tuple[int, ...], wanted: bool) -> Tensor:
        most = BUFFER // (max(widths) * x.element_size())  # rows at a time
        whole = x.new_empty(x.shape[0], sum(widths)) if wanted else x
        for first in range(0, x.shape[0], most):
            rows = x[first : first + most]
            self._memory.view(x.dtype)[: rows.numel()].view(rows.shape).copy_(rows)
            self._handle.barrier()
            if wanted:
                parts = [
                    self._handle.get_buffer(rank, (rows.shape[0], width), x.dtype)
                    for rank, width in enumerate(widths)
                ]
                torch.cat(parts, dim=1, out=whole[first : first + most])
            self._handle.barrier()  # until all have read, nothing is written
        return whole

    def broadcast(self, x: Tensor, tag: str) -> Tensor:
        if self.rank == 0:
            self._memory.view(x.dtype)[: x.numel()].copy_(x.view(-1))
        self._handle.barrier()
        if self.rank > 0:
            x.view(-1).copy_(self._handle.get_buffer(0, (x.numel(),), x.dtype))
        self._handle.barrier()
        return super().broadcast(x, tag)

    def abort(self, why: str = "") -> None:
        """A kernel that waits for a rank cannot be ended: the process is, and its supervisor starts another."""
        log.error("the engine stopped: %s", why)
        os._exit(1)
