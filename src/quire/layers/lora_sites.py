"""Where adapters can add to a model: found from what loads its weights, so that model files know nothing of it."""

import re
from collections.abc import Mapping
from types import ModuleType

from quire.kernels.lora.records import MAX_PARTS
from quire.layers.loader import Loader, Part
from quire.layers.lora import LoraGroup, LoraSite


def install_sites(loaders: Mapping[str, Loader], kernel: ModuleType) -> tuple[LoraSite, ...]:
    """Lets every matrix of a model take adapters; its sites, in the order of their indices.

    `kernel`: as `factory.kernel("lora")` gives it. Without this call no layer ever looks at adapters.
    """
    layers: dict[int, list[tuple[str, Part]]] = {}
    for tensor, loader in loaders.items():
        for part in loader.parts:
            name = part.module or tensor.removesuffix(".weight")
            layers.setdefault(id(part.layer), []).append((name, part))
    sites: list[LoraSite] = []
    kinds: dict[tuple[str, ...], int] = {}
    for named in layers.values():
        parts = sorted(named, key=lambda item: item[1].first_row)
        assert len(parts) <= MAX_PARTS, f"{parts[0][0]} is fused with more than {MAX_PARTS - 1} others"
        alike = tuple(re.sub(r"\d+", "#", name) for name, _ in parts)
        kind = kinds.setdefault(alike, len(kinds))
        bounds = (*(part.first_row for _, part in parts), parts[-1][1].first_row + parts[-1][1].num_outputs)
        parts[0][1].layer.take_lora(LoraGroup(kernel, len(sites), bounds, kind))
        sites += [
            LoraSite(name, len(sites) + i, kind, part.num_inputs, part.num_outputs, part.is_embedding)
            for i, (name, part) in enumerate(parts)
        ]
    return tuple(sites)
