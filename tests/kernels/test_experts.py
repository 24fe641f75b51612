"""Routers and experts of mixtures: every alternative agrees with the reference."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from quire.kernels import registry
from quire.kernels.moe.records import AwayExperts, ClampedGate
from tests.kernels.cases import instruction_set, instruction_sets

Kernel = tuple[ModuleType, ModuleType]
KERNELS = [
    (name, isa)
    for name in registry.alternatives("moe")
    if name in ("cpu", "triton")
    for isa in (instruction_sets() if name == "cpu" else ("",))
]
pytestmark = pytest.mark.skipif(not KERNELS, reason="only the reference runs on this machine")


@pytest.fixture(params=KERNELS, ids="-".join)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """(the alternative, the reference)."""
    name, isa = request.param
    torch.manual_seed(0)
    with instruction_set(isa):
        yield registry.load("moe", name), registry.load("moe", "reference")


@pytest.mark.parametrize(("experts", "top_k", "renormalize"), [(4, 1, True), (5, 2, False), (60, 8, True)])
def test_routers_choose_alike(kernel: Kernel, experts: int, top_k: int, renormalize: bool) -> None:
    fast, reference = kernel
    x, weight = torch.randn(9, 70), torch.randn(experts + 1, 70) * 0.2
    logits = reference.logits(x, weight)
    if hasattr(fast, "logits"):
        torch.testing.assert_close(fast.logits(x, weight), logits, rtol=1e-5, atol=1e-5)
    logits[3] = 0.5  # ties go to the lowest id
    for width in (experts, experts + 1):
        actual = fast.choose(logits[:, :width].contiguous(), experts, top_k, renormalize)
        expected = reference.choose(logits[:, :width], experts, top_k, renormalize)
        assert torch.equal(actual.experts, expected.experts)
        assert actual.experts[3].tolist() == list(range(top_k))
        torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-5, atol=1e-6)
        assert (actual.gates is None) == (expected.gates is None) == (width == experts)
        if expected.gates is not None:
            torch.testing.assert_close(actual.gates, expected.gates, rtol=1e-5, atol=1e-6)
    broken = fast.choose(torch.full((2, experts), float("nan")), experts, top_k, renormalize)
    assert ((broken.experts >= 0) & (broken.experts < experts)).all()


@pytest.mark.parametrize(  # up to 4 tokens by a GEMV, then one case for each size of tiles
    ("tokens", "shared"), [(0, False), (1, True), (3, False), (40, True), (150, False), (220, True)]
)
def test_experts_agree_with_every_expert_run_on_every_token(
    kernel: Kernel, tokens: int, shared: bool
) -> None:
    experts, top_k, hidden, inner = 6, 2, 72, 40
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    gate_up, down = torch.randn(experts, 2 * inner, hidden) * 0.1, torch.randn(experts, hidden, inner) * 0.1
    gate_up[4], down[4] = float("nan"), float("nan")  # read for no token
    logits = torch.randn(tokens, experts + shared)
    logits[:, 4] = -100.0
    beside = torch.randn(tokens, hidden) if shared else None
    _, reference = kernel
    routing = reference.choose(logits, experts, top_k, True)
    gate, up = torch.einsum("th,efh->etf", x, gate_up.nan_to_num()).chunk(2, dim=-1)
    every = torch.einsum("etf,ehf->eth", torch.nn.functional.silu(gate) * up, down.nan_to_num())
    weights = torch.zeros(tokens, experts).scatter(1, routing.experts.long(), routing.weights)
    expected = residual + torch.einsum("te,eth->th", weights, every)
    if beside is not None:
        expected += routing.gates[:, None] * beside
    for module in kernel:
        for invariant in (False, True):
            actual = module.experts(x, gate_up, down, routing, residual.clone(), beside, invariant)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_clamped_experts_with_biases_agree(kernel: Kernel, tokens: int) -> None:
    _, reference = kernel
    experts, hidden, inner = 6, 72, 40
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    gate_up, down = torch.randn(experts, 2 * inner, hidden) * 0.2, torch.randn(experts, hidden, inner) * 0.2
    clamped = ClampedGate(1.702, 1.5, torch.randn(experts, 2 * inner), torch.randn(experts, hidden))
    routing = reference.choose(torch.randn(tokens, experts), experts, 2, True)
    both = torch.einsum("th,efh->etf", x, gate_up) + clamped.gate_up_bias[:, None]
    gate, up = both[..., :inner].clamp(max=1.5), both[..., inner:].clamp(-1.5, 1.5)
    every = torch.einsum("etf,ehf->eth", gate * torch.sigmoid(1.702 * gate) * (up + 1), down)
    weights = torch.zeros(tokens, experts).scatter(1, routing.experts.long(), routing.weights)
    expected = residual + torch.einsum("te,eth->th", weights, every + clamped.down_bias[:, None])
    for module in kernel:
        for invariant in (False, True):
            actual = module.experts(x, gate_up, down, routing, residual.clone(), None, invariant, clamped)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("ordered_dots")
def test_invariant_experts_give_a_token_the_same_bits_in_any_batch(kernel: Kernel) -> None:
    fast, reference = kernel
    x, gate_up, down = torch.randn(70, 72), torch.randn(6, 80, 72) * 0.1, torch.randn(6, 72, 40) * 0.1
    logits = torch.randn(70, 6)
    whole = fast.experts(x, gate_up, down, reference.choose(logits, 6, 2, True), x.clone(), invariant=True)
    for first, last in ((0, 1), (3, 9), (20, 60), (69, 70)):
        routing = reference.choose(logits[first:last], 6, 2, True)
        some = fast.experts(x[first:last], gate_up, down, routing, x[first:last].clone(), invariant=True)
        assert torch.equal(some, whole[first:last])


@pytest.mark.parametrize("tokens", [2, 40])
def test_experts_that_are_away_give_the_same_bits(kernel: Kernel, tokens: int) -> None:
    x, gate_up, down = torch.randn(tokens, 72), torch.randn(6, 80, 72) * 0.1, torch.randn(6, 72, 40) * 0.1
    clamped = ClampedGate(1.702, 1.5, torch.randn(6, 80), torch.randn(6, 72))
    stack, away = [5, 0, 3], [4, 2, 1]
    places = torch.tensor([1, -3, -2, 2, -1, 0], dtype=torch.int32)
    others = AwayExperts(gate_up[away], down[away], places)
    for module in kernel:
        routing = module.choose(torch.randn(tokens, 6), 6, 3, True)
        for given in (None, clamped):
            whole = module.experts(x, gate_up, down, routing, x.clone(), clamped=given)
            parts = gate_up[stack], down[stack]
            some = module.experts(x, *parts, routing, x.clone(), clamped=given, away=others)
            assert torch.equal(some, whole)
