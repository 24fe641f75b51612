"""The disk tier's threads beside a clear, and a folder in which others leave files."""

import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest

from quire.runner.disk_tier import FileDiskTier
from quire.runner.transfer import HostArena

BLOCK_BYTES = 64
CONTENTS = [bytes([number]) * 32 for number in range(4)]


def open_tier(folder: Path, num_blocks: int = 100) -> FileDiskTier:
    arena = HostArena(BLOCK_BYTES, 8, pinned=False)
    tier = FileDiskTier(folder, [arena], lambda ticket, seconds: True, 1)
    tier._max_blocks = num_blocks
    return tier


def wait_until_written(tier: FileDiskTier, num_hosts: int = 1) -> list[int]:
    hosts: list[int] = []
    deadline = time.monotonic() + 60.0
    while len(hosts) < num_hosts and time.monotonic() < deadline:
        tier.wait(0.05)
        hosts += tier.finished()[0]
    return hosts


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def tier(tmp_path):
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def test_a_clear_between_a_full_tier_and_its_eviction_ends_no_thread(tmp_path):
    tier = open_tier(tmp_path, num_blocks=1)

    class Known(OrderedDict):
        def __len__(self) -> int:
            count = super().__len__()
            if count and not tier._lock.locked():  # the moment in which the engine's thread clears it
                self.clear()
            return count

    tier.write(CONTENTS[0], 1, 0)
    assert wait_until_written(tier) == [1]
    tier._known = Known(tier._known)
    tier.write(CONTENTS[1], 2, 0)
    tier.write(CONTENTS[2], 3, 0)
    assert wait_until_written(tier, 2) == [2, 3]
    assert tier.has(CONTENTS[2])
    tier.close()


def test_a_clear_drops_the_write_that_is_under_way_and_those_that_wait(tier, monkeypatch):
    begun, released = threading.Event(), threading.Event()
    write_file = FileDiskTier._write_file

    def slow(path, parts):
        begun.set()
        assert released.wait(10.0)
        return write_file(path, parts)

    monkeypatch.setattr(tier, "_write_file", slow)
    tier.write(CONTENTS[0], 1, 0)
    tier.write(CONTENTS[1], 2, 0)
    assert begun.wait(10.0)
    tier.clear()
    tier.write(CONTENTS[2], 3, 0)
    released.set()
    assert wait_until_written(tier, 3) == [1, 2, 3]
    assert [tier.has(content) for content in CONTENTS[:3]] == [False, False, True]
    assert [path.name for path in files(tier.folder)] == [CONTENTS[2].hex()]


@pytest.mark.parametrize(
    "name",
    ["z" * 64, " ".join(["ab"] * 21) + "ab", "AB" * 32, "notes.txt"],
    ids=["letters", "spaces", "capitals", "short"],
)
def test_files_of_other_names_do_not_stop_a_start_and_are_left_alone(tmp_path, name):
    tier = open_tier(tmp_path)
    tier.write(CONTENTS[0], 1, 0)
    wait_until_written(tier)
    tier.close()
    folder = tmp_path / CONTENTS[0].hex()[:2]
    (folder / name).write_bytes(bytes(tier.file_bytes))
    (folder / CONTENTS[1].hex()).mkdir()
    (folder / CONTENTS[2].hex()).symlink_to(tmp_path / "gone")
    (folder / CONTENTS[3].hex()).write_bytes(b"a piece")
    again = open_tier(tmp_path)
    assert again.num_blocks == 1
    assert again.has(CONTENTS[0])
    assert (folder / name).exists()
    assert not (folder / CONTENTS[3].hex()).exists()
    again.close()
