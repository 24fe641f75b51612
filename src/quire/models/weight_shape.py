"""What a model's weights take in a number format, counted without any memory: its own file builds it on "meta"."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.factory import LayerFactory
from quire.models import registry
from quire.models.model import DecoderModel
from quire.quant.encoded import Encoded
from quire.quant.encoded_matrix import EncodedFormat
from quire.quant.format import Matrix, NumberFormat
from quire.quant.fp8 import Fp8, Fp8Matrix
from quire.quant.full import FullMatrix
from quire.quant.int8 import Int8, Int8Matrix
from quire.quant.llm_int8 import Int8OutlierMatrix, LlmInt8
from quire.quant.schemes import MAIN, named

META = torch.device("meta")
CPU = torch.device("cpu")
ENCODED = "embedding/0:"  # how parameters name a token table that stays encoded
_BLOCK = re.compile(r"^layers\.\d+\.")  # how models name the layers of their blocks
NO_ENCODINGS: Mapping[str, Encoded] = {}


@dataclass(frozen=True, slots=True)
class WeightShape:
    groups: "tuple[WeightGroup, ...]"
    num_parameters: int
    num_bytes: int  # all that the engine keeps
    read_bytes: int  # what one step reads: embeddings are only gathered, unless the head shares them
    read_parameters: int


def weight_shape(
    model: ModelConfig, number_format: NumberFormat, encodings: Mapping[str, Encoded] = NO_ENCODINGS
) -> WeightShape:
    """Counts exactly what `parameters()` of the loaded model will hold. `encodings`: as the Source has them."""
    built = sized_model(model, number_format, encodings)
    loaders, parameters = built.loaders(), built.parameters()
    num_parameters = sum(math.prod(loader.shape) for loader in loaders.values())
    gathered = _gathered(parameters, model, shares_head=not number_format.compact_tables)
    return WeightShape(
        groups=weight_groups(parameters),
        num_parameters=num_parameters,
        num_bytes=sum(_bytes(tensor) for tensor in parameters.values()),
        read_bytes=sum(_bytes(tensor) for name, tensor in parameters.items() if name not in gathered),
        read_parameters=num_parameters - _gathered_once(parameters, gathered, model),
    )


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Layers whose weights are stored in one way."""

    scheme: str
    layers: tuple[str, ...]  # such as qkv, gate_up; one name for the same layer of all blocks
    num_weights: int
    num_bytes: int  # scales included, biases not

    @property
    def bits(self) -> float:
        return 8 * self.num_bytes / self.num_weights

    @property
    def in_words(self) -> str:
        return f"{self.scheme} ({self.bits:.2f} bits) in {', '.join(self.layers)}"


def weight_groups(parameters: Mapping[str, Tensor]) -> tuple[WeightGroup, ...]:
    """By the stored tensors of a loaded or sized model, largest first; norms are left out."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parameters.items():
        layer, _, key = name.rpartition("/")
        if "norm" not in layer and key != "bias":
            layers.setdefault(layer, {})[key] = tensor
    groups: dict[str, tuple[dict[str, None], list[int]]] = {}
    for layer, state in layers.items():
        for scheme, num_weights, num_bytes in _stored(state):
            names, totals = groups.setdefault(scheme, ({}, [0, 0]))
            names[_BLOCK.sub("", layer)] = None
            totals[0] += num_weights
            totals[1] += num_bytes
    unsorted = [WeightGroup(scheme, tuple(names), *totals) for scheme, (names, totals) in groups.items()]
    return tuple(sorted(unsorted, key=lambda group: -group.num_weights))


def _stored(state: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """(scheme, weights, bytes) of one layer: encoded rows tell their scheme, others are one tensor and its scales."""
    encoded: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if key.count(":") == 2:
            first_row, scheme, part = key.split(":")
            encoded.setdefault((first_row, scheme), {})[part] = tensor
    for (_, scheme), parts in encoded.items():
        main = next(parts[name] for name in MAIN if name in parts)
        num_weights = main.shape[0] * main.shape[1] * named(scheme).packing
        yield scheme.partition("@")[0], num_weights, sum(_bytes(part) for part in parts.values())
    if not encoded and state:
        largest = max(state.values(), key=Tensor.numel)
        scheme = str(largest.dtype).removeprefix("torch.").removesuffix("_e4m3fn")
        yield scheme, largest.numel(), sum(_bytes(tensor) for tensor in state.values())


def sized_model(
    model: ModelConfig, number_format: NumberFormat, encodings: Mapping[str, Encoded] = NO_ENCODINGS
) -> DecoderModel:
    """The model as if it were loaded, with shapes and no content."""
    built = registry.build(model, LayerFactory(_Sized(number_format), META, max_position=1))
    checkpoint_dtype = getattr(torch, model.dtype)
    for name, loader in built.loaders().items():
        empty = torch.empty(loader.shape, dtype=checkpoint_dtype, device=META)
        loader(encodings.get(name, empty))
    return built


def _gathered(parameters: Mapping[str, Tensor], model: ModelConfig, shares_head: bool) -> set[str]:
    """Tables that are read row by row: token and position embeddings, but not one that is the head as well."""
    tables = {
        name: tensor
        for name, tensor in parameters.items()
        if name.endswith("/table") or name.startswith(ENCODED)
    }
    if model.tie_word_embeddings and shares_head:
        tables = {name: tensor for name, tensor in tables.items() if tensor.shape[0] != model.vocab_size}
    return set(tables)


def _gathered_once(parameters: Mapping[str, Tensor], gathered: set[str], model: ModelConfig) -> int:
    """Parameters that no product reads. A tied table counts once in the checkpoint, and the head does read it."""
    sizes = {
        name: model.vocab_size * model.hidden_size if name.startswith(ENCODED) else parameters[name].numel()
        for name in gathered
    }
    if model.tie_word_embeddings:
        sizes = {name: size for name, size in sizes.items() if parameters[name].shape[0] != model.vocab_size}
    return sum(sizes.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Sized(NumberFormat):
    """A number format whose matrices have shapes but no content."""

    def __init__(self, real: NumberFormat) -> None:
        super().__init__(real.activation_dtype, META)
        self.name = real.name
        self.compact_tables = real.compact_tables
        self.kept_precise = real.kept_precise
        self._real = real.on(META) if isinstance(real, EncodedFormat) else real

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        if isinstance(self._real, Fp8):
            return Fp8Matrix(num_rows, num_columns, self.activation_dtype, META)
        if isinstance(self._real, EncodedFormat):
            return self._real.matrix(num_rows, num_columns)
        return self.head(num_rows, num_columns)

    def table(self, encoded: Encoded) -> Encoded | None:
        return self._real.table(encoded)

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        if isinstance(self._real, LlmInt8):
            return _SizedLlmInt8(num_rows, num_columns, CPU)
        if isinstance(self._real, Int8):
            return _SizedInt8(num_rows, num_columns, CPU)
        if isinstance(self._real, EncodedFormat):
            return self._real.head(num_rows, num_columns)
        return FullMatrix(num_rows, num_columns, self.activation_dtype, META, self.gemm)


class _SizedInt8(Int8Matrix):
    """As Int8Matrix keeps it; the kernel itself says how much packing pads."""

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        with META:
            return {
                "packed": self._kernel.empty_packed(self.num_rows, self.num_columns),
                "scales": torch.empty(self.num_rows, dtype=torch.float32),
                "sums": torch.empty(self.num_rows, dtype=torch.int32),
            }

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        pass


class _SizedLlmInt8(_SizedInt8):
    """As Int8OutlierMatrix keeps it."""

    def state(self) -> dict[str, Tensor]:
        return super().state() | Int8OutlierMatrix.sized_fine(self.num_rows, self.num_columns)
