"""A device whose memory runs out anywhere in a step loses the newest request; the others say what they would have."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.structured import StructuredOutput
from quire.engine import build as building
from quire.engine.engine import Engine
from quire.grammar.compiler import Compiler
from quire.grammar.vocabulary import Vocabulary
from quire.runner.adapters import AdapterSlots
from quire.runner.cuda import CudaOps
from quire.runner.device_inputs import DeviceInputs
from quire.runner.graphs import Graphs
from quire.runner.transfer import TransferEngine
from quire.sampling import penalties
from quire.sampling.columns import DeviceColumns
from quire.sampling.sampler import Sampler
from quire_lab.baselines.merged import MergedAdapter
from tests.adapters.making import write, write_model
from tests.engine.test_device_runner import (
    PROMPTS,
    SAMPLINGS,
    SHAPE,
    DeviceRunner,
    EagerGraphs,
    PaddingRunner,
)

PLAIN = {
    "load_format": "dummy", "dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 200,
    "swap_space": 0.001,
}  # fmt: skip
Answers = dict[tuple[str, int], tuple[int, ...]]


class Fault:
    """Stands where memory is asked for: fails at some calls, the first being 0, before or after the work is done."""

    def __init__(self, work: Callable[..., object], calls: range, late: bool = False) -> None:
        self.work, self.calls, self.late = work, calls, late
        self.num_calls = self.num_faults = 0

    def __call__(self, *given: object, **named: object) -> object:
        self.num_calls += 1
        fails = self.num_calls - 1 in self.calls
        done = self.work(*given, **named) if self.late or not fails else None
        if fails:
            self.num_faults += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return done

    def put(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> "Fault":
        monkeypatch.setattr(owner, name, lambda *given, **named: self(*given, **named))
        return self


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(SHAPE))
    return made


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.build.runner.Runner", DeviceRunner)


def _engine(folder: Path, **settings: object) -> Engine:
    return building.build(EngineConfig.of(model=str(folder), **{**PLAIN, **settings})).engine


def _run(engine: Engine, adapters: Listed[str | None] = (None,) * 6) -> tuple[Answers, dict[str, str]]:
    """What was said, and the errors of those who were shed."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add(Request(str(index), prompt, sampling, adapter=adapters[index]))
    found: Answers = {}
    errors: dict[str, str] = {}
    for _ in range(500):
        if not engine.has_work:
            break
        for update in engine.step():
            key = (update.request_id, update.index)
            assert update.request_id not in errors or update.error, "who was shed still speaks"
            found[key] = found.get(key, ()) + update.token_ids
            if update.error:
                errors[update.request_id] = update.error
        engine.check_integrity()
    assert not engine.has_work, "it goes round and round"
    assert engine.memory.num_free == engine.memory.num_blocks
    assert engine.memory.swap.hosts.num_used == 0
    engine.close()
    return found, errors


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[..., Answers]:
    """What is said where memory suffices, computed once for each setting."""
    return cache(lambda **settings: _run(_engine(folder, **settings))[0])


def _others(found: Answers, errors: dict[str, str]) -> Answers:
    return {key: tokens for key, tokens in found.items() if key[0] not in errors}


PLACES: dict[str, tuple[object, str, dict[str, object]]] = {
    "rows": (DeviceInputs, "apply", {}),
    "parameters": (DeviceColumns, "update", {}),
    "forward": (CudaOps, "forward", {}),
    "sampling": (Sampler, "__call__", {}),
    "penalties": (penalties, "_repetition", {}),
    "moves": (TransferEngine, "move", {"num_blocks": 44, "preemption_mode": "swap"}),
}


# Blocks that have moved must not move again, and nothing after them asks for memory.
@pytest.mark.parametrize(("in_flight", "late", "place"), [
    *((1, False, place) for place in PLACES), *((0, True, place) for place in PLACES if place != "moves"),
])  # fmt: skip
def test_the_newest_pays_and_the_others_say_the_same(
    folder: Path,
    plain: Callable[..., Answers],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    in_flight: int,
    late: bool,
) -> None:
    owner, name, settings = PLACES[place]
    wanted = plain(**settings)
    for first in (0, 5):
        engine = _engine(folder, steps_in_flight=in_flight, **settings)
        with monkeypatch.context() as patched:
            fault = Fault(getattr(owner, name), range(first, first + 1), late).put(patched, owner, name)
            found, errors = _run(engine)
        if not fault.num_faults:
            assert first  # rows change less often than that
            continue
        assert len(errors) == 1
        (shed, error), = errors.items()  # fmt: skip
        assert "did not fit the GPU's memory (CUDA out of memory. Tried to allocate 2.00 GiB): lower" in error
        assert error.startswith(f"request {shed}: a step of ")
        assert _others(found, errors) == _others(wanted, errors)


@pytest.mark.parametrize("place", ["rows", "sampling", "moves"])
def test_memory_that_never_comes_back_ends_everyone_and_not_the_engine(
    folder: Path, plain: Callable[..., Answers], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, settings = PLACES[place]
    engine = _engine(folder, **settings)
    wanted = plain(**settings)
    with monkeypatch.context() as patched:
        first = 0 if place == "moves" else 2  # only a step with transfers moves blocks
        Fault(getattr(owner, name), range(first, 10_000)).put(patched, owner, name)
        close, engine.close = engine.close, lambda: None
        found, errors = _run(engine)
    assert errors
    assert _others(found, errors) == _others(wanted, errors)
    engine.close = close
    found, errors = _run(engine)  # the memory is there again, and so is everything that waited for it
    assert not errors
    assert found == wanted


def test_copies_of_shared_pages_are_not_lost(folder: Path, plain: Callable[..., Answers]) -> None:
    wanted = plain()
    engine = _engine(folder)
    kernel = engine._runner._pages
    copied: list[int] = []

    class Pages:
        @staticmethod
        def copy_blocks(data, sources, targets):
            copied.append(len(sources))
            if len(copied) in (1, 3, 4):
                raise torch.OutOfMemoryError("no room")
            kernel.copy_blocks(data, sources, targets)

    engine._runner._pages = Pages
    found, errors = _run(engine)
    assert len(copied) >= 4
    assert len(errors) == 3
    assert _others(found, errors) == _others(wanted, errors)


@pytest.mark.parametrize("mode", ["batched", "merge"])
@pytest.mark.parametrize("calls", [range(1), range(2)])
def test_adapters_that_did_not_fit_are_whole_when_they_are_used(tmp_path, monkeypatch, mode, calls):
    names = ["one", "two", None, "one", "two", "one"]
    model, adapters = write_model(tmp_path / "model"), tmp_path / "adapters"
    for seed, name in enumerate(("one", "two"), 1):
        write(adapters / name, seed, 8)
    settings = {"lora_dir": str(adapters), "lora_mode": mode, "num_blocks": 400}
    wanted, errors = _run(_engine(model, **settings), names)
    assert not errors
    engine = _engine(model, **settings)
    if mode == "merge":
        fault = Fault(MergedAdapter._merge, calls, late=True).put(monkeypatch, MergedAdapter, "_merge")
    else:  # in the middle of a load, and of what follows it
        fault = Fault(AdapterSlots._copy, calls, late=True).put(monkeypatch, AdapterSlots, "_copy")
        Fault(AdapterSlots._sent, range(2, 3)).put(monkeypatch, AdapterSlots, "_sent")
    found, errors = _run(engine, names)
    assert fault.num_faults == len(calls)
    assert len(errors) == len(calls) + (mode == "batched")
    assert _others(found, errors) == _others(wanted, errors)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_step_that_waited_for_its_mask_is_taken_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    letters = [bytes([32 + token]) for token in range(97)]

    def answers(calls: range) -> tuple[Answers, dict[str, str]]:
        engine = _engine(folder, steps_in_flight=in_flight)
        compiler = Compiler(lambda: Vocabulary(letters, frozenset(), ()))
        with monkeypatch.context() as patched:
            patched.setattr(engine._structured, "_make_compiler", lambda: compiler)
            form = StructuredOutput.regex("([a-f]{2}x)+")
            patched.setattr("tests.engine.test_memory_full.SAMPLINGS", [
                one.changed(structured=form) if index in (0, 2, 5) else one for index, one in enumerate(SAMPLINGS)
            ])  # fmt: skip
            Fault(Sampler.__call__, calls).put(patched, Sampler, "__call__")
            return _run(engine)

    wanted, errors = answers(range(0))
    assert not errors
    for calls in (range(4, 5), range(7, 9)):
        found, errors = answers(calls)
        assert len(errors) == len(calls)
        assert _others(found, errors) == _others(wanted, errors)


def test_a_graph_that_does_not_fit_costs_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of its size run without one."""
    samplings = [one.changed(prompt_logprobs=None) for one in SAMPLINGS]  # steps with those have no graph
    monkeypatch.setattr("tests.engine.test_memory_full.SAMPLINGS", samplings)
    wanted, _ = _run(_engine(folder))
    tried: list[object] = []

    class FullGraphs(EagerGraphs):
        _run = Graphs._run

        def _capture(self, *what: object) -> None:
            tried.append(what)
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("quire.engine.build.runner.Runner", PaddingRunner)
    engine = _engine(folder)
    graphs = engine._runner._ops._graphs
    graphs.__class__, graphs._captured, graphs._too_large = FullGraphs, {}, set()
    assert _run(engine) == (wanted, {})
    assert len(tried) == len(set(tried)) > 2


def test_drafts_that_do_not_fit_are_not_made(folder: Path, plain: Callable[..., Answers]) -> None:
    """The small model's memory costs no request: its sequences go on without drafts."""
    wanted = plain()
    drafting = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    engine = _engine(folder, speculative_config=drafting)
    ops = engine.speculation._proposer._runner._ops
    fault = Fault(ops.forward, range(2, 9))
    ops.forward = fault
    found, errors = _run(engine)
    assert fault.num_faults == 7
    assert not errors
    assert found == wanted
    assert engine.draft_stats.num_accepted_tokens
