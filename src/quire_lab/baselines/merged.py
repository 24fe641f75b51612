"""MergedAdapter: the adapter of a step is added to the model's own weights, and taken out again for the next."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.adapters.peft import PackedAdapter
from quire.core.errors import ConfigError
from quire.core.request import ints
from quire.core.step import AdapterLoad, Step
from quire.layers.lora import LoraBatch
from quire.models.model import DecoderModel
from quire.runner.adapters import AdapterSlots, Fetched, HostCopyOf


@dataclass(frozen=True, slots=True)
class MergeSite:
    """Rows of a weight that an adapter's product is added to."""

    weight: Tensor  # [outputs, inputs], a view of the model's own; of an embedding [ids, width]
    is_embedding: bool


def merge_sites(model: DecoderModel) -> dict[str, MergeSite]:
    """Sites by name, where the weights are the layer's own: a tied head's are the embedding's."""
    sites: dict[str, MergeSite] = {}
    for tensor, loader in model.loaders().items():
        for part in loader.parts:
            state = part.layer.state()
            is_embedding = "table" in state
            weight = state.get("table" if is_embedding else "weight")
            if weight is None and not state:
                continue
            if weight is None or weight.dtype.itemsize < 2:
                raise ConfigError(
                    "lora_mode='merge' needs weights in full precision: choose quantization='none'"
                )
            rows = weight if is_embedding else weight[part.first_row : part.first_row + part.num_outputs]
            if not is_embedding or len(rows) == part.num_inputs:
                sites[part.module or tensor.removesuffix(".weight")] = MergeSite(rows, is_embedding)
    return sites


class MergedAdapter(AdapterSlots):
    """In AdapterSlots' place; no pages, no kernel. Steps must have rows of one adapter only."""

    def __init__(self, sites: tuple[MergeSite, ...], dtype: torch.dtype, host_copy: HostCopyOf) -> None:
        self._sites = sites
        self._dtype = dtype
        self._host_copy = host_copy
        self._key: str | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []  # weights, and what they were before
        self.kinds = 0
        self.recordable = True
        self.num_merges = 0

    def fetch(self, step: Step) -> tuple[Fetched, ...]:
        """The copy that will be merged, taken while it is sure to be there."""
        key = step.starts[0].adapter if step.starts else None
        packed = self._host_copy(key) if key is not None else None
        return () if key is None or packed is None else (Fetched(AdapterLoad(key, ints()), packed),)

    @torch.inference_mode()
    def apply(self, step: Step, fetched: tuple[Fetched, ...]) -> None:
        if not step.starts:
            return
        key = step.starts[0].adapter
        if key == self._key:
            return
        for weight, before in self._kept:
            weight.copy_(before)
        self._kept, self._key = [], None
        if key is not None:
            self._merge(fetched[0].packed)
            self._key = key  # only now: what was merged in part is taken out before it is tried again

    def _merge(self, packed: PackedAdapter) -> None:
        tiles, elements = packed.tiles, packed.data.view(packed.tiles.num_blocks, -1).view(self._dtype)
        for i, site in enumerate(tiles.sites.tolist()):
            target = self._sites[site]
            weight = target.weight.t() if target.is_embedding else target.weight  # [outputs, inputs]
            rank, per_tile = int(tiles.ranks[i]), int(tiles.tile_ranks[i])
            a = _rows(elements, tiles.a_blocks[i], tiles.a_offsets[i], rank, per_tile, weight.shape[1])
            b = _rows(elements, tiles.b_blocks[i], tiles.b_offsets[i], rank, per_tile, weight.shape[0])
            self._kept.append((target.weight, target.weight.clone()))
            a, b = a.to(weight.device).float(), b.to(weight.device).float()
            weight.copy_(weight.float() + packed.scales[i] * (b.t() @ a))
        self.num_merges += 1

    def runs_in(self, rows: np.ndarray) -> bool:
        return False

    def of_head(self, token_rows: np.ndarray) -> LoraBatch | None:
        return None


def _rows(
    elements: Tensor, blocks: np.ndarray, offsets: np.ndarray, rank: int, per_tile: int, width: int
) -> Tensor:
    """[rank, width] out of an adapter's own blocks."""
    tiles = []
    for tile, first in enumerate(range(0, rank, per_tile)):
        count, start = min(per_tile, rank - first), int(offsets[tile])
        tiles.append(elements[int(blocks[tile]), start : start + count * width].view(count, width))
    return torch.cat(tiles)
