"""Layers on disk: written whole, checked before they are trusted, and every fault is one clear line."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.core.errors import WeightsError
from quire.weights import layer_files
from quire.weights.layer_files import FIRST_BYTE, LayerFiles

PARTS = [["qkv/weight", "float32", [4, 8]]]


@pytest.fixture
def files(tmp_path: Path) -> LayerFiles:
    found = LayerFiles(tmp_path / "layers", "key")
    found.make_folder()
    found.write(2, piece(), PARTS)
    return found


def piece() -> torch.Tensor:
    return torch.arange(128, dtype=torch.uint8)


def test_what_was_written_is_read(files: LayerFiles) -> None:
    found = torch.zeros(128, dtype=torch.uint8)
    files.read(2, found)
    assert torch.equal(found, piece())
    assert files.good(2) == PARTS
    assert files.good(3) is None
    assert [path.name for path in files.path(2).parent.iterdir()] == ["layer-0002.weights"]


@pytest.mark.parametrize("fault", ["cut", "flipped", "header", "another model's", "another layer's", "empty"])
def test_a_file_that_was_cut_or_changed_is_not_trusted(
    files: LayerFiles, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = files.path(2)
    data = bytearray(path.read_bytes())
    if fault == "cut":
        data = data[:-1]
    elif fault == "flipped":
        data[FIRST_BYTE + 77] ^= 1
    elif fault == "header":
        data[0] = 0
    elif fault == "empty":
        data = bytearray()
    path.write_bytes(data)
    if fault == "another model's":
        files = LayerFiles(files.folder, "other")
        files.make_folder()
        path.rename(files.path(2))
    if fault == "another layer's":
        path.rename(files.path(1))
    assert files.good(1 if fault == "another layer's" else 2) is None
    assert "made again" in caplog.text


def test_a_file_that_is_cut_while_it_is_used_is_named(files: LayerFiles) -> None:
    os.truncate(files.path(2), FIRST_BYTE + 100)
    with pytest.raises(WeightsError, match=r"ends after 100 of 128 bytes: start again"):
        files.read(2, torch.zeros(128, dtype=torch.uint8))


def test_a_folder_that_cannot_be_written_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WeightsError, match=r"cannot be kept in .*file.*weights_offload_dir"):
        LayerFiles(tmp_path / "file", "key").make_folder()


def test_a_disk_without_room_is_refused_before_anything_is_written(
    files: LayerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    files.check_room([2], 5 * 10**9)  # it is there already
    with pytest.raises(WeightsError, match=r"need 5\.0 GB in .*3\.0 GB left.*weights_offload_dir"):
        files.check_room([1, 2], 5 * 10**9)


def test_a_disk_that_fills_up_leaves_nothing_half_written(
    files: LayerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match=r"layer 5 cannot be written .*No space left.*weights_offload_dir"):
        files.write(5, piece(), PARTS)
    assert [path.name for path in files.path(5).parent.iterdir()] == ["layer-0002.weights"]
