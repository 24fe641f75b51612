"""A file gives what its tensors give from memory; a damaged one is refused, whatever was read before it."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.adapters.adapter_file import find_tensors, read_file
from quire.adapters.packing import BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.core.errors import AdapterError
from quire.kernels.lora.records import LoraTables
from quire.kernels.lora.reference import matrices
from tests.adapters.making import WIDTHS, config, random_tensors

SITES = Sites(
    [Site(f"model.layers.{i}.{name}", *widths) for i in range(2) for name, widths in WIDTHS.items()]
)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def reader() -> Reader:
    return Reader(SITES, BlockShape(4096, torch.float32, 16))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config(5)))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_file_gives_what_its_tensors_give(reader, folder, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(1, 5).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    expected = reader.read_tensors("a", tensors, config(5))
    for _ in range(2):  # its layout is known the second time
        assert reader.read_folder("a", folder).content == expected.content


def test_tensors_that_begin_anywhere_are_read(reader, folder):
    """As other writers may leave them: an odd header, so that nothing is aligned."""
    tensors = random_tensors(1, 5)
    save_file(tensors, folder / WEIGHTS)
    expected = reader.read_folder("a", folder).content
    header, data = _parts(folder)
    moved = {
        name: {**entry, "data_offsets": [at + 1 for at in entry["data_offsets"]]}
        for name, entry in header.items()
    }
    moved["model.embed_tokens.base_layer.weight"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    _write(folder, moved, b"\0" + data)
    assert reader.read_folder("a", folder).content == expected


def test_damaged_files_are_refused_also_where_their_kind_is_known(reader, folder):
    tensors = random_tensors(1, 5)
    save_file(tensors, folder / WEIGHTS)
    reader.read_folder("good", folder)
    header, data = _parts(folder)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    first = header[name]["data_offsets"][0]
    _write(folder, header, data[:first] + struct.pack("<f", float("nan")) + data[first + 4 :])
    with pytest.raises(AdapterError, match=r"'odd'.*not finite in B of model\.layers\.1\.mlp\.up_proj"):
        reader.read_folder("odd", folder)
    longer = {**header, name: {**header[name], "shape": [81, 5]}}
    foreign = {**header, name: {**header[name], "dtype": "F7"}}
    for broken, rest in (
        (header, data[:-4]),
        (header, data + b"more"),
        (longer, data),
        (foreign, data),
        ([1], data),
    ):
        _write(folder, broken, rest)
        with pytest.raises(AdapterError, match=r"'odd'.*cannot be read.*copy it again"):
            reader.read_folder("odd", folder)
    for content in (b"", b"no", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"{]"):
        (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(AdapterError, match="cannot be read"):
            reader.read_folder("odd", folder)


@pytest.mark.parametrize("rank", [1, 5, 16, 37])
def test_bytes_keep_every_rank_to_a_part_of_its_largest_number(rank):
    """As kernels find them, through tables; products of A and B are what counts."""
    reader = Reader(SITES, BlockShape(4096, torch.int8, 16))
    tensors = random_tensors(3, rank)
    packed = reader.read_tensors("a", tensors, config(rank))
    tiles, firsts = packed.tiles, np.arange(packed.num_blocks, dtype=np.int64) * 4096
    tables = LoraTables(
        packed.data.view(-1).view(torch.int8),
        torch.from_numpy(firsts[tiles.a_blocks] + tiles.a_offsets)[None],
        torch.from_numpy(firsts[tiles.b_blocks] + tiles.b_offsets)[None],
        torch.from_numpy(tiles.ranks)[None],
        torch.from_numpy(tiles.tile_ranks)[None],
        torch.tensor(packed.scales)[None],
    )
    for i, site in enumerate(SITES):
        a, b = matrices(tables, 0, i, site.num_inputs, site.num_outputs)
        exact_a = tensors[f"base_model.model.{site.name}.lora_A.weight"]
        exact_b = tensors[f"base_model.model.{site.name}.lora_B.weight"].t()
        for j in range(rank):
            product, exact = torch.outer(a[j], b[j]), torch.outer(exact_a[j], exact_b[j])
            assert (product - exact).abs().max() <= exact.abs().max() / 120


@pytest.mark.parametrize(
    "header", [b'{"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', b"[" * 200_000]
)
def test_a_header_that_no_parser_bears_is_refused(tmp_path, header: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(AdapterError, match="header is damaged"):
        find_tensors("a", read_file("a", tmp_path / WEIGHTS))


def _parts(folder) -> tuple[dict, bytes]:
    content = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _write(folder, header, data: bytes) -> None:
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_without_hashes_a_file_is_told_from_another_by_which_it_is(folder, tmp_path_factory):
    """Where nothing is kept of what adapters computed; what was read is the same."""
    hashed, plain = (Reader(SITES, BlockShape(4096, torch.float32, 16), hashed=one) for one in (True, False))
    save_file(random_tensors(1, 5), folder / WEIGHTS)
    first = plain.read_folder("a", folder)
    assert torch.equal(first.data, hashed.read_folder("a", folder).data)
    assert plain.read_folder("a", folder).content == first.content
    other = tmp_path_factory.mktemp("other")
    (other / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    (other / WEIGHTS).hardlink_to(folder / WEIGHTS)  # the same numbers under another name
    assert plain.read_folder("b", other).content == first.content
    save_file(random_tensors(2, 5), folder / "new")
    (folder / "new").replace(folder / WEIGHTS)
    assert plain.read_folder("a", folder).content != first.content
    tensors = random_tensors(1, 5)
    from_memory = [plain.read_tensors("c", one, config(5)).content for one in (tensors, random_tensors(2, 5))]
    assert from_memory[0] == plain.read_tensors("c", tensors, config(5)).content != from_memory[1]
