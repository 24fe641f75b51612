"""Experts by use: the most used experts of every layer in fast memory, the others where they are kept."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.expert_memory import MappedExperts
from quire.layers.moe import MixtureOfExperts
from quire.layers.parameters import distribute
from quire.layers.streaming import LayerLayout
from quire.models.model import DecoderModel
from quire.weights.layer_files import FIRST_BYTE, LayerFiles

EXPERTS = "mixture.experts."  # how layers name their experts' parameters


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where a model's experts live, as decided at loading."""

    num_layers: int
    num_experts: int  # of a layer
    num_resident: int  # of these
    expert_bytes: int
    where: str  # the others are, in words
    kept_bytes: int  # of weights that always stay, resident experts included
    pass_bytes: int  # that one layer's pass may bring into memory until it ends

    @property
    def away_bytes(self) -> int:
        """Of the experts that are not resident."""
        return self.num_layers * (self.num_experts - self.num_resident) * self.expert_bytes


def mixtures_of(model: DecoderModel) -> dict[int, MixtureOfExperts]:
    """The experts of every layer that has some."""
    found = ((index, getattr(layer, "mixture", None)) for index, layer in enumerate(model.stack))
    return {index: mixture for index, mixture in found if isinstance(mixture, MixtureOfExperts)}


def moves_experts(model: DecoderModel) -> bool:
    """Whether some experts are not where they are used."""
    return any(mixture.memory is not None for mixture in mixtures_of(model).values())


def resident_experts(room: int, expert_bytes: float, num_experts: int, num_layers: int) -> int | None:
    """How many of each layer's experts fit in `room`, beside the others of one layer at a time; None: not even those
    of one layer do.
    """
    spare = math.floor(room / expert_bytes) - num_experts
    return None if spare < 0 else min(num_experts, spare // max(1, num_layers - 1))


def experts_away(device_bytes: int, expert_bytes: float, num_experts: int, num_layers: int) -> int | None:
    """How many of each layer's experts leave a device so that it has `device_bytes` less; None: all are not enough."""
    num_away = math.ceil(device_bytes / (num_layers * expert_bytes))
    return num_away if num_away <= num_experts else None


def map_experts(
    model: DecoderModel, layout: LayerLayout, files: LayerFiles, memory_bytes: int, outside_bytes: int
) -> ExpertPlacement | None:
    """Reads all layers but their experts, which are mapped; None if the layers have none, or memory is not enough."""
    mixtures = mixtures_of(model)
    if len(mixtures) < len(model.stack):
        return None
    rest = layout.without(EXPERTS)
    num_layers, num_experts = len(mixtures), len(mixtures[0].tensors_of_experts())
    expert_bytes = -(-(layout.num_bytes - rest.num_bytes) // num_experts)
    kept = outside_bytes + num_layers * rest.num_bytes
    num_resident = resident_experts(memory_bytes - kept, expert_bytes, num_experts, num_layers)
    if num_resident is None:
        return None
    for index, mixture in mixtures.items():
        mapping = files.mapped(index)
        views = layout.views(torch.frombuffer(mapping, dtype=torch.uint8, offset=FIRST_BYTE))
        own: dict[str, Tensor] = {part.name: views[part.name].clone() for part in rest.parts}
        distribute(model.stack[index].layers(), views | own)
        mixture.memory = MappedExperts(mapping, mixture.tensors_of_experts(), num_resident)
    kept += num_layers * num_resident * expert_bytes
    passing = (num_experts - num_resident) * expert_bytes
    where = f"in {files.folder}"
    return ExpertPlacement(num_layers, num_experts, num_resident, expert_bytes, where, kept, passing)
