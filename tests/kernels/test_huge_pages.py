"""Memory that tensors give back is used again, and no more of it is kept than is said."""

import gc
import platform
import subprocess
import sys
import threading

import pytest
import torch

from quire.kernels import huge_pages
from quire.kernels.huge_pages import HUGE_PAGE, SMALLEST_ALONE, Spares


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Spares:
    mine = Spares()
    monkeypatch.setattr(huge_pages, "spares", mine)
    return mine


def test_own_bytes_are_zeros_and_spare_ones_are_used_again(spares: Spares) -> None:
    assert not huge_pages.own_bytes(3, SMALLEST_ALONE).any()
    assert not huge_pages.own_bytes(100).any()
    first = huge_pages.spare_bytes(SMALLEST_ALONE + 5)
    first.fill_(7)
    address, view = first.data_ptr(), first[100:200].view(torch.int16)
    del first
    gc.collect()
    assert spares.num_bytes == 0  # a view still needs it
    del view
    assert spares.num_bytes == SMALLEST_ALONE + HUGE_PAGE
    other = huge_pages.spare_bytes(2 * SMALLEST_ALONE)  # of another size
    again = huge_pages.spare_bytes(SMALLEST_ALONE + 9)
    assert again.data_ptr() == address != other.data_ptr()
    assert spares.num_bytes == 0


def test_no_more_is_kept_than_is_said(spares: Spares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "SPARE_BYTES", 2 * SMALLEST_ALONE)
    tensors = [huge_pages.spare_bytes(SMALLEST_ALONE) for _ in range(5)]
    tensors.append(huge_pages.spare_bytes(10))  # small ones are nobody's business
    tensors.clear()
    assert spares.num_bytes == 2 * SMALLEST_ALONE


def test_threads_never_get_the_same_memory(spares: Spares) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(40):
            mine = huge_pages.spare_bytes(SMALLEST_ALONE)
            mine[:1000] = number
            if not bool((mine[:1000] == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_larger_than_all_that_is_kept_throws_nothing_out(
    spares: Spares, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "SPARE_BYTES", 2 * SMALLEST_ALONE)
    small, large = huge_pages.spare_bytes(SMALLEST_ALONE), huge_pages.spare_bytes(3 * SMALLEST_ALONE)
    del small
    del large
    assert spares.num_bytes == SMALLEST_ALONE


FAULTS = """
import resource
import torch
from quire.kernels import huge_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

huge_pages.keep_freed()
print(min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_tensors_of_a_step_fault_no_pages_in_the_next() -> None:
    """In a process of its own: glibc keeps nothing of 40 MB in an arena other than the first, to which earlier tests
    may lead. Up to three are started, since one did not keep them either, for a reason that is not known.
    """
    faults: list[int] = []
    while not faults or min(faults) >= 1000:
        assert len(faults) < 3, f"{faults}: each tensor has 10,240 pages"
        result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
        faults.append(int(result.stdout))
