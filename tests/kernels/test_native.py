"""The native library: its cache, life without a compiler, forks, and tapes."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.kernels import build as compilation
from quire.kernels import native
from quire.kernels.lora.records import Places
from quire.kernels.native import Arena, Tape
from quire.kernels.registry import choose

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels on this machine")


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_library_path_follows_sources_and_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("no compiler")
    path = compilation.library_path()
    assert path.is_relative_to(empty_cache / "kernels")
    monkeypatch.setenv("HOME", str(empty_cache))
    monkeypatch.setenv("QUIRE_CACHE", "~/named")
    assert compilation.library_path().is_relative_to(empty_cache / "named")
    monkeypatch.setattr(compilation, "BASE_FLAGS", ("-O1",))
    assert compilation.library_path() != path


def test_a_library_in_the_cache_is_not_built_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip("no compiler")
    builds = []

    def fake_build(scratch: Path) -> Path:
        builds.append(scratch)
        (scratch / "made").write_text("library")
        return scratch / "made"

    monkeypatch.setattr(compilation, "_compile_all", fake_build)
    first, second = compilation.ensure_built(), compilation.ensure_built()
    assert first == second
    assert first.read_text() == "library"
    assert len(builds) == 1
    assert [entry.name for entry in first.parent.iterdir()] == [compilation.LIBRARY_NAME]


def test_of_two_processes_that_start_together_one_compiles(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip("no compiler")
    compiling, go_on, builds = threading.Event(), threading.Event(), []

    def fake_build(scratch: Path) -> Path:
        builds.append(scratch)
        compiling.set()
        assert go_on.wait(60)
        (scratch / "made").write_text("library")
        return scratch / "made"

    monkeypatch.setattr(compilation, "_compile_all", fake_build)
    with ThreadPoolExecutor(2) as processes:  # the lock is of an open file, so that two threads do
        first = processes.submit(compilation.ensure_built)
        assert compiling.wait(60)
        second = processes.submit(compilation.ensure_built)
        time.sleep(0.1)
        go_on.set()
        assert first.result() == second.result()
    assert len(builds) == 1


def test_without_a_compiler_the_reference_serves_and_says_so(empty_cache: Path) -> None:
    code = (
        "from quire.kernels import choose, native\n"
        "print(native.available(), choose('attention', 'cpu').__name__)"
    )
    outcome = _python(code, PATH="", CXX="")
    assert outcome.stdout.split() == ["False", "quire.kernels.attention.reference"]
    assert outcome.stderr.count("native kernels are not available") == 1


def test_the_environment_forces_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    assert choose("norm", "cpu").__name__ == "quire.kernels.norm.reference"


@needs_native
def test_the_environment_forces_an_instruction_set() -> None:
    outcome = _python("from quire.kernels import native; print(native.isa())", QUIRE_ISA="generic")
    assert outcome.stdout.strip() == "generic"


@needs_native
def test_unfit_tensors_are_refused() -> None:
    norm = choose("norm", "cpu")
    with pytest.raises(TypeError, match="fp32"):
        norm.rms_norm(torch.randn(2, 4).half(), torch.ones(4), 1e-5)
    with pytest.raises(TypeError, match="dense"):
        norm.rms_norm(torch.randn(4, 2).t(), torch.ones(4), 1e-5)


def _small_model(x: torch.Tensor, weights: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    linear, norm = choose("int8_linear", "cpu"), choose("norm", "cpu")
    hidden = norm.rms_norm(x, torch.ones(64), 1e-5)
    for packed, scales, sums in weights:
        view = hidden[:, 16:80] if hidden.shape[1] > 64 else hidden
        hidden = linear.linear(norm.rms_norm(view, torch.ones(64), 1e-5), packed, scales, sums)
    return hidden


@needs_native
def test_a_tape_replays_on_new_inputs_and_shares_buffers() -> None:
    torch.manual_seed(3)
    linear = choose("int8_linear", "cpu")
    weights = []
    for _ in range(6):
        q, scales = linear.quantize(torch.randn(96, 64))
        weights.append((linear.pack(q), scales, linear.row_sums(q)))
    x = torch.randn(5, 64)
    with Tape() as tape:
        result = _small_model(x, weights)
    assert torch.equal(result, _small_model(x, weights))
    assert len(tape) == 13
    for _ in range(3):
        x.copy_(torch.randn(5, 64))
        tape.replay()
        assert torch.equal(result, _small_model(x, weights))
    # 13 outputs, but few are alive at once.
    assert tape.num_buffers <= 4


@needs_native
def test_tapes_of_one_arena_take_the_memory_of_the_largest() -> None:
    torch.manual_seed(4)
    linear = choose("int8_linear", "cpu")
    q, scales = linear.quantize(torch.randn(96, 64))
    weights = [(linear.pack(q), scales, linear.row_sums(q))] * 6
    arena = Arena()
    inputs = [torch.randn(rows, 64) for rows in (40, 33, 3, 1, 36)]
    tapes, results, sizes = [], [], []
    for x in inputs:
        with Tape(arena) as tape:
            results.append(arena.borrowed(_small_model(x, weights)))
        tapes.append(tape)
        sizes.append(arena.num_bytes)
    assert sizes[1] == sizes[0]  # 33 rows fit where 40 were
    assert sizes[4] == sizes[3] < 2 * sizes[0]
    for number in (3, 0, 4, 1, 2, 0, 3):  # each overwrites what the one before left
        inputs[number].copy_(torch.randn_like(inputs[number]))
        tapes[number].replay()
        assert torch.equal(results[number], _small_model(inputs[number], weights))


@needs_native
def test_tapes_do_not_nest() -> None:
    with Tape(), pytest.raises(RuntimeError, match="nest"), Tape():
        pass
    with Tape():
        pass


@needs_native
def test_a_tape_records_its_own_thread_alone() -> None:
    torch.manual_seed(5)
    linear = choose("int8_linear", "cpu")
    q, scales = linear.quantize(torch.randn(96, 64))
    weights = [(linear.pack(q), scales, linear.row_sums(q))] * 6
    x, other = torch.randn(5, 64), torch.randn(5, 64)
    expected = _small_model(other, weights)
    with ThreadPoolExecutor(1) as thread:
        arena, others_arena = Arena(), Arena()
        with Tape(arena) as tape:
            eager = thread.submit(_small_model, other, weights).result()
            result = _small_model(x, weights)

            def record() -> tuple[Tape, torch.Tensor]:
                with Tape(others_arena) as others:  # not nested: it is another thread's
                    return others, _small_model(other, weights)

            others, recorded = thread.submit(record).result()
    assert len(tape) == len(others) == 13
    assert torch.equal(eager, expected)
    assert torch.equal(recorded, expected)
    assert not arena.owns(eager)
    assert not arena.owns(recorded)
    for own in (result, eager, recorded):
        own.fill_(float("nan"))
    tape.replay()
    assert torch.equal(result, _small_model(x, weights))
    assert eager.isnan().all()
    assert recorded.isnan().all()  # the replay wrote to no other thread's memory
    others.replay()
    assert torch.equal(recorded, expected)


@needs_native
def test_a_number_of_threads_is_the_calling_threads() -> None:
    def number(own: int = 0) -> int:
        if own:
            native.set_num_threads(own)
        return native.num_threads()

    before = native.num_threads()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        assert [first.submit(number, 3).result(), second.submit(number).result()] == [
            3,
            3,
        ]  # what was set last
        assert [second.submit(number, 5).result(), first.submit(number).result()] == [5, 3]
    assert native.num_threads() == before
    native.set_num_threads(before)  # threads that set none take it again


@needs_native
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = (
        "import os, torch\n"
        "from quire.kernels import choose, native\n"
        "native.set_num_threads(3)\n"
        "norm = choose('norm', 'cpu')\n"
        "x = torch.randn(4000, 64)\n"
        "run = lambda: norm.rms_norm(x, torch.ones(64), 1e-5)\n"
        "expected = run()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(run(), expected) and torch.equal(run(), expected) else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert _python(code).stdout.strip() == "0"


@needs_native
def test_several_python_threads_may_call() -> None:
    norm = choose("norm", "cpu")
    x, weight = torch.randn(500, 64), torch.ones(64)
    expected = norm.rms_norm(x, weight, 1e-5)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(norm.rms_norm(x, weight, 1e-5), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_native
def test_no_operation_waits_for_what_runs_aside() -> None:
    """Adapters are packed beside the steps: in the middle of a large one, what steps call comes back."""
    rank, width = 512, 16384
    source = torch.zeros(2 * rank * width)
    starts = 16 * width * torch.arange(64).view(2, 32)
    sites = torch.tensor([[rank, width, width, 16, 0, 0, 4 * rank * width, 0]])
    places = Places(sites, starts[:1].contiguous(), starts[1:].contiguous())
    pack, target = choose("lora_pack", "cpu").pack, torch.empty_like(source)
    norm, x, weight = choose("norm", "cpu"), torch.randn(1, 64), torch.ones(64)
    for _ in range(20):  # a busy machine may not let both run at once every time
        took: list[float] = []

        def work(took: list[float] = took) -> None:
            started = time.perf_counter()
            pack(source.view(torch.uint8), places, target.view(torch.uint8), torch.float32)
            took.append(time.perf_counter() - started)

        thread = threading.Thread(target=work)
        thread.start()
        longest = 0.0
        while thread.is_alive():
            started = time.perf_counter()
            norm.rms_norm(x, weight, 1e-5)
            longest = max(longest, time.perf_counter() - started)
        if longest < took[0] / 3:
            return
    pytest.fail("an operation takes as long as the packing beside it")


def test_looking_for_a_gpu_kernel_compiles_no_native_code(monkeypatch):
    """It did at each first start with adapters, for a minute."""
    from quire.engine.build import adapters
    from quire.quant.schemes import named

    def compile_it():
        raise AssertionError("native code was compiled")

    monkeypatch.setattr(native, "available", compile_it)
    adapters._has_triton()
    assert named("int4-g128@cuda1").name == "int4-g128@cuda1"  # a start report names packed rows so
