"""Adapters that have a size and no weights take the pages that real ones would."""

import pytest
import torch

from quire.adapters.packing import BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.core.errors import AdapterError
from quire_lab.simulate.sized_reader import SizedReader
from tests.adapters.making import WIDTHS, config, random_tensors

SITES = Sites(
    [Site(f"model.layers.{i}.{name}", *widths) for i in range(2) for name, widths in WIDTHS.items()]
)
BLOCK = BlockShape(4096, torch.float32, 16)
MODULES = [name.split(".")[1] for name in WIDTHS]


@pytest.mark.parametrize(("rank", "modules"), [(1, MODULES), (17, MODULES), (64, ["q_proj", "v_proj"])])
def test_a_size_is_that_of_the_real_adapter(rank, modules):
    given = config(rank, target_modules=modules)
    names = tuple(name for name in WIDTHS if name.split(".")[1] in modules)
    real = Reader(SITES, BLOCK).read_tensors("a", random_tensors(1, rank, names), given)
    sized = SizedReader(SITES, BLOCK).read_tensors("a", {}, given)
    assert sized.num_blocks == real.num_blocks
    assert sized.num_bytes == real.num_bytes
    assert sized.rank == real.rank
    assert sized.scales == real.scales
    assert sized.tiles.sites.tolist() == real.tiles.sites.tolist()


def test_adapters_of_one_kind_share_their_plan_and_not_their_content():
    reader = SizedReader(SITES, BLOCK)
    one, other = (reader.read_tensors(name, {}, config(8)) for name in ("one", "other"))
    assert one.tiles is other.tiles
    assert one.content != other.content


def test_targets_may_be_an_expression_or_all_linear():
    reader = SizedReader(SITES, BLOCK)
    some = reader.read_tensors("some", {}, config(4, target_modules=r".*layers\.1\..*_proj"))
    assert len(some.tiles.sites) == len(WIDTHS)
    assert len(reader.read_tensors("all", {}, config(4, target_modules="all-linear")).tiles.sites) == len(
        SITES
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config(4, target_modules=None), "no target_modules"),
        (config(4, target_modules=["nowhere"]), "no such modules"),
        (config(0), "rank 0"),
        (config(64), "raise max_lora_rank"),
        (config(4, use_dora=True), "DoRA"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(given, reason):
    with pytest.raises(AdapterError, match=reason):
        SizedReader(SITES, BLOCK, max_rank=32).read_tensors("mine", {}, given)
