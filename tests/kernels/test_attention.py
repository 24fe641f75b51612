"""Every kernel of attention beside the reference: long contexts, padded rows, capped scores, slopes and tables."""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

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
Kernel = tuple[ModuleType, ModuleType]
pytestmark = pytest.mark.skipif(not KERNELS, reason="only the reference runs on this machine")


@pytest.fixture(params=KERNELS, ids="-".join)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """(the alternative, the reference)."""
    name, isa = request.param
    torch.manual_seed(0)
    with instruction_set(isa):
        yield registry.load("attention", name), registry.load("attention", "reference")


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (600, torch.float32), (0, torch.int8)])
def test_attention_agrees_over_several_segments(kernel: Kernel, window: int, dtype: torch.dtype) -> None:
    native, reference = kernel
    case = random_case(Shape(2, 1, 32, dtype=dtype), [1500, 1100, 513], [1, 20, 2])
    actual = native.paged_attention(*case.arguments(window), **case.scales)
    torch.testing.assert_close(
        actual, reference.paged_attention(*case.arguments(window), **case.scales), rtol=2e-5, atol=2e-5
    )


def test_attention_passes_over_rows_without_queries(kernel: Kernel) -> None:
    """As padding leaves them: first, between the others and last."""
    native, reference = kernel
    if native.__name__.endswith("triton"):
        pytest.skip("Triton leaves the results of padding as they were")
    case = random_case(Shape(6, 2, 24), [20, 33], [1, 7])
    case = replace(
        case,
        query_starts=torch.tensor([0, 0, 1, 1, 8, 8], dtype=torch.int32),
        context_lens=torch.tensor([0, 20, 9, 33, 0], dtype=torch.int32),
        block_tables=case.block_tables[[0, 0, 0, 1, 0]],
    )
    actual = native.paged_attention(*case.arguments(), **case.scales)
    torch.testing.assert_close(
        actual, reference.paged_attention(*case.arguments(), **case.scales), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (90, torch.float32), (0, torch.int8)])
@pytest.mark.parametrize(
    ("soft_cap", "sloped"), [(3.0, ""), (0.0, "line"), (50.0, "line"), (0.0, "table"), (50.0, "table")]
)
def test_attention_with_capped_scores_and_slopes_agrees(
    kernel: Kernel, window: int, dtype: torch.dtype, soft_cap: float, sloped: str
) -> None:
    native, reference = kernel
    case = random_case(Shape(6, 2, 24, dtype=dtype), [600, 70, 5, 130, 64, 7], [1, 1, 5, 40, 3, 7])
    case = replace(case, scale=1.5)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.7, 0.0]) if sloped else None
    if sloped == "table":  # by distance, up to 100 on each side
        slopes = torch.randn(6, 201, generator=torch.Generator().manual_seed(3)) * 2
    more = {**case.scales, "soft_cap": soft_cap, "slopes": slopes}
    actual = native.paged_attention(*case.arguments(window), **more)
    expected = reference.paged_attention(*case.arguments(window), **more)
    torch.testing.assert_close(actual, expected, rtol=5e-5, atol=5e-5)
    plain = reference.paged_attention(*case.arguments(window), **case.scales)
    assert (actual - plain).abs().max() > 0.1
