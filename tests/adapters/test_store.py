"""The library keeps to its limits, also while files are being read and where they cannot be."""

import gc
import json
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.adapters.packing import BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.adapters.store import AdapterStore, HostLimits
from quire.core.errors import AdapterError
from tests.adapters.making import WIDTHS, config, random_tensors, write

SITES = Sites(
    [Site(f"model.layers.{i}.{name}", *widths) for i in range(2) for name, widths in WIDTHS.items()]
)
BLOCK = BlockShape(4096, torch.float32, 16)


def _library(folder: Path, num_bytes: int = 1 << 30, piece_bytes: int = 0) -> AdapterStore:
    reader = Reader(SITES, BLOCK, piece_bytes=piece_bytes)
    return AdapterStore(reader, HostLimits(num_bytes), folder, num_threads=4)


def _until_read(library: AdapterStore, key: str) -> None:
    deadline = time.monotonic() + 20
    while library.want(key) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("piece_bytes", [0, 1 << 20])
def test_what_is_being_read_is_bounded_as_copies_are(tmp_path: Path, piece_bytes: int) -> None:
    for i in range(12):
        write(tmp_path / f"a{i}", i, 16)
    size = (tmp_path / "a0" / "adapter_model.safetensors").stat().st_size
    library = _library(tmp_path, 3 * size, piece_bytes)
    keys = [library.resolve(f"a{i}") for i in range(12)]
    for key in keys:
        library.want(key)
        assert sum(library._loading.values()) <= 3 * size
    assert 1 <= len(library._loading) <= 3
    for key in keys:  # all of them come, though nobody asks for those before any more
        _until_read(library, key)
    assert library.held_bytes <= 3 * size
    library.close()


def test_one_file_is_read_however_large_it_is(tmp_path: Path) -> None:
    write(tmp_path / "large", 0, 16)
    library = _library(tmp_path, num_bytes=10)
    _until_read(library, library.resolve("large"))
    assert library.num_held == 1
    library.close()


def test_a_refused_adapter_keeps_nothing_that_was_read_or_asked(tmp_path: Path) -> None:
    tensors = random_tensors(0, 4)
    next(iter(tensors.values()))[0, 0] = float("nan")
    write(tmp_path / "broken", 0, 4)
    save_file(tensors, tmp_path / "broken" / "adapter_model.safetensors")
    library = _library(tmp_path, piece_bytes=1 << 20)
    key = library.resolve("broken")
    with pytest.raises(AdapterError, match="not finite"):
        _until_read(library, key)

    class Prompt:
        """Something that a caller holds while it is refused."""

    def ask() -> weakref.ref:
        prompt = Prompt()
        with suppress(AdapterError):
            library.resolve("broken")
        return weakref.ref(prompt)

    prompts = [ask() for _ in range(20)]
    gc.collect()
    assert not any(prompt() is not None for prompt in prompts)
    entry = library._entries[key]
    assert entry.error is not None
    assert entry.error.__traceback__ is None
    library.close()


def test_the_bases_own_embedding_is_not_kept_beside_an_adapter_of_it(tmp_path: Path) -> None:
    """PEFT saves it; a device that packs for itself would keep all of the file."""
    tensors = random_tensors(0, 4)
    table = torch.randn(3000, 48)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config(4)))
    save_file(
        {**tensors, "base_model.model.model.embed_tokens.base_layer.weight": table},
        tmp_path / "adapter_model.safetensors",
    )
    own = sum(tensor.numel() * 4 for tensor in tensors.values())
    reader = Reader(SITES, BLOCK, piece_bytes=1 << 20)
    for _ in range(2):
        packed = reader.read_folder("a", tmp_path)
        assert packed.pieces
        assert packed.num_bytes < own + 1024
    assert packed.rank == 4
