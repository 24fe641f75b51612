"""AdamW is torch's in 32 bits and close to it in 8; schedules rise and fall where they should."""

import pytest
import torch

from quire.train.optimizer import AdamW, rate_at

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


def test_schedules():
    cosine = [rate_at(step, 100, 10, 1.0, "cosine") for step in range(100)]
    assert cosine[0] == 0.1
    assert cosine[9] == cosine[10] == 1.0
    assert cosine[55] == pytest.approx(0.5)
    assert cosine[99] < 0.001
    assert rate_at(99, 100, 10, 1.0, "constant") == 1.0
    assert rate_at(55, 100, 10, 1.0, "linear") == pytest.approx(0.5)
