"""Building an engine: what is refused before anything is loaded."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from quire.core import laboratory
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import assemble, build
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

    part = RankPart(None, Group(), everyone=TorchGroup("gloo", dist.HashStore(), 0, 1))
    peers = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(assemble, "start_ranks", lambda *_arguments: (SimpleNamespace(part=part), peers))
    monkeypatch.setattr(assemble, "assemble", fail)
    with pytest.raises(ConfigError):
        build(EngineConfig.of(tensor_parallel_size=2))
    assert not dist.is_initialized()


def test_ranks_on_other_machines_do_not_count_where_memory_is_divided():
    everyone = SimpleNamespace(numbers=lambda own: [own, own + 1, own])
    assert BuildPlan.ranks_here(SimpleNamespace(part=SimpleNamespace(everyone=everyone))) == 2
    assert BuildPlan.ranks_here(SimpleNamespace(part=None)) == 1
