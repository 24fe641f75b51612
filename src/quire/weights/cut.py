"""CutSource: a model's tensors as one rank needs them, cut by their names before any loader sees them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.parallel.cut import Cut, Span
from quire.quant.encoded import Columns, Encoded, Weight, join
from quire.weights.source import Source

# Checkpoint tensors by their module's name: which dimension is cut, and the parts of it one after another.
_TENSORS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "q_proj": (0, ("query",)),
    "k_proj": (0, ("key",)),
    "v_proj": (0, ("key",)),
    "qkv_proj": (0, ("query", "key", "key")),
    "o_proj": (1, ("query",)),
    "gate_proj": (0, ("inner",)),
    "up_proj": (0, ("inner",)),
    "gate_up_proj": (0, ("inner", "inner")),
    "down_proj": (1, ("inner",)),
}
_NAME = re.compile(r"\.(\w+)\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Spans of one dimension of a checkpoint tensor that a rank keeps, one after another."""

    dimension: int
    spans: tuple[Span, ...]
    size: int  # of the whole dimension

    @property
    def kept(self) -> int:
        return sum(last - first for first, last in self.spans)


def tensor_cut(part: Cut, name: str) -> TensorCut | None:
    """How a checkpoint tensor is cut, by its name; None: every rank has all of it."""
    match = _NAME.search(name)
    if match is None or match[1] not in _TENSORS:
        return None
    dimension, names = _TENSORS[match[1]]
    if match[2] == "bias" and dimension == 1:
        return None
    dim = part.model.head_dim
    parts = {"query": (part.heads, dim), "key": (part.kv_heads, dim), "inner": (part.inner, 1)}
    spans, offset = [], 0
    for spans_of_ranks, rows in (parts[each] for each in names):
        first, last = spans_of_ranks[part.rank]
        spans.append((offset + first * rows, offset + last * rows))
        offset += spans_of_ranks[-1][1] * rows
    return TensorCut(dimension, tuple(spans), offset)


class CutSource:
    """A Source like the one it cuts. Converted weights of each part are kept apart."""

    def __init__(
        self, source: Source, cut: Cut, stage: str = "", holds: Callable[[str], bool] = lambda name: True
    ) -> None:
        """`stage` of a pipeline: it has the tensors that it `holds`."""
        self._source = source
        self._cut = cut
        self._holds = holds
        self.name = source.name
        self.config: Mapping[str, Any] = source.config
        self.generation_config: Mapping[str, Any] = source.generation_config
        self.fingerprint = f"{source.fingerprint} rank {cut.rank} of {cut.size}{stage}"
        self.num_tensors = source.num_tensors
        self.num_bytes = source.num_bytes // cut.size
        self.min_bits = source.min_bits
        self.random = source.random
        self.encodings: Mapping[str, Encoded] = source.encodings

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for name, weight in self._source.tensors():
            if self._holds(name):
                yield name, self.part(name, weight)

    def part(self, name: str, weight: Weight) -> Weight:
        """What this rank keeps of a whole tensor."""
        return cut_weight(self._cut, name, weight)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that a part of `shape` is cut from."""
        cut = tensor_cut(self._cut, name)
        if cut is None:
            return shape
        return tuple(cut.size if i == cut.dimension else size for i, size in enumerate(shape))

    def tokenizer_json(self) -> str | None:
        return self._source.tokenizer_json()

    def tokenizer_config(self) -> Mapping[str, Any]:
        return self._source.tokenizer_config()


def cut_weight(part: Cut, name: str, weight: Weight) -> Weight:
    """What a rank keeps of a whole tensor; one of an unexpected shape is left for its loader to refuse."""
    cut = tensor_cut(part, name)
    if cut is None or weight.shape[cut.dimension] != cut.size or isinstance(weight, Columns):
        return weight
    if cut.dimension == 1:
        return Columns(weight, *cut.spans[0])
    if isinstance(weight, Encoded):
        return join([weight.rows(first, last) for first, last in cut.spans])
    pieces = [weight[first:last] for first, last in cut.spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
