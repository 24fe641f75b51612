"""EngineFeed: what changed in an engine since the last record, for pages that show it. It works only while one listens.

A record is JSON. Blocks are bytes (see `state_of`) in runs, the rest are short lists: see docs/page.md.
"""

import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.request import Phase, Sequence
from quire.core.stats import EngineStats
from quire.core.step import Step, StepResult
from quire.link.step_log import WatchedRunner, divided
from quire.memory.blocks import REUSED, TAKEN
from quire.observe.logs import get_logger

if TYPE_CHECKING:  # they bring torch, which the client's process does without
    from quire.engine.engine import Engine, StepRunner

log = get_logger(__name__)
RECORD_SECONDS = 0.1  # between two records at least
SEQUENCES_PER_SECOND = 160  # of many running ones: the more change, the rarer are records
BUSY_SECONDS = 0.5  # between two records at most for that reason
BYTES_PER_SECOND = 45_000  # on average: a longer record delays the next
MAX_STEPS = 64  # of one record, the newest; `counters` has all
MAX_WAITING = 100  # sequences of the queue that are listed; `queue` counts all
MAX_TABLE_ENTRIES = 3000  # of one record; the rest follow in the next
STATES = ("free", "cached", "owned", "draft", "adapter", "idle adapter", "pinned")
FREE, CACHED, OWNED, DRAFT, ADAPTER, IDLE_ADAPTER, PINNED = range(7)
SHARED = 7  # a byte above it is a shared block with `byte - SHARED` references
MAX_REFERENCES = 255 - SHARED
WAITING, PREFILL, DECODE, SWAPPED, ENDED = range(5)  # of sequences


def state_name(state: int) -> str:
    return STATES[state] if state < SHARED else "shared"


@dataclass(slots=True)
class _Shown:
    """A sequence as the pages have it."""

    number: int
    entry: list[int] = field(default_factory=list)  # phase, known and computed tokens, blocks in host memory
    table: list[int] = field(default_factory=list)


class FeedSteps(WatchedRunner):
    """What steps did since the last record."""

    def __init__(self, runner: "StepRunner") -> None:
        super().__init__(runner)
        self.clear()

    def clear(self) -> None:
        self.steps: deque[list[float]] = deque(maxlen=MAX_STEPS)
        self.copied: list[int] = []
        self.swapped_out: list[int] = []
        self.swapped_in: list[int] = []

    def launch(self, step: Step) -> None:
        super().launch(step)
        if self.is_on:
            self.copied += step.copy_targets
            if step.moves is not None:
                self.swapped_out += step.moves.out_blocks
                self.swapped_in += step.moves.in_blocks

    def _note(self, launched: float, step: Step, result: StepResult) -> None:
        prefills, num_decodes, verified = divided(step)
        shown = [step.step_id, round(result.seconds * 1e3, 3), len(prefills), sum(prefills)]
        self.steps.append([*shown, num_decodes, len(verified), sum(verified)])


class EngineFeed:
    """Sends records through `send`: at most ten a second, fewer with many sequences, and none that says nothing new."""

    def __init__(
        self, engine: "Engine", send: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._send = send
        self._clock = clock
        self._runner = engine.watch(FeedSteps)
        self._is_late = False  # something happened, and a record was not due
        self._next = 0.0  # when a record may be sent
        self._forget()

    def _forget(self) -> None:
        self._states = bytearray()  # as sent, by block; empty: the next record is whole
        self._shown: dict[Sequence, _Shown] = {}
        self._adapter_blocks: frozenset[int] = frozenset()
        self._drafts: set[int] = set()
        self._last: list[Any] = []
        self._counted: dict[str, float] = {}  # as sent
        self._num_evicted = 0
        self._numbers = 0

    def start(self) -> None:
        """A page began to listen: the next record is whole, for all of them."""
        self._forget()
        self._engine.memory.pool.changed = {}
        self._runner.is_on = True
        self._next = 0.0
        self.publish()

    def stop(self) -> None:
        self._engine.memory.pool.changed = None
        self._runner.is_on = False
        self._runner.clear()
        self._is_late = False
        self._forget()

    def restart(self) -> None:
        """Blocks changed in a way that the pool does not note: the next record is whole."""
        if self._runner.is_on:
            self.start()

    def publish(self, at_once: bool = False) -> None:
        """A turn of the loop is over: sends a record if one is due, or `at_once`."""
        if not self._runner.is_on:
            return
        now = self._clock()
        self._is_late = now < self._next and not at_once
        if self._is_late:
            return
        try:
            data = self.record(now)
        except Exception:  # the engine goes on without its feed
            log.exception("the engine's feed ends")
            self.stop()
            return
        if data is not None:
            rarer = min(BUSY_SECONDS, self._engine.queue_stats().num_running / SEQUENCES_PER_SECOND)
            self._next = now + max(RECORD_SECONDS, rarer, len(data) / BYTES_PER_SECOND)
            self._send(data)

    def due_in(self) -> float | None:
        """Seconds until a delayed record is due; None if none is."""
        return max(0.0, self._next - self._clock()) if self._is_late else None

    # ------------------------------------------------------------------ one record

    def record(self, now: float) -> bytes | None:
        """What changed since the last record; None if nothing did."""
        engine, runner = self._engine, self._runner
        record: dict[str, Any] = {"step": engine.stats.num_steps, "time": round(now, 3)}
        if not self._states:
            record["pool"] = {"num_blocks": engine.memory.num_blocks, "block_size": engine.memory.block_size}
        blocks, events = self._blocks()
        sequences = self._sequences()
        events |= {"copied": runner.copied, "out": runner.swapped_out, "in": runner.swapped_in}
        stats = engine.snapshot()
        queue, counters, host = engine.queue_stats(), self._counters(stats), _host(stats)
        state = [queue, counters, host]
        if not (blocks or sequences or runner.steps or any(events.values()) or state != self._last):
            return None
        self._last = state
        record |= {"blocks": blocks, **sequences, "steps": list(runner.steps)}
        record["queue"] = [queue.num_running, queue.num_waiting]
        grown = {name: value for name, value in counters.items() if self._counted.get(name) != value}
        self._counted = counters
        record |= {"counters": grown, "host": host}
        record["events"] = {name: listed[:MAX_WAITING] for name, listed in events.items() if listed}
        runner.clear()
        return msgspec.json.encode(record)

    def _counters(self, stats: EngineStats) -> dict[str, float]:
        steps, drafts = stats.steps, stats.speculation
        return {
            "steps": steps.num_steps,
            "step_seconds": round(steps.step_seconds, 4),
            "prompt_tokens": steps.num_prompt_tokens,
            "generated_tokens": steps.num_generated_tokens,
            "computed_tokens": steps.num_computed_tokens,
            "requests": steps.num_requests,
            "finished": steps.num_finished,
            "preemptions": stats.scheduler.num_preemptions,
            "swaps_out": stats.scheduler.num_swaps_out,
            "swaps_in": stats.scheduler.num_swaps_in,
            "prefix_queries": stats.memory.prefix_queries,
            "prefix_hits": stats.memory.prefix_hits,
            "copies": stats.memory.copies,
            "evictions": self._num_evicted,
            "draft_tokens": drafts.num_draft_tokens,
            "accepted_tokens": drafts.num_accepted_tokens,
        }

    def _blocks(self) -> tuple[str, dict[str, list[int]]]:
        """Blocks whose state changed, in runs; and which were evicted, or found by a prefix."""
        memory = self._engine.memory
        changed, old = memory.pool.changed or {}, self._states
        changed.pop(0, None)  # which tables have in place of blocks behind a window
        memory.pool.changed = {}
        adapter_blocks = frozenset(memory.adapter_pages.owner)
        drafts = _draft_blocks(self._engine)
        dirty: Collection[int] = range(1, memory.num_blocks + 1)
        if old:
            dirty = {*changed, *(adapter_blocks ^ self._adapter_blocks), *(drafts ^ self._drafts)}
        self._adapter_blocks, self._drafts = adapter_blocks, drafts
        events: dict[str, list[int]] = {"evicted": [], "hits": []}
        if old:
            events["evicted"] = [b for b, change in changed.items() if change & TAKEN and old[b] == CACHED]
            events["hits"] = [b for b, change in changed.items() if change & REUSED]
            self._num_evicted += len(events["evicted"])
        else:
            self._states = bytearray(memory.num_blocks + 1)
        runs = _Runs()
        for block, state in _states(self._engine, sorted(dirty), memory.pool.ref_counts, drafts):
            if not old or old[block] != state:
                runs.add(block, state)
                self._states[block] = state
        return runs.encoded(), events

    def _sequences(self) -> dict[str, Any]:
        """Sequences that are new, changed or gone; a table from its first entry that changed."""
        shown, num_waiting, room = self._shown, 0, MAX_TABLE_ENTRIES
        new: list[dict[str, Any]] = []
        entries: list[list[Any]] = []
        living: dict[Sequence, _Shown] = {}
        for sequence in self._engine.scheduler.sequences():
            phase = _phase(sequence)
            num_waiting += phase == WAITING
            if (phase == WAITING and num_waiting > MAX_WAITING) or (
                phase == ENDED and not sequence.block_ids
            ):
                continue
            known = shown.get(sequence)
            if known is None:
                known = _Shown(self._numbers)
                self._numbers += 1
                new.append(self._described(sequence, known.number))
            living[sequence] = known
            entry = [phase, len(sequence.token_ids), sequence.num_computed, len(sequence.host_block_ids)]
            change: list[Any] = [known.number, *entry]
            table = sequence.block_ids
            if table != known.table and room > 0:
                same = _common_length(table, known.table)
                change += [same, table[same : same + room]]
                known.table = table[: same + room]
                room -= len(change[-1])
            if len(change) > 5 or entry != known.entry:
                known.entry = entry
                entries.append(change)
        gone = [known.number for sequence, known in shown.items() if sequence not in living]
        self._shown = living
        named = {"new": new, "sequences": entries, "gone": gone}
        return {name: listed for name, listed in named.items() if listed}

    def _described(self, sequence: Sequence, number: int) -> dict[str, Any]:
        request, adapters = sequence.request, self._engine.adapters
        adapter = request.adapter
        if adapter is not None and adapters is not None:
            adapter = adapters.library.name_of(adapter)
        return {
            "n": number,
            "id": request.request_id,
            "index": sequence.index,
            "adapter": adapter,
            "prompt": request.num_prompt_tokens,
            "cached": sequence.num_cached,
            "max": request.max_len,
        }


def state_of(num_references: int, is_indexed: bool, is_pinned: bool, is_draft: bool) -> int:
    """The byte of a block that belongs to no adapter."""
    if is_pinned:
        return PINNED
    if num_references == 0:
        return CACHED if is_indexed else FREE
    if num_references > 1:
        return SHARED + min(num_references, MAX_REFERENCES)
    return DRAFT if is_draft else OWNED


def recount(engine: "Engine") -> dict[str, int]:
    """Blocks by state, counted from the tables as `check_integrity` does, not from what the feed noted."""
    memory = engine.memory
    counts, drafts = memory.recount(engine.scheduler.sequences()), _draft_blocks(engine)
    blocks = range(1, memory.num_blocks + 1)
    return dict(Counter(state_name(state) for _, state in _states(engine, blocks, counts, drafts)))


def _states(
    engine: "Engine", blocks: Iterable[int], counts: list[int], drafts: set[int]
) -> Iterator[tuple[int, int]]:
    """Each of the blocks and its byte. `counts`: references, by block."""
    memory = engine.memory
    pages, pinned = memory.adapter_pages.owner, memory.pinned_blocks()
    for block in blocks:
        if block in pages:
            yield block, ADAPTER if counts[block] else IDLE_ADAPTER
        else:
            is_indexed = memory.index.knows(block)
            yield block, state_of(counts[block], is_indexed, block in pinned, block in drafts)


def _host(stats: EngineStats) -> dict[str, int]:
    """Blocks beside the pool."""
    names = ("swap_used", "swap_space", "offload_used", "offload_space", "offload_disk")
    return {name: value for name in names if (value := getattr(stats.pool, name))}


def _common_length(table: list[int], shown: list[int]) -> int:
    """How many entries at the start are the same. Most tables only grow."""
    if table[: len(shown)] == shown:
        return len(shown)
    return next(i for i in range(len(shown)) if i >= len(table) or table[i] != shown[i])


def _draft_blocks(engine: "Engine") -> set[int]:
    """Blocks behind the known tokens of sequences that draft."""
    if engine.speculation is None:
        return set()
    size, groups = engine.memory.block_size, engine.memory.num_groups
    return {b for s in engine.scheduler.running for b in s.block_ids[-(-s.num_known // size) * groups :]}


def _phase(sequence: Sequence) -> int:
    if sequence.phase is Phase.WAITING:
        return SWAPPED if sequence.host_block_ids else WAITING
    if sequence.phase is Phase.FINISHED:
        return ENDED
    return PREFILL if sequence.num_outputs + sequence.num_pending == 0 else DECODE


class _Runs:
    """Runs of neighbours with one state: how many blocks lie between it and the last run, its length, its state."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._end = 1  # block 0 is never given out
        self._start = 0
        self._state = -1

    def add(self, block: int, state: int) -> None:
        if state != self._state or block != self._end:
            self._close()
            self._data.extend(_varint(block - self._end))
            self._start, self._state = block, state
        self._end = block + 1

    def _close(self) -> None:
        if self._state >= 0:
            self._data.extend(_varint(self._end - self._start))
            self._data.append(self._state)

    def encoded(self) -> str:
        self._close()
        return b64encode(self._data).decode()


def _varint(value: int) -> Iterable[int]:
    """Seven bits a byte, the lowest first; all but the last have the eighth bit."""
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
