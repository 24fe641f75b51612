"""SizedReader: adapters by their size alone, for simulated devices. No weights are read or kept."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.adapters.packing import Tiles, plan_tiles
from quire.adapters.peft import PackedAdapter, Reader, read_config
from quire.adapters.settings import LoraSettings, check_rank, read_settings
from quire.adapters.sites import Site
from quire.core.errors import AdapterError

ALL_LINEAR = "all-linear"  # PEFT's word for every matrix but the embedding and the head
Targets = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SizedReader(Reader):
    """Knows an adapter from its config: rank and targets give shapes, shapes give tiles and pages.

    What it returns has its place in blocks and no content: its `data` is on torch's "meta" device. Adapters of one
    kind share everything but their hash, so thousands cost next to nothing.
    """

    _planned: dict[str, tuple[Tiles, Tensor, tuple[float, ...], int]] = field(default_factory=dict)

    def read_folder(self, name: str, folder: Path) -> PackedAdapter:
        """A folder needs no more than its adapter_config.json."""
        return self.read_tensors(name, {}, read_config(name, folder))

    def read_tensors(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> PackedAdapter:
        """Tensors may be left out: they are not looked at."""
        kind = repr(sorted(config.items(), key=lambda item: item[0]))
        if kind not in self._planned:
            self._planned[kind] = self._plan(name, config)
        tiles, blocks, scales, rank = self._planned[kind]
        content = hashlib.sha256(f"{name} {kind}".encode()).hexdigest()
        return PackedAdapter(blocks, tiles, scales, content, rank)

    def _plan(self, name: str, config: Mapping[str, Any]) -> tuple[Tiles, Tensor, tuple[float, ...], int]:
        settings = read_settings(name, config)
        targets = _targets(name, config)
        targeted = [(i, site) for i, site in enumerate(self.sites) if _is_target(site, targets)]
        if not targeted:
            raise AdapterError(
                f"adapter {name!r} targets {config.get('target_modules')}, and this model has no such modules: its "
                f"modules are {', '.join(sorted({site.part for site in self.sites}))}"
            )
        shapes = tuple(
            (i, self._rank(name, site, settings), site.num_inputs, site.num_outputs) for i, site in targeted
        )
        tiles = plan_tiles(name, shapes, self.block)
        blocks = torch.empty(tiles.num_blocks, self.block.num_bytes, dtype=torch.uint8, device="meta")
        scales = tuple(settings.scale_of(site.name) for _, site in targeted)
        return tiles, blocks, scales, max(rank for _, rank, _, _ in shapes)

    def _rank(self, name: str, site: Site, settings: LoraSettings) -> int:
        rank = settings.rank_of(site.name)
        check_rank(name, site.name, rank, self.max_rank)
        return rank


def _targets(name: str, config: Mapping[str, Any]) -> Targets:
    """Names of modules, or one expression."""
    given = config.get("target_modules")
    if isinstance(given, str) and given:
        return given
    if isinstance(given, (list, tuple, set)) and given:
        return tuple(map(str, given))
    raise AdapterError(
        f"adapter {name!r} has no target_modules in its config: on a simulated device they and the rank are its size"
    )


def _is_target(site: Site, targets: Targets) -> bool:
    if isinstance(targets, str):
        if targets == ALL_LINEAR:
            return not site.is_embedding and site.name != "lm_head"
        return re.fullmatch(targets, site.name) is not None
    return any(site.name == one or site.name.endswith(f".{one}") for one in targets)
