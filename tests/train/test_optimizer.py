"""AdamW is torch's in 32 bits and close to it in 8; schedules rise and fall where they should."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.core.errors import TrainingError
from quire.train import optimizer as optimizers
from quire.train.finetune import FinetuneJob, finetune
from quire.train.optimizer import AdamW, adamw, rate_at
from quire.train.settings import FINISHED, STOPPED, TrainSettings

SCALE = torch.logspace(-2, 1, 1000)
TARGET = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def loss(values: torch.Tensor) -> torch.Tensor:
    return (SCALE * (values - TARGET) ** 2).sum()


def minimised(optimizer: AdamW | None, steps: int = 60) -> torch.Tensor:
    """A badly scaled quadratic, by the given optimizer or torch's."""
    values = torch.zeros(1000, requires_grad=optimizer is None)
    theirs = torch.optim.AdamW([values], lr=0.05, weight_decay=0.1) if optimizer is None else None
    for _ in range(steps):
        if theirs is not None:
            theirs.zero_grad()
            loss(values).backward()
            theirs.step()
        else:
            optimizer.step(values, 2 * SCALE * (values - TARGET), 0.05)
    return values.detach()


def test_adamw_with_32_bit_states_is_that_of_torch():
    mine = minimised(AdamW(1000, torch.device("cpu"), weight_decay=0.1))
    torch.testing.assert_close(mine, minimised(None), rtol=1e-5, atol=1e-6)


def test_adamw_with_8_bit_states_is_close_and_a_quarter_of_the_size():
    optimizer = AdamW(1000, torch.device("cpu"), bits=8, weight_decay=0.1)
    assert optimizer.num_bytes == 2 * (1024 + 4 * 4)  # codes of whole blocks of 256, and a scale each
    start, mine, theirs = (
        loss(values) for values in (torch.zeros(1000), minimised(optimizer), minimised(None))
    )
    assert mine - theirs < 0.01 * (start - theirs)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_restored_optimizer_goes_on_bit_for_bit(bits):
    grads = torch.randn(8, 700)

    def run(interrupted: bool) -> torch.Tensor:
        optimizer, values = AdamW(700, torch.device("cpu"), bits), torch.zeros(700)
        for at, grad in enumerate(grads):
            if interrupted and at == 4:
                saved = {name: part.clone() for name, part in optimizer.state().items()}
                optimizer = AdamW(700, torch.device("cpu"), bits)
                optimizer.load(saved, at)
            optimizer.step(values, grad, 0.01)
        return values

    assert torch.equal(run(False), run(True))


def test_states_of_8_bits_are_those_of_bitsandbytes_where_it_is_installed():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    cpu = torch.device("cpu")
    optimizer = adamw(1000, cpu, 8, 0.1, paged=False)
    assert (optimizer.library, optimizer.num_bytes) == ("bitsandbytes", 2 * (1000 + 4 * 4))
    start, mine, theirs = (
        loss(values) for values in (torch.zeros(1000), minimised(optimizer), minimised(None))
    )
    assert mine - theirs < 0.02 * (start - theirs)
    again = adamw(1000, cpu, 8, 0.1, paged=False)
    again.load({name: part.clone() for name, part in optimizer.state().items()}, optimizer.num_steps)
    one, other, grads = torch.ones(1000), torch.ones(1000), torch.randn(1000)
    optimizer.step(one, grads, 0.01)
    again.step(other, grads, 0.01)
    assert torch.equal(one, other)
    own = adamw(1000, cpu, 8, 0.1, paged=True)
    assert own.library == ""
    with pytest.raises(
        TrainingError, match="not those of this run: 8 bits are bitsandbytes' where it is installed"
    ):
        own.load(optimizer.state(), 1)


def fake_library(monkeypatch: pytest.MonkeyPatch, step: Callable[..., None]) -> None:
    """bitsandbytes, whose step is this one."""
    functional = ModuleType("functional")
    functional.create_dynamic_map = lambda signed: torch.linspace(-signed, 1, 256)
    functional.optimizer_update_8bit_blockwise = step
    library = ModuleType("bitsandbytes")
    library.functional = functional
    monkeypatch.setattr(optimizers, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)


def no_kernel(*_: Any) -> None:
    raise NotImplementedError("no kernel for this device")


@pytest.mark.parametrize(
    ("step", "why"),
    [(None, "import of bitsandbytes"), (no_kernel, "no kernel for this"), (lambda *_: None, "step is wrong")],
)
def test_states_are_quires_own_where_bitsandbytes_does_not_work(step, why, monkeypatch):
    fake_library(monkeypatch, step)
    if step is None:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    optimizer = adamw(700, torch.device("cpu"), 8, 0.0, paged=False)
    assert optimizer.library == ""
    assert why in optimizer.why_own
    assert "states are Quire's own" in optimizer.why_own


def test_a_run_with_own_states_goes_on_with_them_where_bitsandbytes_is_new(tiny, data, tmp_path, monkeypatch):
    settings = TrainSettings(rank=2, epochs=1, batch_size=4, optimizer="adamw8bit", learning_rate=0.01)
    job = FinetuneJob(data, tmp_path / "mine", str(tiny), settings=settings, device="cpu", num_threads=1)
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    steps: list[Any] = []
    assert finetune(job, steps.append, stop=lambda: len(steps) == 2) == STOPPED
    fake_library(monkeypatch, lambda kind, grads, values, *_: values.sub_(grads))
    assert adamw(700, torch.device("cpu"), 8, 0.0, paged=False).library == "bitsandbytes"
    assert finetune(job, steps.append) == FINISHED
    assert [report.step for report in steps] == list(range(1, 6))


FakedGpu = Callable[[int], tuple[torch.device, list[str]]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakedGpu:
    """A GPU without CUDA: its device, and where each vector was made. After `room` vectors it has no memory."""
    zeros = torch.zeros

    def fake(room: int) -> tuple[torch.device, list[str]]:
        made: list[str] = []

        def made_zeros(*size: int, device: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            where = "pinned" if pin_memory else torch.device(device).type
            assert not pin_memory or device == "cpu"
            if made.count("cuda") == room and where == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory")
            made.append(where)
            return zeros(*size, **more)

        monkeypatch.setattr(torch, "zeros", made_zeros)
        return torch.device("cuda"), made

    return fake


def stepped(optimizer: AdamW, num_steps: int = 8) -> torch.Tensor:
    """Weights after some steps with gradients drawn at random."""
    drawn = torch.Generator().manual_seed(7)
    values = torch.randn(1000, generator=drawn)
    for _ in range(num_steps):
        optimizer.step(values, torch.randn(1000, generator=drawn), 0.01)
    return values


@pytest.mark.parametrize("bits", [32, 8])
def test_paged_states_are_in_pinned_host_memory_and_give_the_same_bits(bits, gpu, monkeypatch):
    expected = stepped(AdamW(1000, torch.device("cpu"), bits, weight_decay=0.1))
    device, made = gpu(0)
    optimizer = AdamW(1000, device, bits, weight_decay=0.1, paged=True)
    assert set(made) == {"pinned"}
    monkeypatch.setattr(optimizers, "CHUNK", 512)  # in two parts
    assert torch.equal(stepped(optimizer), expected)


@pytest.mark.parametrize("room", [0, 1])
@pytest.mark.parametrize("bits", [32, 8])
def test_states_for_which_a_gpu_has_no_memory_are_paged_with_the_same_bits(bits, room, gpu):
    """With room for one vector, the others would not fit: none is left on the device."""
    expected = stepped(AdamW(1000, torch.device("cpu"), bits, weight_decay=0.1))
    device, made = gpu(room)
    optimizer = AdamW(1000, device, bits, weight_decay=0.1)
    assert optimizer.paged
    assert made == ["cuda"] * room + ["pinned"] * len(optimizer.state())
    assert torch.equal(stepped(optimizer), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [32, 8])
def test_paged_states_give_the_same_bits_on_a_gpu(bits, monkeypatch):
    """As above, with states that are copied to the device for each step."""
    device, values = torch.device("cuda"), []
    monkeypatch.setattr(optimizers, "CHUNK", 512)
    for paged in (False, True):
        optimizer, drawn = AdamW(1000, device, bits, paged=paged), torch.Generator(device).manual_seed(7)
        assert {part.is_pinned() for part in optimizer.state().values()} == {paged}
        values.append(torch.zeros(1000, device=device))
        for _ in range(8):
            optimizer.step(values[-1], torch.randn(1000, device=device, generator=drawn), 0.01)
    assert torch.equal(*values)


def test_schedules():
    cosine = [rate_at(step, 100, 10, 1.0, "cosine") for step in range(100)]
    assert cosine[0] == 0.1
    assert cosine[9] == cosine[10] == 1.0
    assert cosine[55] == pytest.approx(0.5)
    assert cosine[99] < 0.001
    assert rate_at(99, 100, 10, 1.0, "constant") == 1.0
    assert rate_at(55, 100, 10, 1.0, "linear") == pytest.approx(0.5)
