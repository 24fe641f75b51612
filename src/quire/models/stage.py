"""Stage: the layers of a model that one stage of a pipeline has. The first embeds and has the output head as well."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.factory import RankPart
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Loader, Stateful, collect, distribute

HIDDEN = "hidden"  # what messages between stages are counted as
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Stage:
    """A DecoderModel in two calls: `begin` takes a batch through the layers here, `finish` has the last one's result.

    The whole model is built and only the layers of this stage are loaded: others take no memory.
    """

    recordable = False

    def __init__(self, whole: Any, part: RankPart, dtype: torch.dtype, device: torch.device) -> None:
        assert part.layers is not None
        self._whole = whole
        self._part = part
        self._like = torch.empty(0, dtype=dtype, device=device)
        first, last = part.layers
        self.stack = whole.stack[first:last]
        self.config = replace(whole.config, num_layers=last - first)
        self._ends = part.stages.rank == part.stages.size - 1
        self.waited = 0.0  # seconds, for other stages

    def begin(self, batch: Batch, pool: Pool) -> None:
        """Hidden states of the batch, embedded or from the stage before, go to the next one."""
        stages = self._part.stages
        if self._part.is_first:
            hidden = self._whole.embedding(batch.token_ids, batch.lora)
        else:
            hidden = self._receive(batch.token_ids.shape[0])
        hidden = self._whole.through(hidden, batch, pool, self.stack, self._ends)
        stages.send(hidden.contiguous(), (stages.rank + 1) % stages.size, HIDDEN)

    def finish(self, num_wanted: int) -> Tensor:
        """Of the first stage: hidden states after the final norm [L, hidden] of the oldest batch that was begun."""
        hidden: Tensor = self._whole.norm(self._receive(num_wanted))
        return hidden

    def _receive(self, count: int) -> Tensor:
        stages, started = self._part.stages, time.perf_counter()
        hidden = self._like.new_empty(count, self.config.hidden_size)
        stages.receive(hidden, (stages.rank - 1) % stages.size, HIDDEN)
        self.waited += time.perf_counter() - started
        return hidden

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        raise NotImplementedError("a stage has no pass of its own: begin and finish")

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        logits: Tensor = self._whole.logits(hidden, lora)
        return logits

    def loaders(self) -> dict[str, Loader]:
        return {name: loader for name, loader in self._whole.loaders().items() if holds(self._part, name)}

    def whole_loaders(self) -> dict[str, Loader]:
        """Of all stages: adapters are cut into blocks as a whole."""
        loaders: dict[str, Loader] = self._whole.loaders()
        return loaders

    def parameters(self) -> dict[str, Tensor]:
        return collect(self._layers())

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        distribute(self._layers(), parameters)

    def _layers(self) -> dict[str, Stateful]:
        return {name: layer for name, layer in self._whole._all_layers().items() if holds(self._part, name)}


def holds(part: RankPart, name: str) -> bool:
    """Whether a tensor of this name belongs to the part's stage."""
    layer = _LAYER.search(name)
    if part.layers is None:
        return True
    return part.is_first if layer is None else part.layers[0] <= int(layer[1]) < part.layers[1]
