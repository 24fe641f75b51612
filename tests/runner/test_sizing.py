"""How a GPU is divided when others live on it: with the driver's figures given by hand, since none is here."""

import pytest
import torch

from quire.runner import sizing
from quire.runner.sizing import GPU_MARGIN, divide_gpu

GB = 10**9


def _card(monkeypatch: pytest.MonkeyPatch, free: int, total: int, reserved: int, allocated: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


@pytest.mark.parametrize("others", [0, 10 * GB, 60 * GB, 79 * GB])
def test_what_others_hold_is_never_given_away_and_all_of_it_adds_up(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    total, reserved, weights, activations = 80 * GB, 17 * GB, 16 * GB, 2 * GB
    reserved, weights = min(reserved, total - others), min(weights, total - others)
    _card(monkeypatch, total - others - reserved, total, reserved, weights)
    found = divide_gpu(torch.device("cuda"), 0.9, activations)
    assert (found.others, found.weights) == (others, weights)
    assert found.pool >= 0
    assert found.weights + found.activations + found.pool <= max(0.9 * total, weights + activations)
    if found.pool:
        assert others + weights + activations + found.pool + GPU_MARGIN <= total
    assert found.total == sum(getattr(found, name) for name in sizing.DeviceMemory.__slots__[1:])


def test_alone_on_the_card_the_share_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, 60 * GB, 80 * GB, 20 * GB, 16 * GB)
    assert divide_gpu(torch.device("cuda"), 0.5, GB).pool == 40 * GB - 16 * GB - GB
