"""The processes beside rank 0: their ends are noticed, named and explained. And Steps on their way to them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from unittest.mock import MagicMock

import pytest

from quire import LLM
from quire.core.draft import Draft
from quire.core.errors import ConfigError, EngineDead, QuireError
from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import AdapterLoad, HostTransfers, RowStart, Step
from quire.kernels.collective.cpu import shared_file
from quire.parallel.group import Group
from quire.parallel.ranks import BEAT, RankProcesses
from quire.parallel.wire import decode_step, encode_step
from quire.runner.ranked import RankedRunner


class Waiting(Group):
    """A group whose ranks wait until it is aborted."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborted = threading.Event()

    def abort(self, why: str = "") -> None:
        self.aborted.set()


def _fault(
    does: str, act=lambda pid: None, seconds: float = 60.0, frames: Sequence[bytes] = ()
) -> tuple[str, type, float]:
    """What rank 0 hears of, its kind, and after how long."""
    memory = shared_file(64)
    ranks = RankProcesses("tests.parallel.peer_stub", 3, memory, {"does": does})
    group = Waiting(0, 3)
    ranks.attach(group)
    try:
        if does == "wait":
            deadline = time.monotonic() + 60
            while os.pread(memory, 2, 1) != b"11":  # both have started
                assert time.monotonic() < deadline
                time.sleep(0.01)
            act(ranks._processes[0].pid)
        for data in frames:
            ranks.send(data)
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            try:
                ranks.check()
            except QuireError as fault:
                assert group.aborted.wait(30)
                return str(fault), type(fault), time.monotonic() - started
            time.sleep(0.01)
        raise AssertionError("nothing was noticed")
    finally:
        ranks.close()
        os.close(memory)
        assert all(process.poll() is not None for process in ranks._processes)


def test_a_rank_that_cannot_start_says_why():
    text, kind, _ = _fault("fail")
    assert (text, kind) == ("rank 1: there is no GPU here", ConfigError)


def test_a_rank_that_exits_is_named():
    text, kind, _ = _fault("exit")
    assert kind is EngineDead
    assert text.startswith("rank 1 (pid ")
    assert "exited with code 3" in text


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is stopped")]
)
def test_a_rank_that_is_killed_or_stopped_is_named_within_two_seconds(number, words):
    took: list[float] = []
    while not took or min(took) >= 2.0:
        assert len(took) < 3, took  # the quickest of three: other work may hold the machine up
        text, kind, seconds = _fault("wait", lambda pid: os.kill(pid, number))
        assert kind is EngineDead
        assert "rank 1 (pid " in text
        assert words in text
        took.append(seconds)


def test_a_rank_that_hangs_in_a_step_is_named():
    text, kind, _ = _fault("hang in a step", frames=[b"step"])
    assert kind is EngineDead
    assert text.startswith("rank 1: its step hung: ")


@pytest.mark.parametrize("does", ["compute in a step", "wait in a step"])
def test_a_rank_that_takes_long_or_waits_for_another_is_not_named(does):
    text, kind, _ = _fault(does, frames=[b"step"])
    assert (text, kind) == ("rank 1: the step has ended", ConfigError)


def test_a_rank_that_builds_its_part_ends_when_rank_0_is_gone():
    reports, end = Pipe(duplex=False)
    code = (
        "import sys, time; from multiprocessing.connection import Connection\n"
        "from quire.parallel.ranks import Reporter\n"
        "Reporter(Connection(int(sys.argv[1]), readable=False)); time.sleep(60)"  # as in a collective that never ends
    )
    command = [sys.executable, "-c", code, str(end.fileno())]
    with subprocess.Popen(command, pass_fds=[end.fileno()]) as process:
        end.close()
        assert reports.recv_bytes() == BEAT
        reports.close()
        assert process.wait(30) == 0


def test_peers_end_although_the_runner_of_rank_0_cannot_be_closed():
    local, peers = MagicMock(), MagicMock()
    local.close.side_effect = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        RankedRunner(local, peers).close()
    peers.close.assert_called_once()
    local.part.close.assert_called_once()


def test_ten_thousand_random_frames_are_no_steps_and_each_says_so():
    drawn = random.Random(0)
    (whole,) = encode_step(a_step())
    frames = [drawn.randbytes(drawn.randrange(1, 200)) for _ in range(5_000)]
    frames += [whole[: drawn.randrange(1, len(whole))] for _ in range(5_000)]
    text, kind, _ = _fault("count", frames=[*frames, b""])
    assert (text, kind) == ("rank 1: 10000 frames refused", ConfigError)


def test_a_rank_whose_reports_are_random_bytes_is_named():
    text, kind, _ = _fault("babble")
    assert kind is EngineDead
    assert text.startswith("rank 1 (pid ")
    assert "sent a report that cannot be read" in text


def a_step() -> Step:
    start = RowStart(
        3, ints((5, 6, 7)), ints((2, 9)), SamplingParams(prompt_logprobs=2), 0, 0, 3, adapter="a@1"
    )
    return Step(
        step_id=9, starts=(start,), rows=ints((3,)), num_computed=ints((0,)), num_tokens=ints((3,)),
        sample_sources=ints((0,)), sample_rows=ints((3,)), table_rows=ints((3,)), table_indices=ints((1,)),
        table_blocks=ints((8,)), copy_sources=ints((1,)), copy_targets=ints((4,)), forced_rows=ints((3,)),
        forced_positions=ints((2,)), forced_tokens=ints((11,)), sample_offsets=ints((0,)),
        drafts=(Draft(3, 3, ints((1, 2)), ints((-1, -1))),),
        moves=HostTransfers(ints((1,)), ints((2,)), ints(), ints()), adapter_evictions=("b@2",),
        adapter_loads=(AdapterLoad("a@1", ints((6, 7))),),
    )  # fmt: skip


def test_a_step_keeps_all_that_a_peer_needs():
    step = a_step()
    blobs = [({"tiles": [1, 2]}, bytes(range(256)))]
    first, *contents = encode_step(step, blobs)
    assert decode_step(first) == (step, [described for described, _ in blobs])
    assert contents == [content for _, content in blobs]


def test_a_step_of_256_rows_is_encoded_in_a_fraction_of_a_millisecond():
    rows = ints(range(256))
    step = Step(1, (), rows, rows, ints([1] * 256), rows, rows)
    took = []
    for _ in range(50):
        started = time.perf_counter()
        encode_step(step)
        took.append(time.perf_counter() - started)
    assert sorted(took)[5] < 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number of at least 1"),
        ({"tensor_parallel_size": 10}, "tensor_parallel_size=10 is more than the model's 3 key-value heads"),
        (
            {"model": "opt-125m", "load_format": "dummy", "tensor_parallel_size": 2},
            "OPTForCausalLM cannot be cut",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "distributed_executor_backend": "ray",
                "kv_offload_gb": 1,
                "kv_offload_dir": "x",
            },
            "kv_offload_dir is for ranks on one machine's CPU",
        ),
        ({"tensor_parallel_size": 2, "weights_memory_gb": 1.0}, "weights of ranks do not stream"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_one_is_started(settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(use_tqdm=False, **settings)
