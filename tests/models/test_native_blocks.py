"""Models whose weights stay in blocks of GGUF, or in 4 bits, on a CPU: native products, one copy of a tied table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from quire.kernels.native import Tape
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.models.weight_shape import weight_shape
from quire.quant.encoded import Encoded, Weight
from quire.quant.gguf_blocks import GgufBlocks
from quire.weights.folder import FolderSource
from tests.models.checkpoints import llama, prompts, save
from tests.models.paging import Pages, only_native, run_chunked

pytestmark = only_native


class Blocks:
    """A checkpoint as a GGUF file has it: Q4_1, values in Q8_0 as mixed files have them, and the table in Q8_0."""

    def __init__(self, folder: Path) -> None:
        self._source = FolderSource(folder)
        self.config = {**self._source.config, "quantization_config": {"quant_method": "gguf"}}
        self.encodings = {
            name: Encoded.empty(weight.scheme, weight.shape)
            for name, weight in self.tensors()
            if isinstance(weight, Encoded)
        }

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for name, tensor in self._source.tensors():
            yield (
                name,
                self._encoded(name, tensor) if isinstance(tensor, Tensor) and tensor.dim() == 2 else tensor,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _encoded(self, name: str, tensor: Tensor) -> Encoded:
        scheme = GgufBlocks("Q8_0" if "embed" in name or "v_proj" in name else "Q4_1")
        raw = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[scheme.kind])
        shape = (tensor.shape[0], tensor.shape[1])
        blocks = torch.from_numpy(raw).view(tensor.shape[0], -1, scheme.block_bytes)
        return Encoded(scheme, {"blocks": blocks}, shape)


def small(folder: Path, **changes: Any) -> Path:
    save(folder, llama(hidden_size=128, intermediate_size=224, num_attention_heads=4, **changes))
    return folder


def logits_of(model: DecoderModel, tokens: list[int]) -> Tensor:
    return run_chunked(model, [tokens], [len(tokens)], 4)[0]


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_stay_as_they_are_and_a_tied_table_is_kept_once(
    tmp_path: Path, tied: bool, empty_cache: Path
) -> None:
    source: Any = Blocks(small(tmp_path / "model", tie_word_embeddings=tied))
    config = describe(source.config)
    factory = LayerFactory.of(config)
    model = load(source, factory)
    assert factory.number_format.name == "checkpoint"
    assert model.recordable
    assert not list(empty_cache.rglob("*.safetensors")), "blocks need no converted copy"
    kept = sum(tensor.nbytes for tensor in model.parameters().values())
    sized = weight_shape(config, factory.number_format, source.encodings)
    assert kept == sized.num_bytes
    table = sum(t.nbytes for name, t in model.parameters().items() if name.startswith("embedding"))
    assert sized.read_bytes == kept - (0 if tied else table), "a tied table is read as the head"
    stored = sum(
        weight.num_bytes if isinstance(weight, Encoded) else weight.nbytes for _, weight in source.tensors()
    )
    assert kept < 1.1 * stored
    (tokens,) = prompts(30)
    exact = load(source, LayerFactory.of(config, quantization="none"))
    right = logits_of(exact, tokens)
    int8 = load(source, LayerFactory.of(config, quantization="int8"))
    native, coarser = (float((logits_of(m, tokens) - right).norm() / right.norm()) for m in (model, int8))
    assert native < 0.1
    assert native < coarser, (
        "blocks with activations by 32 columns are nearer than int8 by channels and tokens"
    )
    decoded = load(source, LayerFactory.of(config, dtype="float32", quantization="checkpoint"))
    torch.testing.assert_close(logits_of(decoded, tokens), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", ["auto", "int4", "nf4"])
def test_a_replayed_step_has_the_bits_of_an_eager_one_alone_and_in_a_batch(
    tmp_path: Path, quantization: str, empty_cache: Path
) -> None:
    small(tmp_path / "model", tie_word_embeddings=True)
    source: Any = Blocks(tmp_path / "model") if quantization == "auto" else FolderSource(tmp_path / "model")
    model = load(source, LayerFactory.of(describe(source.config), quantization=quantization))
    assert model.recordable
    one, other = prompts(14, 14)
    eager, taped = Pages(model, [14, 14], 4), Pages(model, [14, 14], 4)
    for pages in (eager, taped):
        model(pages.batch([(0, 0, one[:9]), (1, 0, other[:9])]), pages.pool)
    step = taped.batch([(0, 9, one[9:10]), (1, 9, other[9:10])])
    with Tape() as tape:
        replayed = model.logits(model(step, taped.pool))
    for position in range(9, 14):
        batch = eager.batch([(0, position, [one[position]]), (1, position, [other[position]])])
        expected = model.logits(model(batch, eager.pool))
        for name in ("token_ids", "positions", "slots", "context_lens"):
            getattr(step, name).copy_(getattr(batch, name))
        tape.replay()
        assert torch.equal(replayed, expected)
    texts = prompts(*(3 + i % 9 for i in range(80)))
    together = run_chunked(model, texts, [len(text) for text in texts], 4)
    for i in range(0, 80, 13):
        assert torch.equal(logits_of(model, texts[i]), together[i])
