"""Which settings need the laboratory, and what an engine says without it."""

from typing import Any

import pytest

from quire.core import laboratory
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.engine.policies import make_adapter_admission, make_admission_policy, make_memory
from quire.memory.paged import PagedMemory
from quire.scheduler.adapter_admission import AdapterAdmission
from quire.scheduler.running import AdmissionPolicy
from quire_lab.simulate.clock import VirtualClock


class _NoCopies:
    def want(self, key: str) -> None:
        return None

    def hold(self, key: str) -> None: ...

    def let_go(self, key: str) -> None: ...


def _make(setting: str) -> Any:
    if setting.startswith("--batching"):
        return make_admission_policy(SchedulerConfig(4, 64, batching=setting.split()[1]), VirtualClock())
    if setting.startswith("--reservation"):
        return make_memory(MemoryConfig(block_size=1, reservation=setting.split()[1]), 64, 32)
    if setting == "--lora-memory separate":
        return make_memory(MemoryConfig(), 64, 32, num_separate_blocks=8).adapter_pages
    return make_adapter_admission(_NoCopies(), PagedMemory(8, 4), None, merge=True)


BASELINES = {
    "--batching static": "StaticBatching",
    "--batching dynamic": "DynamicBatching",
    "--reservation max": "ReservedMemory",
    "--reservation pow2": "ReservedMemory",
    "--reservation oracle": "ReservedMemory",
    "--lora-memory separate": "SeparatePages",
    "--lora-mode merge": "MergedAdapterAdmission",
}


@pytest.mark.parametrize("setting", BASELINES)
def test_a_baseline_comes_from_the_laboratory(setting: str) -> None:
    made = _make(setting)
    assert type(made).__name__ == BASELINES[setting]
    assert type(made).__module__.startswith("quire_lab.baselines.")


@pytest.mark.parametrize("setting", BASELINES)
def test_without_the_laboratory_a_baseline_is_refused_with_the_command_that_installs_it(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laboratory, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(
        ConfigError, match=rf"{setting} is part of the laboratory.*pip install 'quire\[lab\]'"
    ):
        _make(setting)


def test_the_usual_policies_need_no_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory, "PACKAGE", "a_package_that_is_not_there")
    assert type(make_admission_policy(SchedulerConfig(4, 64), VirtualClock())) is AdmissionPolicy
    memory = make_memory(MemoryConfig(), 64, 32)
    assert isinstance(memory, PagedMemory)
    assert type(make_adapter_admission(_NoCopies(), memory, None, merge=False)) is AdapterAdmission
