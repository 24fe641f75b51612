"""Ranks of one model: what each needs, and how rank 0 starts its peers (engine/build/peer.py)."""

import os
from dataclasses import asdict, replace
from importlib import import_module

import torch

from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.engine.build.resolve import BuildPlan, Progress, make_plan, resolve_device
from quire.kernels import native
from quire.kernels.collective import cpu as collective
from quire.layers.factory import RankPart
from quire.parallel.cut import cut_model
from quire.parallel.group import Group
from quire.parallel.processes import SharedGroup, shared_file
from quire.parallel.ranks import RankProcesses
from quire.weights.architectures import KNOWN

VERSION = str(import_module("quire").__version__)
PEER = "quire.engine.build.peer"  # the program of ranks 1 and up
SHARED_CARD = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch: ranks may share a GPU


def start_ranks(config: EngineConfig, progress: Progress | None) -> tuple[BuildPlan, RankProcesses]:
    """Rank 0's plan, and its peers, which load meanwhile. ConfigError where the model cannot be cut."""
    size = config.parallel.num_ranks
    plan = make_plan(on_rank(config, 0), progress)
    _check(config, plan.model)
    cut = cut_model(plan.model, 0, size)
    memory = shared_file(SharedGroup.num_bytes(collective, size))
    described = {"config": asdict(config), "version": VERSION, "fingerprint": plan.source.fingerprint}
    peers = RankProcesses(PEER, size, memory, described)
    group = open_group(plan, memory, 0, size)
    os.close(memory)
    peers.attach(group)
    return replace(plan, part=RankPart(cut, group)), peers


def on_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """With the device of this rank: each has a GPU of its own."""
    size, device = config.parallel.num_ranks, resolve_device(config.runner.device)
    if device.type != "cuda":
        return config
    count = torch.cuda.device_count()
    if size > count and os.environ.get(SHARED_CARD) != "1":
        raise ConfigError(
            f"rank {count} has no GPU: tensor_parallel_size={size} needs {size} and PyTorch sees {count}; lower it, or "
            f"set {SHARED_CARD}=1 to let ranks share a card"
        )
    torch.cuda.set_device(rank % count)
    return replace(config, runner=replace(config.runner, device=f"cuda:{rank % count}"))


def _check(config: EngineConfig, model: ModelConfig) -> None:
    """ConfigError for what ranks cannot do yet."""
    size, memory = config.parallel.num_ranks, config.memory
    why = ""
    if KNOWN[model.architecture].file != "llama" or model.architecture == "Olmo2ForCausalLM":
        why = f"{model.architecture} cannot be cut into ranks: choose a Llama-type model"
    elif memory.kv_offload_dir is not None:
        why = "kv_offload_dir is for one rank: leave it out (kv_offload_gb works)"
    elif memory.cpu_offload_gb or memory.weights_memory_gb is not None:
        why = "weights of ranks do not stream: leave out cpu_offload_gb and weights_memory_gb"
    elif config.adapters.lora_mode == "merge":
        why = "lora_mode='merge' changes weights of one rank: choose batched"
    if why:
        raise ConfigError(f"tensor_parallel_size={size}: {why}, or leave out tensor_parallel_size")


def open_group(plan: BuildPlan, memory: int, rank: int, size: int) -> Group:
    if not native.available():
        raise ConfigError("tensor_parallel_size on a CPU needs the native kernels: install a C++ compiler")
    return SharedGroup(collective, native, memory, rank, size)
