"""Building an engine: what is refused before anything is loaded."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quire.core import laboratory
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import assemble, build, peer, ranks, resolve
from quire.engine.build.resolve import BuildPlan
from quire.layers.factory import RankPart
from quire.parallel.group import Group
from quire.parallel.processes import TorchGroup


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--device simulated", {"device": "simulated"}),
        ("--lora-mode merge", {"enable_lora": True, "lora_mode": "merge", "quantization": "none"}),
    ],
)
def test_without_the_laboratory_its_settings_say_how_to_install_it(monkeypatch, flag, settings):
    monkeypatch.setattr(laboratory, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="pip install") as refusal:
        build(EngineConfig.of(**settings))
    assert flag in str(refusal.value)


def test_a_build_that_fails_leaves_no_process_group(monkeypatch):
    """Another engine of ranks on several machines may follow in this process."""

    def fail(*_arguments: object) -> None:
        raise ConfigError("no")

    part = RankPart(None, Group(), world=TorchGroup("gloo", dist.HashStore(), 0, 1))
    peers = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(assemble, "start_ranks", lambda *_arguments: (SimpleNamespace(part=part), peers))
    monkeypatch.setattr(assemble, "assemble", fail)
    with pytest.raises(ConfigError):
        build(EngineConfig.of(tensor_parallel_size=2))
    assert not dist.is_initialized()


def test_ranks_on_gpus_find_each_other_in_a_file_that_leaves_nothing(monkeypatch):
    config = EngineConfig.of(tensor_parallel_size=2)
    plan = SimpleNamespace(
        config=config,
        model=resolve.make_plan(config).model,
        precision=SimpleNamespace(device=torch.device("cuda")),
    )
    stores: list[Any] = []

    def exchange(store: Any, _name: str, rank: int, size: int, _device: object) -> tuple[Group, Group]:
        store.set(f"from {rank}", "here")
        assert store.get(f"from {1 - rank}") == b"here"
        stores.append(store)
        return Group(rank, size), Group(rank, size)

    monkeypatch.setattr(ranks, "device_groups", exchange)
    memory, address = ranks._rendezvous_place(config, "cuda")
    assert os.readlink(f"/proc/self/fd/{memory}").endswith("(deleted)")
    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(lambda rank: ranks.rank_part(plan, memory, rank, address), range(2)))
    assert [part.group.rank for part in parts] == [0, 1]
    os.close(memory)
    stores[0].set("later", "too")
    assert stores[1].get("later") == b"too"


def test_a_second_engine_with_ranks_on_gpus_is_refused_before_peers_start(monkeypatch):
    config = EngineConfig.of(tensor_parallel_size=2, device="cuda")
    model = resolve.make_plan(EngineConfig.of()).model
    ranks.check_ranks(config, model, on_gpu=True)
    monkeypatch.setattr(ranks, "_symmetric_groups", ["ranks"])
    with pytest.raises(ConfigError, match="had such an engine on GPUs, and can have one only: start another"):
        ranks.check_ranks(config, model, on_gpu=True)


def test_a_rank_with_other_weights_is_refused():
    config = EngineConfig.of(tensor_parallel_size=2, num_threads=1)
    settings = {"config": asdict(config), "version": ranks.VERSION, "fingerprint": "0" * 64, "address": ""}
    with pytest.raises(
        ConfigError, match=r"with weights \w{12} here, and .* with 000000000000 on rank 0: start all"
    ):
        peer._build(settings, 1, -1, {})


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    config = EngineConfig.of(tensor_parallel_size=3, device="cuda", gpu_memory_utilization=0.8)
    monkeypatch.setattr(ranks, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.delenv(ranks.SHARED_CARD, raising=False)
    with pytest.raises(
        ConfigError, match=r"rank 2 has no GPU: tensor_parallel_size=3 needs 3 and PyTorch sees 2"
    ):
        ranks.on_rank(config, 0)
    monkeypatch.setenv(ranks.SHARED_CARD, "1")
    placed = [ranks.on_rank(config, rank) for rank in range(3)]
    assert [one.runner.device for one in placed] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [one.memory.gpu_memory_utilization for one in placed] == [0.4, 0.8, 0.4]


def test_ranks_on_other_machines_do_not_count_where_memory_is_divided():
    world = SimpleNamespace(numbers=lambda own: [own, own + 1, own])
    assert BuildPlan.ranks_here(SimpleNamespace(part=SimpleNamespace(world=world))) == 2
    assert BuildPlan.ranks_here(SimpleNamespace(part=None)) == 1


def test_a_device_without_sms_refuses_a_share():
    with pytest.raises(ConfigError, match=r"sm_share=0.5 is for NVIDIA GPUs, not for cpu: .* num_threads"):
        build(EngineConfig.of(device="cpu", sm_share=0.5))
    with pytest.raises(ConfigError, match="sm_share is for real GPUs: simulated:h200-sm50 names"):
        build(EngineConfig.of(device="simulated:h200", sm_share=0.5))


def test_a_share_is_entered_before_anything_is_compiled_or_loaded(monkeypatch):
    order: list[object] = []

    def started(_plan: object) -> None:
        order.append("kernels")
        raise ConfigError("enough")

    monkeypatch.setattr(resolve, "enter", lambda *given: order.append(given))
    monkeypatch.setattr(assemble, "start_kernel_warmup", started)
    monkeypatch.setattr(assemble, "load_models", lambda *_, **__: order.append("weights"))
    with pytest.raises(ConfigError, match="enough"):
        build(EngineConfig.of(device="cpu", sm_share=0.5))
    assert order == [(0.5, torch.device("cpu")), "kernels"]
