"""PrefillEngine: an engine whose prompts another engine decodes, handed over through the disk tier that both share."""

import time
from collections.abc import Sequence as Listed
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from quire.core.request import Sequence
from quire.core.step import SequenceUpdate, StepResult
from quire.engine.engine import Engine
from quire.runner.disk_tier import FileDiskTier
from quire.scheduler.plan import ScheduledStep

WRITERS = 2  # threads
MAX_WAIT = 5.0  # seconds that an answer waits for its blocks; the other engine computes late blocks
IDLE_WAIT = 0.005


class PrefillEngine(Engine):
    """The last update of a request comes once the full blocks of its prompt are files, whole under their own names.

    Blocks are copied when their step is committed, before another step can reuse them, and written by threads beside
    the steps. A block that cannot be written is missing for the other engine, which computes it.
    """

    def __init__(self, pools: Listed[Tensor], tier: FileDiskTier, *args: Any, **options: Any) -> None:
        """`pools`: the memory of each rank's pool, uint8 [blocks, bytes]. The others are those of an Engine."""
        super().__init__(*args, **options)
        self._pools = pools
        self._tier = tier
        self._writers = ThreadPoolExecutor(WRITERS, "quire-hand-over")
        self._writing: dict[bytes, Future[bool]] = {}
        self._num_saved: dict[
            str, int
        ] = {}  # by request: blocks of its prompt that were given to the writers
        self._held: list[tuple[SequenceUpdate, set[Future[bool]], float]] = []  # with the latest moment

    @property
    def has_requests(self) -> bool:
        return super().has_requests or bool(self._held)

    def abort(self, request_id: str) -> bool:
        self._num_saved.pop(request_id, None)
        held = len(self._held)
        self._held = [each for each in self._held if each[0].request_id != request_id]
        return super().abort(request_id) or len(self._held) < held

    def close(self) -> None:
        self._writers.shutdown(cancel_futures=True)
        super().close()

    def _schedule(self) -> tuple[list[SequenceUpdate], ScheduledStep | None]:
        released = self._release() if self._held else []
        updates, scheduled = super()._schedule()
        return released + updates, scheduled

    def _when_idle(self) -> None:
        if self._held:
            wait(self._held[0][1], IDLE_WAIT)
        else:
            super()._when_idle()

    def _committed(self, scheduled: ScheduledStep, result: StepResult) -> list[SequenceUpdate]:
        updates = super()._committed(scheduled, result)
        step = scheduled.step
        # A step without samples may end here before other ranks have written its blocks: a later step saves them.
        if len(self._pools) == 1 or step.sample_rows:
            for sequence, before, count in zip(
                scheduled.sequences, step.num_computed, step.num_tokens, strict=True
            ):
                self._save(sequence, before + count)
        ended = [update for update in updates if update.finish_reason is not None]
        if not ended:
            return updates
        writing, latest = set(self._writing.values()), time.monotonic() + MAX_WAIT
        for update in ended:
            self._num_saved.pop(update.request_id, None)
            if writing:
                updates.remove(update)
                self._held.append((update, writing, latest))
        return updates

    def _save(self, sequence: Sequence, num_computed: int) -> None:
        """Copies the blocks of a prompt that this step has filled, and gives them to the writers."""
        request, index = sequence.request, self.memory.index
        last = min(num_computed, request.num_prompt_tokens) // self.memory.block_size
        first = self._num_saved.get(request.request_id, 0)
        if first >= last:
            return
        self._num_saved[request.request_id] = last
        for each in sequence.block_hashes[first:last]:
            for content in index.contents(each):
                block = index.find(content)
                if block is not None and content not in self._writing and not self._tier.has(content):
                    parts = [pool[block].to("cpu", copy=True).numpy().data for pool in self._pools]
                    self._writing[content] = self._writers.submit(self._tier.put, content, parts)

    def _release(self) -> list[SequenceUpdate]:
        """The updates whose blocks are written, or have waited for too long."""
        self._writing = {content: write for content, write in self._writing.items() if not write.done()}
        now, updates, still = time.monotonic(), list[SequenceUpdate](), []
        for held in self._held:
            update, writes, latest = held
            if now > latest or all(write.done() for write in writes):
                updates.append(update)
            else:
                still.append(held)
        self._held = still
        return updates
