"""GPUs are named by index, by UUID or by MIG UUID: the names are the driver's to read, never Quire's."""

import json
import os
from pathlib import Path

import pytest
import torch

import quire
from quire.bench.capacity import find_gpu
from quire.bench.machine import describe_environment
from quire.cli.main import main
from quire.core.errors import ConfigError
from quire.engine.build.resolve import resolve_device
from quire.observe.host import see_one_gpu, visible_gpus

NAMES = [
    "0",
    "1,0",
    "",
    "-1",
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f937,GPU-20bd9fae",
    "MIG-2eb9f5ad-5c17-5d1c-9a3c-3e2a1c1f4e55",
    "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0",
]


@pytest.mark.parametrize("visible", NAMES)
def test_whatever_names_the_devices_the_engine_and_bug_reports_go_on(
    visible: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"]["CUDA_VISIBLE_DEVICES"] == visible
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu").type == "cpu"


def test_a_device_is_chosen_by_the_environment_not_by_a_uuid_in_the_setting() -> None:
    with pytest.raises(ConfigError, match="is not known: choose auto, cpu, cuda"):
        resolve_device("MIG-2eb9f5ad-5c17-5d1c-9a3c-3e2a1c1f4e55")


def test_no_name_is_taken_apart() -> None:
    root = Path(quire.__file__).parent
    readers = [path for path in root.rglob("*.py") if "CUDA_VISIBLE" in path.read_text()]
    # the one shows it, the other gives each replica a name of the list, whole
    assert sorted(path.relative_to(root).as_posix() for path in readers) == [
        "bench/machine.py",
        "observe/host.py",
    ]


@pytest.mark.parametrize("visible", NAMES)
def test_a_replica_gets_one_name_of_the_list_whole(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = visible_gpus()
    assert names == ([] if visible in ("", "-1") else visible.split(","))
    if names:
        see_one_gpu(len(names) - 1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == names[-1]


def test_a_slice_of_a_gpu_is_found_by_its_reported_name() -> None:
    assert find_gpu("NVIDIA H200 MIG 1g.18gb").name == "H200"


def test_a_bug_report_never_shows_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret-one,secret-two")
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "secret-three")
    found = describe_environment()
    assert found["QUIRE_API_KEY"] == found["QUIRE_ADMIN_KEY"] == "(set)"
