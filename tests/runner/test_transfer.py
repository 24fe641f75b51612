"""What waits for what when blocks move beside the forward pass, on streams that only write down what they are told."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from quire.core.errors import ConfigError
from quire.core.layout import BlockLayout
from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import HostTransfers, RowStart, Step
from quire.layers.attention import Pool
from quire.runner import transfer
from quire.runner.transfer import EVENT_BLOCKS, TransferEngine

LAYOUT = BlockLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=2, dtype="float32")


class FakeEvent:
    count = 0

    def __init__(self):
        FakeEvent.count += 1
        self.name = FakeEvent.count
        self.happened = False

    def record(self, stream):
        stream.log.append(("record", stream.name, self.name))

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.name))

    def wait_stream(self, other):
        self.log.append(("wait", self.name, other.name))


@pytest.fixture
def mover(monkeypatch):
    """A mover that believes to be on a GPU; `log` is what its two streams were told."""
    made = TransferEngine(Pool(LAYOUT, 101), 100)
    log = []
    made.log, made._stream, passes = log, FakeStream("side", log), FakeStream("passes", log)
    monkeypatch.setattr(FakeEvent, "count", 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: passes)

    @contextmanager
    def on(stream):
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    return made


def step(out=(), back=(), given=(), copies=(), starts=(), rows=()):
    """`out`: (block, host); `back`: (host, block); `given`: blocks that are given out; `starts`: (row, blocks)."""
    moves = None
    if out or back:
        moves = HostTransfers(*(ints(p[0] for p in pairs) if i == 0 else ints(p[1] for p in pairs)
                            for pairs in (out, back) for i in (0, 1)))  # fmt: skip
    none = ints()
    started = tuple(RowStart(row, none, ints(blocks), SamplingParams(), 0, 0, 0) for row, blocks in starts)
    return Step(
        0, started, ints(rows), none, none, none, none, ints(given),
        ints(source for source, _ in copies), ints(target for _, target in copies), none, none, moves=moves,
    )  # fmt: skip


def test_a_pass_waits_only_for_the_copies_of_blocks_that_it_is_given(mover):
    blocks = range(1, 2 * EVENT_BLOCKS + 2)
    mover.move(step(out=[(block, block) for block in blocks], given=[EVENT_BLOCKS + 1]))
    events = [entry[2] for entry in mover.log if entry[0] == "record"]
    assert mover.log[0] == ("wait", "side", "passes"), "what leaves was written by steps before"
    assert [entry for entry in mover.log if entry[1] == "passes"] == [("wait", "passes", events[1])]
    mover.log.clear()
    mover.move(step())
    assert not mover.log
    mover.move(step(copies=[(50, 1)]))
    assert mover.log == [("wait", "passes", events[0])]


def test_nothing_is_waited_for_once_all_copies_are_made(mover):
    mover.move(step(out=[(1, 1)]))
    mover._last_left.happened = True
    mover.log.clear()
    mover.move(step(given=[1]))
    assert not mover.log


def test_what_comes_back_is_waited_for_by_the_next_step(mover):
    mover.move(step(back=[(1, 5)], starts=[(0, [5])]))
    assert not [entry for entry in mover.log if entry[1] == "passes"]
    mover.move(step(rows=[0]))
    assert [entry[:2] for entry in mover.log if entry[1] == "passes"] == [("wait", "passes")]


@pytest.mark.parametrize("reader", [{"starts": [(0, [4, 5])], "rows": [0]}, {"copies": [(5, 9)]}])
def test_or_by_the_same_step_if_that_reads_it(mover, reader):
    mover.move(step(back=[(1, 5)], **reader))
    assert [entry[:2] for entry in mover.log if entry[1] == "passes"] == [("wait", "passes")]
    mover.log.clear()
    mover.move(step())
    assert not mover.log


def test_moves_are_counted_in_order_as_they_are_made(mover):
    mover.move(step(out=[(1, 1)]))
    mover.move(step(back=[(1, 2)]))
    assert mover.num_moved() == 0
    assert mover.wait_moved(2, 0.0)
    mover._under_way[0].happened = True
    assert mover.num_moved() == 2
    assert not mover.wait_moved(3, 0.01), "nobody has launched it"


def test_blocks_arrive_as_they_left_in_whatever_order():
    pool = Pool(LAYOUT, 101)
    mover = TransferEngine(pool, 100)
    pool.data[1:] = torch.randint(0, 255, pool.data[1:].shape, dtype=torch.uint8)
    before = pool.data.clone()
    pairs = list(zip([3, 4, 5, 90, 7, 6], [1, 2, 3, 50, 9, 8], strict=True))
    mover.move(step(out=pairs))
    pool.data.zero_()
    mover.move(step(back=[(host, block + 1) for block, host in pairs]))
    for block, _ in pairs:
        assert pool.data[block + 1].equal(before[block])
    assert mover.num_moved() == 2
    assert mover.wait_moved(2, 0.0)


def test_host_memory_is_pinned_ahead_once_and_falls_back_where_it_cannot_be(monkeypatch):
    pinned = []

    class Piece:
        def __init__(self, num_bytes, device, setting):
            if len(pinned) == 3:
                raise ConfigError("no more memory may be locked")
            pinned.append(num_bytes)
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(transfer, "PinnedMemory", Piece)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 40)
    arena = transfer.HostArena(block_bytes=16, num_blocks=11, pinned=True)
    arena.blocks(5).fill_(9)  # somebody was first
    arena.prepare(8)
    arena.prepare(8)
    arena._preparing.join()
    assert pinned == [32, 32, 32]  # two blocks a chunk: the third, the first and the second
    assert not arena._pinned  # the fourth could not be: memory that is not pinned serves from then on
    assert arena.blocks(7, 2).shape == (2, 16)
    assert (arena.blocks(5) == 9).all()
    assert arena.blocks(11).shape == (1, 16)
    arena.close()


def test_pinning_ahead_ends_with_its_engine(monkeypatch):
    """A thread that went on would keep the memory, and abort a process that ends meanwhile."""
    begun = threading.Event()

    class Piece:
        def __init__(self, num_bytes, device, setting):
            begun.set()
            time.sleep(0.01)
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(transfer, "PinnedMemory", Piece)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 16)
    arena = transfer.HostArena(block_bytes=16, num_blocks=10_000, pinned=True)
    arena.prepare(10_000)
    assert begun.wait(10)
    arena.close()
    assert not arena._preparing.is_alive()
    assert not arena._preparing.daemon
    assert len(arena._pieces) < 1000
