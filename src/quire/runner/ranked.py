"""Steps on several ranks: rank 0 sends every Step to its peers and samples; its tokens are broadcast.

Rank 0 is the engine's own process. A peer runs the Steps that it is sent, in order, and knows no scheduler.
"""

from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.adapters.packing import Tiles
from quire.adapters.peft import PackedAdapter
from quire.core.errors import DeviceMemoryFull, EngineDead
from quire.core.step import Step, StepResult
from quire.parallel.group import Group
from quire.parallel.wire import Blob, encode_step
from quire.runner.runner import Runner, _Launched
from quire.sampling.records import Sampled, TokenMask

TOKENS = "tokens"  # what broadcasts are counted as


class Peers(Protocol):
    """The other ranks' processes, as rank 0 sees them."""

    def send(self, data: bytes) -> None: ...

    def check(self) -> None:
        """Raises EngineDead, with the rank and the reason, if one of them is gone or has failed."""
        ...

    def close(self) -> None: ...


class RankRunner(Runner):
    """A Runner whose forward passes contain collectives of `group`; rank 0 chooses the tokens."""

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.group = group

    def packed_loads(self, step: Step) -> list[Blob]:
        """The adapters that the step copies into blocks: every rank gets rank 0's copies and reads no files."""
        if self._adapters is None or not step.adapter_loads:
            return []
        return [_described(fetched.packed) for fetched in self._adapters.fetch(step)]

    def _choose(self, launched: _Launched, logits: Tensor, mask: TokenMask | None) -> Sampled:
        if self.group.rank == 0:
            sampled = super()._choose(launched, logits, mask)
            self.group.broadcast(sampled.token_ids.to(torch.int32), TOKENS)
            return sampled
        received = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        token_ids = self.group.broadcast(received, TOKENS).long()
        sampled = Sampled(token_ids, torch.ones_like(token_ids, dtype=torch.bool))
        self._ops.write_tokens(launched.forward, sampled)
        return sampled


def _described(packed: PackedAdapter) -> Blob:
    tiles = {field.name: getattr(packed.tiles, field.name) for field in fields(packed.tiles)}
    arrays = {
        name: (value.dtype.str, value.shape, value.ravel().tolist())
        for name, value in tiles.items()
        if isinstance(value, np.ndarray)
    }
    counts = {name: value for name, value in tiles.items() if name not in arrays}
    described = (packed.data.shape, arrays, counts, packed.scales, packed.content, packed.rank)
    return described, packed.data.numpy().tobytes()


def received_adapter(blob: Blob) -> PackedAdapter:
    """As `packed_loads` described it."""
    (shape, arrays, counts, scales, content, rank), data = blob
    tiles: dict[str, Any] = dict(counts)
    for name, (kind, size, values) in arrays.items():
        tiles[name] = np.array(values, kind).reshape(size)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*shape)
    return PackedAdapter(numbers, Tiles(**tiles), tuple(scales), content, rank)


class RankedRunner:
    """Rank 0's StepRunner: sends Steps to the peers and runs them itself."""

    def __init__(self, local: RankRunner, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self.tiles = local.tiles

    def launch(self, step: Step) -> None:
        self._peers.check()
        self._peers.send(encode_step(step, self._local.packed_loads(step)))
        try:
            self._local.launch(step)
        except DeviceMemoryFull as full:  # the peers go on with a step that this rank gave up
            raise EngineDead(f"rank 0: {full}") from full

    def mask(self, mask: TokenMask) -> None:
        self._local.mask(mask)

    def collect(self) -> StepResult:
        try:
            return self._local.collect()
        finally:
            self._peers.check()  # without a rank, the result or the error means nothing

    def prepare_thread(self) -> None:
        self._local.prepare_thread()

    def close(self) -> None:
        self._peers.close()
        self._local.close()
