"""What the machine has, read from files as Linux writes them."""

from pathlib import Path

from quire.observe.host import memory_left, numbers_in

GB = 1 << 30


def machine(root: Path) -> None:
    (root / "proc").mkdir()
    lines = f"MemTotal:       {64 * GB >> 10} kB\nMemAvailable:   {8 * GB >> 10} kB\nActive(anon):   5 kB\n"
    (root / "proc" / "meminfo").write_text(lines)


def control_group(root: Path, limit: object, used: int, files: int) -> None:
    folder = root / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\nactive_file {files // 2}\ninactive_file {files // 2}\n")


def test_memory_that_is_left_is_that_of_the_machine_or_of_a_control_group_with_less(tmp_path):
    assert memory_left(tmp_path) == (0, 0)  # a system that does not say
    machine(tmp_path)
    assert memory_left(tmp_path) == (8 * GB, 64 * GB)
    control_group(tmp_path, "max", 3 * GB, GB)
    assert memory_left(tmp_path) == (8 * GB, 64 * GB)
    control_group(tmp_path, 16 * GB, 15 * GB, GB)  # 1 GB, and what the cache of files holds
    assert memory_left(tmp_path) == (2 * GB, 16 * GB)
    control_group(tmp_path, 32 * GB, 4 * GB, 0)
    assert memory_left(tmp_path) == (8 * GB, 64 * GB)


def test_files_of_the_system_that_lack_a_field_are_no_fault(tmp_path):
    control_group(tmp_path, 16 * GB, 15 * GB, GB)
    (tmp_path / "sys" / "fs" / "cgroup" / "memory.stat").unlink()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal:       {64 * GB >> 10} kB\n")
    assert memory_left(tmp_path) == (GB, 16 * GB)


def test_numbers_are_read_by_their_names(tmp_path):
    path = tmp_path / "status"
    path.write_text("Name:\tpython\nGroups:\t\nRssAnon:\t     116 kB\nVmSwap:\t       0 kB\n")
    assert numbers_in(path) == {"RssAnon": 116, "VmSwap": 0}
    assert numbers_in(tmp_path / "none") == {}
