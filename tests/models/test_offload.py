"""Weights that stream: the same numbers wherever layers live, and memory that keeps to its limit."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError, WeightsError
from quire.layers.factory import LayerFactory
from quire.models import offload as offloading
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.offload import Loaded, Offload, Streaming, is_streamed, load_offloaded, spread
from quire.models.registry import describe
from quire.quant.encoded import Encoded, Weight
from quire.quant.int4 import Int4
from quire.weights.folder import FolderSource
from tests.layers.late_copies import PromptCopies
from tests.models.checkpoints import gpt2, llama, opt, prompts, qwen2_moe, qwen3, save
from tests.models.paging import run_chunked
from tests.models.test_loading import Untouchable

PLENTY = 1 << 40
CONFIGS = {
    "llama": llama(num_hidden_layers=6),
    "llama-tied": llama(num_hidden_layers=6, tie_word_embeddings=True),
    "llama-wide": llama(num_hidden_layers=5, hidden_size=192, intermediate_size=128),
    "qwen3": qwen3(num_hidden_layers=5),
    "qwen2-moe": qwen2_moe(num_hidden_layers=5),
    "opt": opt(num_hidden_layers=6),
    "gpt2": gpt2(n_layer=5),
}


def factory_of(source: FolderSource, quantization: str = "none") -> LayerFactory:
    return LayerFactory.of(describe(source.config), quantization=quantization)


def logits_of(model: DecoderModel) -> Tensor:
    return torch.cat(run_chunked(model, prompts(17, 9), [17, 9], 4))


def bytes_of(model: DecoderModel) -> tuple[int, int]:
    """(of one layer, of what is no layer)."""
    sizes = {name: t.nbytes for name, t in model.parameters().items()}
    layer = sum(-(-n // 256) * 256 for name, n in sizes.items() if name.startswith("layers.0."))
    return layer, sum(n for name, n in sizes.items() if not name.startswith("layers."))


def streamed_from_disk(source: FolderSource, folder: Path, memory: int, quantization: str = "none") -> Loaded:
    wanted = Offload(device_bytes=0, memory_bytes=memory, folder=folder, host_bytes=PLENTY)
    return load_offloaded(source, factory_of(source, quantization), wanted)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama", "none"),
        ("llama-tied", "int8"),
        ("llama-wide", "int4"),
        ("llama-wide", "nf4"),
        ("llama-wide", "llm-int8"),
        ("qwen3", "int8"),
        ("qwen2-moe", "none"),
        ("qwen2-moe", "int8"),
        ("opt", "none"),
        ("gpt2", "int8"),
    ],
)
def test_layers_from_disk_give_the_same_numbers_however_many_are_kept(
    name: str, quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", CONFIGS[name])
    source = FolderSource(tmp_path / "model")
    whole = load(source, factory_of(source, quantization))
    right = logits_of(whole)
    layer, outside = bytes_of(whole)
    num_layers = len(whole.stack)
    for num_kept, num_streamed in ((num_layers, 0), (2, num_layers - 2), (0, num_layers)):
        buffers = 2 if num_streamed else 0
        memory = outside + (num_kept + buffers) * layer
        found = streamed_from_disk(source, tmp_path / "layers", memory, quantization)
        assert torch.equal(logits_of(found.model), right)
        assert torch.equal(logits_of(found.model), right)  # and again, from buffers that held other layers
        assert is_streamed(found.model) == bool(num_streamed)
        if isinstance(found.streaming, Streaming):
            assert len(found.streaming.on_disk) == num_streamed
            assert found.streaming.kept_bytes + found.streaming.buffer_bytes == memory


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "opt"])
@pytest.mark.parametrize("memory", [None, 3, 0], ids=["pinned", "one pinned", "disk"])
def test_layers_from_pinned_memory_give_the_same_numbers(
    name: str, memory: int | None, tmp_path: Path
) -> None:
    """The GPU's paths, with copies that need no GPU. Half of the layers leave; all of them; one."""
    save(tmp_path / "model", CONFIGS[name])
    source = FolderSource(tmp_path / "model")
    whole = load(source, factory_of(source))
    right = logits_of(whole)
    layer, _ = bytes_of(whole)
    num_layers = len(whole.stack)
    limit = None if memory is None else memory * layer + 1
    for device_bytes, expected in ((4 * layer - 1, 4), (PLENTY, num_layers), (1, 1)):
        wanted = Offload(device_bytes, limit, tmp_path / "layers", PLENTY)
        found = load_offloaded(source, factory_of(source), wanted, make_copies=PromptCopies)
        assert torch.equal(logits_of(found.model), right)
        assert torch.equal(logits_of(found.model), right)
        if not isinstance(found.streaming, Streaming):
            assert (name, limit) == ("qwen2-moe", None)  # experts by use: test_expert_placement.py
            continue
        pinned, on_disk = found.streaming.pinned, found.streaming.on_disk
        assert sorted(pinned + on_disk) == sorted(spread(expected, num_layers))
        if limit is None or limit >= expected * layer:
            assert not on_disk
        else:
            assert len(pinned) == max(0, limit // layer - 2)


def test_streamed_layers_are_spread_through_the_depth() -> None:
    assert spread(16, 32) == tuple(range(1, 32, 2))
    assert spread(3, 3) == (0, 1, 2)
    for num_layers in range(1, 40):
        for count in range(num_layers + 1):
            chosen = spread(count, num_layers)
            assert len(set(chosen)) == count
            assert set(chosen) <= set(range(num_layers))


def test_a_second_start_reads_files_only_and_makes_a_broken_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "model", llama(num_hidden_layers=6))
    source = FolderSource(tmp_path / "model")
    memory = 4 * bytes_of(load(source, factory_of(source)))[0]
    first = streamed_from_disk(source, tmp_path / "layers", memory)
    right = logits_of(first.model)
    again = streamed_from_disk(Untouchable(tmp_path / "model"), tmp_path / "layers", memory)
    assert torch.equal(logits_of(again.model), right)
    for fault in ("flipped", "cut", "gone", "outside flipped"):
        name = "outside.weights" if "outside" in fault else "layer-0003.weights"
        (path,) = (tmp_path / "layers").glob(f"*/{name}")
        data = bytearray(path.read_bytes())
        data[-300] ^= 4
        path.unlink() if fault == "gone" else path.write_bytes(data[:-9] if fault == "cut" else data)
        caplog.clear()
        assert torch.equal(logits_of(streamed_from_disk(source, tmp_path / "layers", memory).model), right), (
            fault
        )
        assert ("was cut or changed and is made again" in caplog.text) == (fault != "gone")
    streamed_from_disk(Untouchable(tmp_path / "model"), tmp_path / "layers", memory)


def test_other_weights_and_other_numbers_have_other_files(tmp_path: Path, empty_cache: Path) -> None:
    save(tmp_path / "model", llama(num_hidden_layers=4))
    source = FolderSource(tmp_path / "model")
    for quantization in ("none", "int8"):
        right = logits_of(load(source, factory_of(source, quantization)))
        found = streamed_from_disk(source, tmp_path / "layers", 200_000, quantization)
        assert torch.equal(logits_of(found.model), right)
    assert len(list((tmp_path / "layers").iterdir())) == 2


def test_too_little_memory_says_how_much_is_needed(tmp_path: Path) -> None:
    save(tmp_path / "model", llama(num_hidden_layers=6))
    source = FolderSource(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"weights_memory_gb=.* is too little .* raise it to 0\.001 or more"
    ):
        streamed_from_disk(source, tmp_path / "layers", 1000)
    wanted = Offload(PLENTY, None, tmp_path, host_bytes=1000)
    with pytest.raises(ConfigError, match=r"do not fit the host's memory.*lower cpu_offload_gb"):
        load_offloaded(source, factory_of(source), wanted, make_copies=PromptCopies)


def test_an_unwritable_folder_and_a_full_disk_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model", llama())
    source = FolderSource(tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be kept in"):
        streamed_from_disk(source, tmp_path / "file", 100_000)
    monkeypatch.setattr(
        offloading.LayerFiles, "check_room", lambda *_: (_ for _ in ()).throw(WeightsError("no room"))
    )
    with pytest.raises(WeightsError, match="no room"):
        streamed_from_disk(source, tmp_path / "layers", 100_000)


SCRIPT = """
import gc, json, re, sys
from pathlib import Path
from quire import LLM, SamplingParams
from quire.observe.heap import release_freed

def memory(name):  # of this program alone; getrusage knows the parent's too
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def generate(model, **options):
    gc.collect()
    release_freed()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory("VmRSS")
    with LLM(model, load_format="dummy", num_blocks=16, max_model_len=64, use_tqdm=False, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=6)
        (answer,) = llm.generate({"prompt_token_ids": list(range(3, 30))}, sampling, use_tqdm=False)
        tokens = list(answer.outputs[0].token_ids)
        taken = {name: memory(name) - before for name in ("VmRSS", "VmHWM")}
        return taken | {"tokens": tokens, "lines": llm.report.lines()}

small, large, folder, limit, options = sys.argv[1:]
options = json.loads(options)
generate(small, **options)  # libraries and threads are there from here on
bounded = generate(large, weights_memory_gb=float(limit), weights_offload_dir=folder, **options)
print(json.dumps([bounded, generate(large, **options)]))
"""


def save_config(folder: Path, **sizes: int) -> str:
    folder.mkdir()
    config = llama(**sizes).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not say how much is resident"
)
@pytest.mark.parametrize(
    ("options", "limit", "whole_size"),
    [({"dtype": "float32"}, 120 * 10**6, 335 * 10**6), ({"quantization": "int8"}, 40 * 10**6, 84 * 10**6)],
    ids=["float32", "int8"],
)
def test_a_model_larger_than_the_limit_keeps_to_it_and_gives_the_same_tokens(
    options: dict[str, str], limit: int, whole_size: int, tmp_path: Path
) -> None:
    """Resident memory as the system measured it. Layers that were made and left do not stay in it."""
    small = save_config(tmp_path / "small")
    large = save_config(
        tmp_path / "large",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=20,
        num_attention_heads=8,
    )
    arguments = [small, large, str(tmp_path / "layers"), str(limit / (1 << 30)), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    bounded, whole = json.loads(done.stdout.splitlines()[-1])
    assert bounded["tokens"] == whole["tokens"]
    assert bounded["VmRSS"] < limit + 60 * 10**6  # the pool, activations, a region of huge pages
    assert bounded["VmHWM"] < limit + 120 * 10**6  # two layers in the making, before and after rounding
    # which is what it takes without; some of it lies where the small one was
    assert whole["VmRSS"] > 0.8 * whole_size
    assert any("every step moves" in line for line in bounded["lines"])


class Mixed(FolderSource):
    """One layer's matrices are int4 in the checkpoint."""

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for name, tensor in super().tensors():
            low = ".1.mlp" in name and isinstance(tensor, Tensor)
            yield name, Encoded.of(Int4(64), tensor) if low else tensor


def test_layers_that_are_stored_in_different_ways_are_refused_in_one_line(tmp_path: Path) -> None:
    save(tmp_path / "model", CONFIGS["llama-wide"])
    source = Mixed(tmp_path / "model")
    layer, outside = bytes_of(load(source, factory_of(source)))
    with pytest.raises(ConfigError, match=r"stored in different ways.*quantization='none'"):
        streamed_from_disk(source, tmp_path / "layers", outside + 3 * layer, "checkpoint")


def test_dense_layers_among_those_with_experts_are_refused_in_one_line(tmp_path: Path) -> None:
    save(tmp_path / "model", qwen2_moe(num_hidden_layers=4, mlp_only_layers=[2]))
    source = FolderSource(tmp_path / "model")
    layer, outside = bytes_of(load(source, factory_of(source)))
    with pytest.raises(ConfigError, match=r"some have experts and others none.*leave out the offload"):
        streamed_from_disk(source, tmp_path / "layers", outside + 3 * layer)
