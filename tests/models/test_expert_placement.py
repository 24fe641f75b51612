"""Experts by use: the same numbers with few of them in memory, and memory that keeps to its limit."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig
from quire.engine.build.resolve import resolve_precision
from quire.engine.build.weights import offload_lines
from quire.layers import expert_memory
from quire.layers.expert_memory import MappedExperts
from quire.models.expert_placement import ExpertPlacement, mixtures_of, resident_experts
from quire.models.loading import load
from quire.models.offload import Loaded, Offload, Streaming, is_streamed, load_offloaded
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from tests.layers.late_copies import PromptCopies
from tests.models.checkpoints import gpt_oss, mixtral, qwen2_moe, save
from tests.models.test_offload import PLENTY, bytes_of, factory_of, logits_of, streamed_from_disk

CONFIGS = {
    "qwen2-moe": qwen2_moe(num_hidden_layers=3, moe_intermediate_size=192),
    "mixtral": mixtral(num_hidden_layers=3, intermediate_size=192),
    "gpt-oss": gpt_oss(num_hidden_layers=3, intermediate_size=192),
}


def mapped_bytes(folder: Path) -> int:
    """Of the layers' files, in this process's memory, as the system counts it."""
    counted, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            counted += 1024 * int(line.split()[1])
    return counted


def sizes_of(source: FolderSource, quantization: str) -> tuple[int, int, int, int]:
    """(outside the experts, one expert, experts, layers)."""
    whole = load(source, factory_of(source, quantization))
    layer, outside = bytes_of(whole)
    experts = mixtures_of(whole)[0].tensors_of_experts()
    expert = sum(-(-t.nbytes // 256) * 256 for t in experts[0])
    rest = layer - expert * len(experts)
    return outside + len(whole.stack) * rest, expert, len(experts), len(whole.stack)


def resident(found: Loaded) -> list[frozenset[int]]:
    memories = [mixture.memory for mixture in mixtures_of(found.model).values()]
    return [memory.resident for memory in memories if memory is not None]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen2-moe", "none"),
        ("qwen2-moe", "int8"),
        ("mixtral", "nf4"),
        ("mixtral", "int8"),
        ("gpt-oss", "none"),
    ],
)
def test_mapped_experts_give_the_same_numbers_and_only_the_most_used_stay(
    name: str, quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", CONFIGS[name])
    source = FolderSource(tmp_path / "model")
    right = logits_of(load(source, factory_of(source, quantization)))
    rest, expert, num_experts, num_layers = sizes_of(source, quantization)
    for num_resident in (0, 1, num_experts - 1):
        memory = rest + (num_experts + (num_layers - 1) * num_resident) * expert + expert // 2
        found = streamed_from_disk(source, tmp_path / "layers", memory, quantization)
        placed = found.streaming
        assert isinstance(placed, ExpertPlacement)
        assert (placed.num_resident, placed.num_experts) == (num_resident, num_experts)
        assert placed.kept_bytes + placed.pass_bytes <= memory
        assert is_streamed(found.model)
        for _ in range(2):  # again, when other experts are resident
            assert torch.equal(logits_of(found.model), right)
        assert [len(kept) for kept in resident(found)] == [num_resident] * num_layers
        # whole pages, and the kernel maps some around
        pages = 8 * num_layers * (num_resident + 1) * mmap.PAGESIZE
        assert mapped_bytes(tmp_path / "layers") <= num_layers * num_resident * expert + pages + 16 * 65536
        del found


def test_the_resident_experts_follow_use(tmp_path: Path) -> None:
    path, size = tmp_path / "experts", 256 * mmap.PAGESIZE
    path.write_bytes(bytes(6 * size))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    experts = torch.frombuffer(mapping, dtype=torch.uint8).chunk(6)
    memory = MappedExperts(mapping, [[expert] for expert in experts], num_resident=2)

    def choose(*chosen: int) -> None:
        memory.before(torch.tensor([chosen], dtype=torch.int32))
        for expert in chosen:
            experts[expert].sum()
        memory.after(torch.tensor([chosen], dtype=torch.int32))

    for _ in range(3):
        choose(0, 1)
    assert memory.resident == {0, 1}
    choose(2, 3)  # used once: they leave
    assert memory.resident == {0, 1}
    assert 2 * size <= mapped_bytes(path) < 3 * size  # the kernel maps some pages around those that are read
    for _ in range(60):
        choose(4, 5)
    assert memory.resident == {4, 5}  # what was used before fades
    assert 2 * size <= mapped_bytes(path) < 3 * size  # the kernel maps some pages around those that are read


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "dense among sparse"])
def test_experts_in_pinned_memory_give_the_same_numbers_and_change_places_by_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's path, with copies that need no GPU."""
    monkeypatch.setattr(expert_memory, "PASSES", 2)
    save(tmp_path / "model", CONFIGS.get(name) or qwen2_moe(num_hidden_layers=3, mlp_only_layers=[1]))
    source = FolderSource(tmp_path / "model")
    whole = load(source, factory_of(source))
    right = logits_of(whole)
    mixtures = mixtures_of(whole)
    shape = mixtures[0].shape
    for num_away in (1, shape.num_experts - 1, shape.num_experts):
        wanted = Offload(len(mixtures) * num_away * shape.expert_elements * 4, None, tmp_path, PLENTY)
        found = load_offloaded(source, factory_of(source), wanted, make_copies=PromptCopies)
        assert isinstance(found.streaming, ExpertPlacement)
        num_resident = shape.num_experts - num_away
        assert (found.streaming.num_layers, found.streaming.num_resident) == (len(mixtures), num_resident)
        at_first = resident(found)
        assert at_first == [frozenset(range(num_resident))] * len(mixtures)
        for _ in range(6):
            assert torch.equal(logits_of(found.model), right)
        assert [len(kept) for kept in resident(found)] == [num_resident] * len(mixtures)
        if num_resident == 1:  # most of the layers choose others than the first most often
            assert resident(found) != at_first


def test_more_than_all_experts_streams_layers(tmp_path: Path) -> None:
    save(tmp_path / "model", CONFIGS["qwen2-moe"])
    source = FolderSource(tmp_path / "model")
    wanted = Offload(PLENTY, None, tmp_path, PLENTY)
    found = load_offloaded(source, factory_of(source), wanted, make_copies=PromptCopies)
    assert isinstance(found.streaming, Streaming)


def test_layers_stream_where_the_experts_of_one_layer_do_not_fit(tmp_path: Path) -> None:
    assert resident_experts(100, 10, 8, 5) == 0
    assert resident_experts(79, 10, 8, 5) is None
    assert resident_experts(10**9, 10, 8, 5) == 8
    save(tmp_path / "model", qwen2_moe(num_hidden_layers=12, moe_intermediate_size=8))
    source = FolderSource(tmp_path / "model")
    layer, outside = bytes_of(load(source, factory_of(source)))
    found = streamed_from_disk(source, tmp_path / "layers", outside + 2 * layer)
    assert isinstance(found.streaming, Streaming)


def test_the_start_says_how_many_experts_stay(tmp_path: Path) -> None:
    save(tmp_path / "model", CONFIGS["mixtral"])
    source = FolderSource(tmp_path / "model")
    rest, expert, num_experts, num_layers = sizes_of(source, "none")
    memory = rest + (num_experts + (num_layers - 1) * 2) * expert
    found: Loaded = streamed_from_disk(source, tmp_path / "layers", memory)
    config = EngineConfig.of(model=str(tmp_path / "model"), quantization="none")
    precision = resolve_precision(config, describe(source.config))
    lines = offload_lines(config, precision, found.streaming)
    assert f"experts by use: 2 of {num_experts} in each of 3 layers" in lines[0]
