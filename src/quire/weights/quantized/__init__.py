"""Checkpoints that other packages quantized. QuantizedWeights: what one keeps so, by its config.json's
`quantization_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ModelError
from quire.quant.encoded import Encoded
from quire.weights.quantized.bitsandbytes import BitsAndBytes
from quire.weights.quantized.compressed_tensors import CompressedTensors
from quire.weights.quantized.gptq import Awq, Gptq
from quire.weights.quantized.reader import MARKS, Get, Header, QuantizedReader, naming_damage

WEIGHT = ".weight"
GPT_OSS = "GptOssForCausalLM"  # its file decodes MXFP4: one tensor holds all experts of a layer
MXFP4_PARTS = ("_blocks", "_scales")

READERS: dict[str, type[QuantizedReader]] = {
    reader.method: reader for reader in (CompressedTensors, Awq, Gptq, BitsAndBytes)
}


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Empty for a checkpoint that is not quantized."""

    encodings: Mapping[str, Encoded]  # by the weight's name; shapes without content
    owned: frozenset[str]  # tensors that encoded weights are made of
    _reader: QuantizedReader | None
    raw: frozenset[str] = frozenset()  # tensors of whole numbers that the model's own loaders decode

    @classmethod
    def of(cls, config: Mapping[str, Any], headers: Mapping[str, Header], get: Get) -> "QuantizedWeights":
        """ModelError or WeightsError in one line where config and tensors do not fit each other."""
        if config.get("architectures") == [GPT_OSS]:
            return cls({}, frozenset(), None, frozenset(n for n in headers if n.endswith(MXFP4_PARTS)))
        reader = _open_reader(config, headers)
        if reader is None:
            return cls({}, frozenset(), None)
        encodings = {f"{module}{WEIGHT}": reader.empty(module, get) for module in reader.modules}
        return cls(encodings, reader.owned(), reader)

    def read(self, name: str, get: Get) -> Encoded:
        assert self._reader is not None, "only encoded weights are read"
        return self._reader.read(name.removesuffix(WEIGHT), get)


def _open_reader(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantizedReader | None:
    """None for weights that are not quantized; ModelError for a method that is not known, by name."""
    quantization = config.get("quantization_config")
    if not quantization:
        for mark, what in MARKS.items():
            name = next((name for name in headers if name.endswith(mark)), None)
            if name is not None:
                raise ModelError(
                    f"tensor {name} belongs to {what} weights, and config.json has no quantization_config: take the "
                    "config.json that belongs to these weights"
                )
        return None
    named = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    reader = READERS.get(str(named).lower())
    if reader is None or not isinstance(quantization, Mapping):
        raise ModelError(
            f"weights quantized with {named!r} cannot be loaded: known are {', '.join(READERS)}; or use the "
            "unquantized model"
        )
    with naming_damage("config.json's quantization_config"):
        return reader(quantization, headers)
