"""Adapters that can be served are read exactly; others are refused by name, with the reason."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.adapters.packing import BlockShape
from quire.adapters.peft import Reader
from quire.adapters.settings import read_settings
from quire.adapters.sites import Site, Sites
from quire.adapters.store import AdapterStore, HostLimits
from quire.core.config import AdapterConfig
from quire.core.errors import AdapterError, ConfigError
from quire.link.client import NamedAdapters
from tests.adapters.making import WIDTHS, config, random_tensors, write

SITES = Sites(
    [Site(f"model.layers.{i}.{name}", *widths) for i in range(2) for name, widths in WIDTHS.items()]
    + [Site("model.embed_tokens", 97, 48, True), Site("lm_head", 48, 97)]
)
BLOCK = BlockShape(4096, torch.float32, 16)
READER = Reader(SITES, BLOCK)


@pytest.mark.parametrize("rank", [1, 5, 16, 17, 64, 200])
def test_every_row_is_found_again_in_its_tile(rank):
    tensors = random_tensors(rank, rank)
    packed = READER.read_tensors("a", tensors, config(rank))
    elements, tiles = packed.data.view(torch.float32), packed.tiles
    for i, site in enumerate(tiles.sites):
        prefix = f"base_model.model.{SITES[int(site)].name}"
        a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"].t()
        for matrix, blocks, offsets in (
            (a, tiles.a_blocks, tiles.a_offsets),
            (b, tiles.b_blocks, tiles.b_offsets),
        ):
            for row in range(rank):
                tile, line = divmod(row, int(tiles.tile_ranks[i]))
                start = int(offsets[i, tile]) + line * matrix.shape[1]
                assert start % 4 == 0 or line  # tiles are aligned to 16 bytes
                found = elements[int(blocks[i, tile]), start : start + matrix.shape[1]]
                assert torch.equal(found, matrix[row])
    used = sum(rank * sum(WIDTHS[SITES[int(s)].name.split(".", 3)[3]]) for s in tiles.sites)
    assert tiles.num_waste == tiles.num_blocks * 1024 - used
    assert np.all(tiles.tile_ranks <= 16)


def test_scales_follow_alpha_rank_patterns_and_rslora():
    settings = read_settings(
        "a", config(8, lora_alpha=16, rank_pattern={"q_proj": 4}, alpha_pattern={"layers.1.mlp.up_proj": 2})
    )
    assert settings.scale_of("model.layers.0.self_attn.v_proj") == 2.0
    assert settings.scale_of("model.layers.0.self_attn.q_proj") == 4.0
    assert settings.scale_of("model.layers.1.mlp.up_proj") == 0.25
    assert settings.scale_of("model.layers.0.mlp.up_proj") == 2.0
    rooted = read_settings("a", config(16, lora_alpha=8, use_rslora=True))
    assert rooted.scale_of("model.layers.0.mlp.up_proj") == pytest.approx(8 / math.sqrt(16))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"bias": "all"}, "bias"),
    ({"init_lora_weights": "pissa"}, "pissa"),
    ({"r": "many"}, "adapter_config.json"),
    ({"r": 5}, "rank 4"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name_and_reason(changes, reason):
    with pytest.raises(AdapterError, match="'odd'") as refusal:
        READER.read_tensors("odd", random_tensors(0, 4), config(4, **changes))
    assert reason in str(refusal.value)


def test_wrong_shapes_foreign_modules_and_nan_are_refused():
    def read(tensors, rank=4):
        return READER.read_tensors("odd", tensors, config(rank))

    good = random_tensors(0, 4, ("self_attn.q_proj",))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(AdapterError, match=r"A is \[4, 47\].*made for another"):
        read({**good, name: torch.ones(4, 47)})
    with pytest.raises(AdapterError, match=r"layers\.9.*does not have"):
        read({key.replace("layers.1", "layers.9"): tensor for key, tensor in good.items()})
    with pytest.raises(AdapterError, match=r"mlp\.experts\.3\.up_proj, which belongs to the experts"):
        read({key.replace("self_attn.q", "mlp.experts.3.up"): tensor for key, tensor in good.items()})
    with pytest.raises(AdapterError, match=r"not finite in A of model\.layers\.0\.self_attn\.q_proj"):
        read({**good, name: torch.full((4, 48), float("nan"))})
    with pytest.raises(AdapterError, match="no pair"):
        read({name: good[name]})
    with pytest.raises(AdapterError, match="not part of a LoRA"):
        read({**good, "model.norm.weight": torch.ones(48)})
    with pytest.raises(AdapterError, match="no weights"):
        read({})
    large = Reader(SITES, BlockShape(1 << 16, torch.float32, 16))
    assert large.read_tensors("wide", random_tensors(0, 512), config(512)).rank == 512
    with pytest.raises(AdapterError, match="1 to 512 can be served"):
        read(random_tensors(0, 513), 513)
    with pytest.raises(AdapterError, match="max_lora_rank"):
        Reader(SITES, BLOCK, max_rank=3).read_tensors("odd", good, config(4))
    with pytest.raises(AdapterError, match="block_size"):
        Reader(SITES, BlockShape(128, torch.float32, 1)).read_tensors("odd", good, config(4))


@pytest.fixture
def library(tmp_path):
    for i in range(6):
        write(tmp_path / "many" / f"a{i}", i, 4)
    found = AdapterStore(READER, HostLimits(10**9, 2), tmp_path / "many")
    yield found
    found.close()


def _wait(library: AdapterStore, key: str):
    while (packed := library.want(key)) is None:
        pass
    return packed


def test_a_folder_of_many_is_found_lazily_and_host_copies_are_bounded(library):
    assert library.names() == [f"a{i}" for i in range(6)]
    assert library.num_names == 0
    keys = [library.resolve(f"a{i}") for i in range(6)]
    contents = [_wait(library, key).content for key in keys]
    assert len(set(contents)) == 6
    assert library.num_held == 2
    assert library.held_bytes == 2 * _wait(library, keys[5]).num_bytes
    assert _wait(library, keys[0]).content == contents[0]


def test_unknown_names_and_paths_outside_are_refused(library, tmp_path):
    outside = write(tmp_path / "outside", 0, 4)
    (tmp_path / "many" / "link").symlink_to(outside)
    for name in ("nobody", "../outside", "..", "", "link"):
        with pytest.raises(AdapterError, match="no adapter"):
            library.resolve(name)
    for path in (str(outside), "../outside", "a0/../../outside", "link"):
        with pytest.raises(AdapterError, match="outside"):
            library.folder_at("mine", path)
    assert library.folder_at("mine", "a3") == tmp_path / "many" / "a3"
    with pytest.raises(AdapterError, match="lora_dir"):
        AdapterStore(READER, HostLimits(10**9)).folder_at("mine", str(outside))


def test_what_is_prepared_has_no_name_before_it_is_published_and_leaves_nothing_when_discarded(
    library, tmp_path
):
    kept, dropped = (library.prepare("mine", tmp_path / "many" / name) for name in ("a3", "a4"))
    with pytest.raises(AdapterError, match="no adapter"):
        library.resolve("mine")
    for key in (kept, dropped):
        assert _wait(library, key).rank == 4
    library.publish(kept)
    assert library.resolve("mine") == kept
    library.discard(dropped)
    assert library.take_retired() == [dropped]
    assert (library.resolve("mine"), library.num_held) == (kept, 1)


def test_a_folder_that_is_not_there_is_said_at_a_first_start(tmp_path):
    (tmp_path / "empty").mkdir()
    for given, reason in (
        ({"lora_dir": str(tmp_path / "nowhere")}, "lora_dir: there is no folder"),
        ({"lora_modules": {"mine": str(tmp_path / "nowhere")}}, "'mine': there is no folder"),
        ({"lora_modules": {"mine": str(tmp_path / "empty")}}, "has no adapter_config.json"),
    ):
        with pytest.raises(ConfigError, match=reason):
            AdapterConfig(**given).check_folders()
    AdapterConfig(lora_dir=str(tmp_path / "empty")).check_folders()


def test_a_folder_that_goes_later_stops_nobody_else(library, tmp_path, caplog):
    named = NamedAdapters(AdapterConfig(lora_dir=str(tmp_path / "many")))
    assert named.names() == library.names()
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "many" / "a1", kept)
    shutil.rmtree(tmp_path / "many")
    assert named.names() == library.names() == []
    after = AdapterStore(READER, HostLimits(10**9), tmp_path / "many")  # as an engine after one that died
    after.register_named({"gone": str(tmp_path / "many" / "a1"), "kept": str(kept)})
    assert "'gone': there is no folder" in caplog.text
    assert after.names() == ["kept"]
    after.close()


def test_a_changed_adapter_is_another_and_an_unloaded_one_is_gone(library, tmp_path):
    key = library.resolve("a1")
    content = _wait(library, key).content
    library.begin(key)
    write(tmp_path / "many" / "a1", 99, 8)
    newer = library.resolve("a1")
    assert newer != key
    assert _wait(library, newer).content != content
    assert library.take_retired() == []  # someone still runs with the first
    library.end(key)
    assert library.take_retired() == [key]
    library.remove("a1")
    with pytest.raises(AdapterError):
        library.remove("a1")


def test_a_broken_adapter_says_why_each_time(library, tmp_path):
    folder = tmp_path / "many" / "broken"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config(4)))
    key = library.resolve("broken")
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        _wait(library, key)
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        library.resolve("broken")
    Path(folder / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(AdapterError, match="cannot be read"):
        _wait(library, library.resolve("broken"))


@pytest.mark.parametrize(("base", "is_other"), [
    ("meta/Tiny-Llama", False), ("/models/tiny-llama/", False), ("", False), ("someone/other-llama", True),
])  # fmt: skip
def test_another_base_of_the_same_shapes_is_named_in_a_warning(caplog, base, is_other):
    reader = Reader(SITES, BLOCK, base="Tiny-Llama.gguf")
    packed = reader.read_tensors("a", random_tensors(4, 4), config(4, base_model_name_or_path=base))
    assert packed.rank == 4
    said = "adapter 'a' was made for someone/other-llama, and this is Tiny-Llama.gguf"
    assert (said in caplog.text) == is_other
