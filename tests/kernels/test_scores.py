"""Scores that models change before the softmax: capped ones, and ALiBi's slopes by distance."""

from dataclasses import replace

import pytest
import torch

from quire.kernels import registry
from tests.kernels.cases import Shape, instruction_set, instruction_sets, random_case

KERNELS = [
    (name, isa)
    for name in registry.alternatives("attention")
    if name in ("cpu", "triton")
    for isa in (instruction_sets() if name == "cpu" else ("",))
]


@pytest.mark.skipif(not KERNELS, reason="no kernel of attention but the reference runs on this machine")
@pytest.mark.parametrize(("name", "isa"), KERNELS)
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (90, torch.float32), (0, torch.int8)])
@pytest.mark.parametrize(("soft_cap", "sloped"), [(3.0, False), (0.0, True), (50.0, True)])
def test_attention_with_capped_scores_and_slopes_agrees(
    name: str, isa: str, window: int, dtype: torch.dtype, soft_cap: float, sloped: bool
) -> None:
    torch.manual_seed(0)
    kernel, reference = registry.load("attention", name), registry.load("attention", "reference")
    case = random_case(Shape(6, 2, 24, dtype=dtype), [600, 70, 5, 130, 64, 7], [1, 1, 5, 40, 3, 7])
    case = replace(case, scale=1.5)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.7, 0.0]) if sloped else None
    more = {**case.scales, "soft_cap": soft_cap, "slopes": slopes}
    with instruction_set(isa):
        actual = kernel.paged_attention(*case.arguments(window), **more)
    expected = reference.paged_attention(*case.arguments(window), **more)
    torch.testing.assert_close(actual, expected, rtol=5e-5, atol=5e-5)
    plain = reference.paged_attention(*case.arguments(window), **case.scales)
    assert (actual - plain).abs().max() > 0.1
