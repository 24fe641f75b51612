"""Ranks of one model: what each needs, and how rank 0 starts its peers (engine/build/peer.py)."""

import mmap
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from quire.core.config import EngineConfig, ModelConfig, ParallelConfig
from quire.core.errors import ConfigError
from quire.engine.build.rank_memory import part_bytes
from quire.engine.build.resolve import BuildPlan, Progress, make_plan, resolve_device
from quire.kernels import native
from quire.kernels.collective import cpu as collective
from quire.layers.factory import RankPart
from quire.parallel.cut import cut_layers, cut_model
from quire.parallel.group import Group
from quire.parallel.processes import EXCHANGE_BYTES, START, SUMS, SharedGroup, SymmetricGroup, TorchGroup
from quire.parallel.ranks import RankProcesses
from quire.weights.architectures import KNOWN

VERSION = str(import_module("quire").__version__)
PEERS = {"mp": "quire.engine.build.peer", "ray": "quire.link.ray_ranks"}  # programs of ranks 1 and up
BACKEND = "QUIRE_COLLECTIVES"  # the environment's choice for GPUs: symmetric (default) or nccl
SHARED_CARD = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch: ranks may share a GPU
# of this process, by name: torch numbers what it tells peers, and those of a second one would begin with other numbers
_symmetric_groups: list[str] = []


def start_ranks(config: EngineConfig, progress: Progress | None) -> tuple[BuildPlan, RankProcesses]:
    """Rank 0's plan, and its peers, which load meanwhile. ConfigError where the model cannot be cut."""
    parallel = config.parallel
    plan = make_plan(on_rank(config, 0), progress)
    check_ranks(config, plan.model, plan.precision.device.type == "cuda")
    cut_model(plan.model, 0, parallel.tensor_parallel_size)
    cut_layers(plan.model, parallel.pipeline_parallel_size)
    device = plan.precision.device.type  # `auto` may be another one on another machine
    memory, address = _rendezvous_place(config, device)
    runner = replace(config.runner, num_threads=plan.num_threads, device=device)
    described: dict[str, Any] = {
        "config": asdict(replace(config, runner=runner)),
        "version": VERSION,
        "fingerprint": plan.source.fingerprint,
        "address": address,
    }
    peers = RankProcesses(PEERS[parallel.distributed_executor_backend], parallel.num_ranks, memory, described)
    try:
        part = rank_part(plan, memory, 0, address, peers.check)
    except BaseException:
        try:
            peers.check()  # a rank that failed is the reason
        finally:
            peers.close()
            if dist.is_initialized() and dist.get_backend() != "nccl":  # which would wait for the peers
                dist.destroy_process_group()
        raise
    finally:
        os.close(memory)
    peers.attach(part.group, part.stages, part.world)
    return replace(plan, part=part), peers


def rank_part(
    plan: BuildPlan, memory: int, rank: int, address: str, check: Callable[[], None] = lambda: None
) -> RankPart:
    """What rank `rank` computes, and with whom: ranks of one stage follow each other.

    `memory` is a file without a name, in which ranks on GPUs find each other and those on a CPU exchange tensors; of
    ranks on several machines it is the socket with which rank 0 listens at `address`. `check`: raises if a rank failed.
    """
    device = plan.precision.device
    if device.type == "cuda":
        size = plan.config.parallel.num_ranks
        from torch._C._distributed_c10d import FileStore  # not every torch has it

        # torch opens it by its name again and again, so this process keeps it open
        store = _rendezvous(FileStore(f"/proc/self/fd/{os.dup(memory)}", size), rank, size, check)
        group, world = device_groups(store, "ranks", rank, size, device)
        return RankPart(cut_model(plan.model, rank, size), group, world=world)
    if not native.available():
        raise ConfigError("several ranks on a CPU need the native kernels: install a C++ compiler")
    parallel = plan.config.parallel
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, within = divmod(rank, size)
    layers = cut_layers(plan.model, num_stages)[stage] if num_stages > 1 else None
    cut = cut_model(plan.model, within, size)
    if parallel.distributed_executor_backend == "ray":
        from torch._C._distributed_c10d import TCPStore  # not every torch has it

        host, _, port = address.rpartition(":")
        own = os.dup(memory) if rank == 0 else None
        listening = TCPStore(
            host or "localhost", int(port), None, rank == 0, START, False, master_listen_fd=own
        )
        store = _rendezvous(listening, rank, parallel.num_ranks, check)
        all_ranks = TorchGroup("gloo", store, rank, parallel.num_ranks)
        stages = [range(first, first + size) for first in range(0, parallel.num_ranks, size)]
        rings = [range(first, parallel.num_ranks, size) for first in range(size)]
        return RankPart(cut, all_ranks.divided(stages), all_ranks.divided(rings), layers, all_ranks)
    mapped, first = mmap.mmap(memory, 0), _shared_bytes(parallel)
    shared = None
    if len(mapped) > first:
        shared = torch.frombuffer(mapped, dtype=torch.uint8, offset=first).view(parallel.num_ranks, -1)
    of_stage, of_ring = (SharedGroup.num_bytes(collective, count) for count in (size, num_stages))
    group = SharedGroup(collective, mapped, stage * of_stage, within, size)
    ring = SharedGroup(collective, mapped, num_stages * of_stage + within * of_ring, stage, num_stages)
    world = SharedGroup(collective, mapped, num_stages * of_stage + size * of_ring, rank, parallel.num_ranks)
    return RankPart(cut, group, ring, layers, world, shared)


def device_groups(store: Any, name: str, rank: int, size: int, device: torch.device) -> tuple[Group, Group]:
    """The group of tensors on `device`, and one for tensors on the CPU; of symmetric memory once in a process."""
    nccl = os.environ.get(BACKEND) == "nccl"
    host = TorchGroup("cpu:gloo,cuda:nccl" if nccl else "gloo", store, rank, size)
    if nccl:
        return host, host
    # not every torch has these
    from torch._C._distributed_c10d import PrefixStore, _register_process_group, _SymmetricMemory

    assert dist.group.WORLD is not None, "after the rendezvous"
    _symmetric_groups.append(name)
    _register_process_group(name, dist.group.WORLD)  # type: ignore[arg-type]  # of some versions a type of its own
    _SymmetricMemory.set_group_info(name, rank, size, PrefixStore("symmetric", store))
    memory = _SymmetricMemory.empty_strided_p2p((SUMS + 2 * EXCHANGE_BYTES,), (1,), torch.uint8, device)
    return SymmetricGroup(rank, size, memory, _SymmetricMemory.rendezvous(memory, name), name), host


def _rendezvous(store: Any, rank: int, size: int, check: Callable[[], None]) -> Any:
    """Waits until every rank has registered; `check` raises if one failed. Returns the store."""
    store.set(str(rank), "")
    names = [str(each) for each in range(size)]
    while rank == 0 and not store.check(names):
        check()
        time.sleep(0.05)
    return store


def _rendezvous_place(config: EngineConfig, device: str) -> tuple[int, str]:
    """A descriptor that is the first rank's, or shared by all, and the `address` of `rank_part`."""
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        both = socket.has_dualstack_ipv6()  # Ray's name for this machine may be of either kind
        family = socket.AF_INET6 if both else socket.AF_INET
        listening = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        port = listening.getsockname()[1]
        return listening.detach(), str(port)
    num_bytes = _shared_bytes(parallel) + parallel.num_ranks * part_bytes(config.memory)
    return collective.shared_file(0 if device == "cuda" else num_bytes), ""


def _shared_bytes(parallel: ParallelConfig) -> int:
    """A group per stage, a ring of stages per rank of a stage, and one group of all."""
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    of_stage, of_ring, of_all = (
        SharedGroup.num_bytes(collective, count) for count in (size, num_stages, parallel.num_ranks)
    )
    return num_stages * of_stage + size * of_ring + of_all


def on_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """With the device of this rank: each has a GPU of its own, or a share of one."""
    size, device = config.parallel.ranks_on_machine, resolve_device(config.runner.device)
    if device.type != "cuda":
        return config
    count = torch.cuda.device_count()
    if size > count and os.environ.get(SHARED_CARD) != "1":
        raise ConfigError(
            f"rank {count} has no GPU: tensor_parallel_size={size} needs {size} and PyTorch sees {count}; lower it, or "
            f"set {SHARED_CARD}=1 to let ranks share a card"
        )
    torch.cuda.set_device(rank % count)
    share = config.memory.gpu_memory_utilization / len(range(rank % count, size, count))
    memory = replace(config.memory, gpu_memory_utilization=share)
    return replace(config, memory=memory, runner=replace(config.runner, device=f"cuda:{rank % count}"))


def can_be_cut(architecture: str) -> bool:
    """Whether ranks can hold parts of its layers. Norms of OLMo 2 and 3 are of all heads together."""
    return KNOWN[architecture].file == "llama" and not architecture.startswith("Olmo")


def check_ranks(config: EngineConfig, model: ModelConfig, on_gpu: bool) -> None:
    """ConfigError for what ranks cannot do yet."""
    memory, drafts, why = config.memory, config.speculative_config, ""
    stages = config.parallel.pipeline_parallel_size
    if not can_be_cut(model.architecture):
        why = f"{model.architecture} cannot be cut into ranks: choose a Llama-type model"
    elif memory.kv_offload_dir is not None and (
        on_gpu or config.parallel.distributed_executor_backend == "ray"
    ):
        why = "kv_offload_dir is for ranks on one machine's CPU: leave it out (kv_offload_gb works)"
    elif memory.cpu_offload_gb or memory.weights_memory_gb is not None:
        why = "weights of ranks do not stream: leave out cpu_offload_gb and weights_memory_gb"
    elif config.adapters.lora_mode == "merge":
        why = "lora_mode='merge' changes weights of one rank: choose batched"
    elif stages > 1 and any(model.windows):
        why = "stages of a pipeline keep all positions of every layer: leave out pipeline_parallel_size"
    elif stages > 1 and on_gpu:
        why = "stages run on a CPU only so far: leave out pipeline_parallel_size"
    elif config.parallel.distributed_executor_backend == "ray" and on_gpu:
        why = "ranks on several machines run on a CPU only so far: leave out distributed_executor_backend"
    elif on_gpu and _symmetric_groups:
        why = "this process had such an engine on GPUs, and can have one only: start another process"
    elif (config.parallel.distributed_executor_backend == "ray" or on_gpu) and dist.is_initialized():
        why = "torch.distributed is in use in this process, by an engine perhaps: close it (with NCCL, end the process)"
    elif config.adapters.enabled and on_gpu:
        why = "adapters of several ranks run on a CPU only so far: leave out enable_lora, lora_modules and lora_dir"
    elif stages > 1 and drafts is not None and drafts.tree_width > 1:
        why = "stages of a pipeline do not know which branch of a tree was accepted: leave out tree_width"
    if why:
        raise ConfigError(f"a model on {config.parallel.num_ranks} ranks: {why}, or have one rank")
