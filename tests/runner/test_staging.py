"""Staging: what passes through pinned memory arrives whole, and nothing is overwritten before it was copied."""

import pytest
import torch

from quire.runner.staging import Staging


def test_sources_of_any_size_arrive_whole() -> None:
    staging = Staging(64, pin=False)
    for lines, width in ((1, 3), (5, 16), (40, 7), (3, 64), (2, 1)):
        source = torch.randint(0, 255, (lines, width), dtype=torch.uint8)
        target = torch.zeros_like(source)
        staging.copy(target, source)
        assert torch.equal(target, source)


def test_a_line_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Staging(8, pin=False).copy(torch.zeros(1, 9, dtype=torch.uint8), torch.zeros(1, 9, dtype=torch.uint8))


class _Event:
    """A copy that was made once somebody waited for it."""

    made: list["_Event"] = []

    def __init__(self) -> None:
        self.waited = False
        self.made.append(self)

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.waited = True

    def query(self) -> bool:
        return self.waited


def test_only_bytes_whose_copy_was_made_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(64, pin=False)
    staging._pinned = True  # as on a GPU, with events of our own
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    source = torch.zeros(1, 16, dtype=torch.uint8)
    for _ in range(4):
        staging.copy(torch.zeros_like(source), source)
    assert not any(event.waited for event in _Event.made)
    staging.copy(torch.zeros_like(source), source)  # round again: the first piece's place
    assert [event.waited for event in _Event.made] == [True, False, False, False, False]
    wide = torch.zeros(1, 40, dtype=torch.uint8)
    staging.copy(torch.zeros_like(wide), wide)  # behind the newest: over the next three
    assert [event.waited for event in _Event.made] == [True, True, True, True, False, False]


def test_copies_that_were_made_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces of a large memory: none is looked through again."""
    staging = Staging(1 << 20, pin=False)
    staging._pinned = True
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    source = torch.zeros(1, 16, dtype=torch.uint8)
    for _ in range(100):
        staging.copy(torch.zeros_like(source), source)
        _Event.made[-1].waited = True
    assert len(staging._pieces) <= 1


def test_bytes_are_on_the_device_as_long_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(4096, pin=False, device=torch.device("cpu"))
    staging._pinned = True
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    for size in (1000, 1024, 7, 900, 1024, 2000):
        source = torch.randint(0, 255, (size,), dtype=torch.uint8)
        with staging.sent(source) as there:
            noted = len(_Event.made)
            assert torch.equal(there, source)
            assert (there.data_ptr() - staging._there.data_ptr()) % 256 == 0
        assert len(_Event.made) == noted + 1  # what comes round to these bytes waits for what was launched
    assert [event.waited for event in _Event.made] == [True, True, True, True, False, False]


def test_many_threads_fill_a_large_piece() -> None:
    source = torch.randint(0, 255, (1, 40 << 20), dtype=torch.uint8)
    target = torch.zeros_like(source)
    Staging(64 << 20, pin=False).copy(target, source)
    assert torch.equal(target, source)
