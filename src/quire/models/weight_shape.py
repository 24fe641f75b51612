"""What a model's weights take in a number format, counted without any memory: its own file builds it on "meta"."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.factory import LayerFactory, RankPart
from quire.layers.parameters import Loader
from quire.models import registry
from quire.models.encoder_decoder import EncoderDecoder
from quire.models.expert_placement import mixtures_of
from quire.models.model import DecoderModel, Loadable
from quire.models.stage import Stage
from quire.quant.encoded import Encoded, Scheme
from quire.quant.encoded_matrix import EncodedFormat
from quire.quant.format import Matrix, NumberFormat
from quire.quant.fp8 import Fp8, Fp8Matrix
from quire.quant.full import FullMatrix
from quire.quant.int8 import Int8, Int8Matrix
from quire.quant.llm_int8 import Int8OutlierMatrix, LlmInt8
from quire.quant.schemes import FLOATS, MAIN, named
from quire.weights.cut import cut_weight

META = torch.device("meta")
CPU = torch.device("cpu")
TOKENS = ("embedding/0:", "tokens/0:")  # how parameters name a token table that stays encoded
_ENCODED = (*TOKENS, "positions/0:", "types/0:", "encoder_positions/0:", "decoder_positions/0:")
EMBEDDING, HEAD, VECTORS, CROSS = "embedding", "head", "norms and biases", "cross-attention"
PARTS = {  # what the layers that models name so belong to, in the order of reports
    "qkv": "attention", "output": "attention", "cross_query": CROSS, "cross_kv": CROSS, "cross_output": CROSS,
    "gate_up": "MLP", "up": "MLP", "down": "MLP",
    "mixture.experts.gate_up": "experts", "mixture.experts.down": "experts", "mixture.router": "router",
    "embedding": EMBEDDING, "tokens": EMBEDDING, "positions": EMBEDDING, "types": EMBEDDING, "project_in": EMBEDDING,
    "encoder_positions": EMBEDDING, "decoder_positions": EMBEDDING, "head": HEAD, "project_out": HEAD,
    "encoder_distances": VECTORS, "decoder_distances": VECTORS,
}  # fmt: skip
# how models name the layers of their blocks, and the experts of a layer
_BLOCK = re.compile(r"^layers\.\d+\.|(?<=experts\.)\d+\.")
EXPERTS = ".experts."
NO_ENCODINGS: Mapping[str, Encoded] = {}


@dataclass(frozen=True, slots=True)
class WeightShape:
    groups: "tuple[WeightGroup, ...]"
    num_parameters: int
    num_bytes: int  # all that the engine keeps
    # What a step of one token reads: embeddings are only gathered, unless the head shares them.
    read_bytes: int
    read_parameters: int  # what one token is multiplied with
    experts: "ExpertWeights | None" = None  # of a mixture
    # of an encoder-decoder model: what prompts go through and decodes do not
    encoder_bytes: int = 0
    encoder_parameters: int = 0

    @property
    def active_parameters(self) -> int:
        """Without the experts that a token does not go through."""
        return self.num_parameters - (self.experts.idle_parameters if self.experts is not None else 0)

    def bytes_read(self, num_tokens: int) -> int:
        """What a step of `num_tokens` reads: the more tokens, the more experts, if each is as likely as the others."""
        if self.experts is None:
            return self.read_bytes
        one, some = self.experts.share(1), self.experts.share(num_tokens)
        return self.read_bytes + round((some - one) * self.experts.num_bytes)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """All experts of a mixture's layers."""

    num_experts: int  # of a layer
    num_layers: int  # with experts
    top_k: int  # that a token goes through
    num_parameters: int
    num_bytes: int

    @property
    def expert_bytes(self) -> float:
        """Of one expert of one layer."""
        return self.num_bytes / (self.num_experts * self.num_layers)

    @property
    def idle_parameters(self) -> int:
        return self.num_parameters - self.num_parameters * self.top_k // self.num_experts

    def share(self, num_tokens: int) -> float:
        """Of a layer's experts, what some token goes through: expected, if all are equally likely."""
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens


def weight_shape(
    model: ModelConfig,
    number_format: NumberFormat,
    encodings: Mapping[str, Encoded] = NO_ENCODINGS,
    part: RankPart | None = None,
) -> WeightShape:
    """Counts exactly what `parameters()` of the loaded model will hold. `encodings`: as the Source has them.

    `part`: of one rank only.
    """
    built = sized_model(model, number_format, encodings, part)
    loaders, parameters = built.loaders(), built.parameters()
    num_parameters = sum(math.prod(loader.shape) for loader in loaders.values())
    gathered = _gathered(parameters, model, shares_head=not number_format.compact_tables)
    experts = _experts(built, loaders, parameters)
    read_bytes = sum(tensor.nbytes for name, tensor in parameters.items() if name not in gathered)
    read_parameters = num_parameters - _gathered_once(parameters, model)
    if experts is not None:
        read_bytes -= round((1 - experts.share(1)) * experts.num_bytes)
        read_parameters -= experts.idle_parameters
    encoder_bytes = encoder_parameters = 0
    if isinstance(built, EncoderDecoder):
        encoder_bytes = sum(
            parameters[name].nbytes for name in built.encoder_parameters() if name not in gathered
        )
        encoder_parameters = sum(math.prod(loaders[name].shape) for name in built.encoder_loaders())
    return WeightShape(
        groups=weight_groups(built),
        num_parameters=num_parameters,
        num_bytes=sum(tensor.nbytes for tensor in parameters.values()),
        read_bytes=read_bytes - encoder_bytes,
        read_parameters=read_parameters - encoder_parameters,
        experts=experts,
        encoder_bytes=encoder_bytes,
        encoder_parameters=encoder_parameters,
    )


def _experts(
    built: DecoderModel, loaders: Mapping[str, Loader], parameters: Mapping[str, Tensor]
) -> ExpertWeights | None:
    shape = getattr(built, "mixture", None)
    if shape is None:
        return None
    return ExpertWeights(
        shape.num_experts,
        len(mixtures_of(built)),
        shape.top_k,
        sum(math.prod(loader.shape) for name, loader in loaders.items() if EXPERTS in name),
        sum(tensor.nbytes for name, tensor in parameters.items() if EXPERTS in name),
    )


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The weights of one part of a model that are stored in one way."""

    part: str  # one of PARTS' values, or VECTORS
    scheme: str
    layers: tuple[str, ...]  # such as qkv, gate_up; one name for the same layer of all blocks
    num_weights: int
    num_bytes: int  # scales included

    @property
    def bits(self) -> float:
        return 8 * self.num_bytes / self.num_weights

    @property
    def is_precise(self) -> bool:
        """Whether the weights are floats of 16 or 32 bits."""
        return self.scheme in FLOATS


def weight_groups(model: Loadable) -> tuple[WeightGroup, ...]:
    """By the stored tensors of a loaded or sized model, part by part; their bytes add up to all that is kept."""
    layers: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in model.parameters().items():
        layer, _, key = name.rpartition("/")
        is_vector = "norm" in layer or key == "bias"
        kind = _BLOCK.sub("", layer)
        part = VECTORS if is_vector else PARTS.get(kind, kind)
        layers.setdefault((part, name if is_vector else layer), {})[key] = tensor
    shares_head = model.config.tie_word_embeddings and not any(part == HEAD for part, _ in layers)
    groups: dict[tuple[str, str], tuple[dict[str, None], list[int]]] = {}
    for (part, layer), state in layers.items():
        part = f"{EMBEDDING}, {HEAD}" if shares_head and part == EMBEDDING else part
        for scheme, num_weights, num_bytes in _stored(state):
            names, totals = groups.setdefault((part, scheme), ({}, [0, 0]))
            names[_BLOCK.sub("", layer)] = None
            totals[0] += num_weights
            totals[1] += num_bytes
    unsorted = [WeightGroup(*key, tuple(names), *totals) for key, (names, totals) in groups.items()]
    order = [part for part in dict.fromkeys(PARTS.values()) if part != VECTORS]
    order += [f"{EMBEDDING}, {HEAD}", VECTORS]
    return tuple(
        sorted(unsorted, key=lambda group: order.index(group.part) if group.part in order else len(order))
    )


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
        yield scheme.partition("@")[0], num_weights, sum(part.nbytes for part in parts.values())
    if not encoded and state:
        largest = max(state.values(), key=Tensor.numel)
        scheme = str(largest.dtype).removeprefix("torch.").removesuffix("_e4m3fn")
        yield scheme, largest.numel(), sum(tensor.nbytes for tensor in state.values())


def sized_model(
    model: ModelConfig,
    number_format: NumberFormat,
    encodings: Mapping[str, Encoded] = NO_ENCODINGS,
    part: RankPart | None = None,
) -> DecoderModel:
    """The model, or a rank's part of it, as if it were loaded, with shapes and no content."""
    factory = LayerFactory(_Sized(number_format), META, 1, part)
    built: DecoderModel = registry.build(model if part is None else part.cut.local, factory)
    if part is not None and part.layers is not None:
        built = Stage(built, part, factory.dtype, META)
    checkpoint_dtype = getattr(torch, model.dtype)
    for name, loader in built.loaders().items():
        encoded = encodings.get(name)
        if encoded is None:
            loader(torch.empty(loader.shape, dtype=checkpoint_dtype, device=META))
        else:
            loader(encoded if part is None else cut_weight(part.cut, name, encoded))
    return built


def _gathered(parameters: Mapping[str, Tensor], model: ModelConfig, shares_head: bool) -> set[str]:
    """Tables that are read row by row: token and position embeddings, but not one that is the head as well."""
    tied = model.tie_word_embeddings and shares_head
    return {
        name
        for name, tensor in parameters.items()
        if (name.endswith("/table") and not (tied and tensor.shape[0] == model.vocab_size))
        or (name.startswith(_ENCODED) and not (tied and name.startswith(TOKENS)))
    }


def _gathered_once(parameters: Mapping[str, Tensor], model: ModelConfig) -> int:
    """Parameters that no product reads. A tied table counts once in the checkpoint, and the head does read it."""
    return sum(
        model.vocab_size * model.hidden_size if name.startswith(TOKENS) else parameters[name].numel()
        for name in _gathered(parameters, model, shares_head=True)
        if name.endswith("/table") or name.rpartition(":")[2] in MAIN
    )


class _Sized(NumberFormat):
    """A number format whose matrices have shapes but no content."""

    def __init__(self, real: NumberFormat) -> None:
        super().__init__(real.activation_dtype, META)
        self.name = real.name
        self.compact_tables = real.compact_tables
        self._real = real.on(META) if isinstance(real, EncodedFormat) else real

    def matrix(self, num_rows: int, num_columns: int) -> Matrix:
        if isinstance(self._real, Fp8):
            return Fp8Matrix(num_rows, num_columns, self.activation_dtype, META)
        if isinstance(self._real, EncodedFormat):
            return self._real.matrix(num_rows, num_columns)
        return self.head(num_rows, num_columns)

    def table(self, encoded: Encoded) -> Encoded | None:
        return self._real.table(encoded)

    def table_scheme(self, num_columns: int) -> Scheme | None:
        return self._real.table_scheme(num_columns)

    def head(self, num_rows: int, num_columns: int) -> Matrix:
        if isinstance(self._real, LlmInt8):
            return _SizedLlmInt8(num_rows, num_columns, CPU)
        if isinstance(self._real, Int8):
            return _SizedInt8(num_rows, num_columns, CPU)
        real = self._real.of_head.on(META) if isinstance(self._real, Fp8) else self._real
        if isinstance(real, EncodedFormat):
            return real.head(num_rows, num_columns)
        return FullMatrix(num_rows, num_columns, self.activation_dtype, META, self.gemm)


class _SizedInt8(Int8Matrix):
    """As Int8Matrix keeps it."""

    def load_rows(self, first_row: int, rows: Tensor, first: int = 0, last: int | None = None) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return self.sized_state()

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        pass


class _SizedLlmInt8(_SizedInt8):
    """As Int8OutlierMatrix keeps it."""

    def state(self) -> dict[str, Tensor]:
        return super().state() | Int8OutlierMatrix.sized_fine(self.num_rows, self.num_columns)
