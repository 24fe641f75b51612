"""Products: what was measured is kept, what is not surely faster or is wrong is not chosen, torch serves elsewhere."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.linear import cublas, kept, measure, reference
from quire.kernels.linear.cublaslt import Kind
from quire.kernels.linear.kept import ChipKey
from quire.kernels.linear.measure import PYTORCHS

KEY = ChipKey("A chip", "130000", "2.11.0")
KIND = Kind(24, 32, torch.bfloat16)
EXTRAS = [(), ("residual",), ("bias",), ("relu",), ("bias", "relu"), ("bias", "residual"), ("widened",)]


@pytest.mark.parametrize("extras", EXTRAS)
def test_the_reference_is_a_linear_layer(extras):
    x, weight = torch.randn(5, 32), torch.randn(24, 32)
    bias = torch.randn(24) if "bias" in extras else None
    residual = torch.randn(5, 24) if "residual" in extras else None
    expected = F.linear(x, weight, bias) + (residual if residual is not None else 0)
    expected = expected.relu() if "relu" in extras else expected
    named = {name: True for name in extras if name in ("relu", "widened")}
    torch.testing.assert_close(reference.product(x, weight, bias, residual, **named), expected)


class FakePlan:
    """Candidates that multiply on the CPU, some wrongly, and take as long as their cost says."""

    def __init__(self, kind, num_tokens, errors=(0.0, 0.0, 0.0), spend=lambda index: None):
        self.kind, self.num_tokens, self._errors, self._spend = kind, num_tokens, errors, spend

    @property
    def candidates(self):
        return list(range(len(self._errors)))

    def run(self, index, x, weight, bias, out):
        if self._errors[index] is None:
            raise RuntimeError("cuBLASLt answered with status 15")
        self._spend(index)
        residual = out.clone() if self.kind.residual else None
        out.copy_(reference.product(x, weight, bias, residual, self.kind.relu) * (1 + self._errors[index]))


class Clock:
    """Time that passes by what is launched: -1 is PyTorch's choice, else a candidate."""

    def __init__(self, costs):
        self._costs, self._now = costs, 0.0

    def spend(self, index):
        self._now += self._costs[index]

    def pytorchs(self, *args):
        self.spend(PYTORCHS)
        return reference.product(*args)

    def seconds(self, run, num_launches):
        before = self._now
        run()
        return self._now - before


def _pairs(kind, count=3):
    make = lambda *shape: torch.randn(*shape, dtype=kind.dtype)
    return [
        (make(kind.num_rows, kind.num_columns), make(kind.num_rows) if kind.bias else None)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("times", "errors", "chosen"),
    [
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, 0), 2),
        ({-1: 10.0, 0: 10.0, 1: 9.9, 2: 9.85}, (0, 0, 0), PYTORCHS),  # not by enough
        ({-1: 10.0, 0: 11.0, 1: 12.0, 2: 13.0}, (0, 0, 0), PYTORCHS),
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, 0.5), PYTORCHS),  # fast and wrong
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, None), 1),  # fast and refused
        ({-1: 10.0, 0: 9.0, 1: 8.0}, (0, None), 0),  # fewer than there are finals
        ({-1: 10.0, 0: 8.0}, (None,), PYTORCHS),
        ({-1: 10.0}, (), PYTORCHS),
    ],
)
@pytest.mark.parametrize("extras", [{}, {"residual": True}, {"bias": True, "relu": True}])
def test_the_fastest_that_is_right_is_chosen(monkeypatch, times, errors, chosen, extras):
    clock, kind = Clock(times), Kind(24, 32, torch.bfloat16, **extras)
    monkeypatch.setattr(measure, "queued_seconds", clock.seconds)
    monkeypatch.setattr(measure, "product", clock.pytorchs)
    assert measure.fastest(FakePlan(kind, 4, errors, clock.spend), _pairs(kind)) == chosen


def test_weights_go_round_until_they_come_from_memory(monkeypatch):
    pairs = _pairs(KIND, 9)
    monkeypatch.setattr(measure, "COLD_BYTES", 4 * 24 * 32 * 2)
    assert len(measure._cold(pairs)) == 4
    assert len(measure._cold(pairs[:2])) == 2


def test_choices_are_kept_per_chip_and_added_to(empty_cache):
    assert kept.load(KEY) == {}
    kept.store(KEY, {"a": {8: 1, 16: PYTORCHS}})
    kept.store(KEY, {"a": {32: 2}, "b": {8: 0}})
    expected = {"a": {8: 1, 16: PYTORCHS, 32: 2}, "b": {8: 0}}
    assert kept.load(KEY) == expected
    assert kept.load(ChipKey("A chip", "130001", "2.11.0")) == {}
    assert kept.cached() == [(KEY, expected)]
    assert kept.forget() == 1
    assert kept.cached() == []


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", json.dumps({"format": 0, "key": asdict(KEY), "chosen": {}}),
        json.dumps({"format": 1, "key": {**asdict(KEY), "chip": "B"}, "chosen": {}}),
        json.dumps({"format": 1, "key": asdict(KEY), "chosen": {"a": {"8": 99}}}),
        json.dumps({"format": 1, "key": asdict(KEY), "chosen": {"a": {"8": "1"}}}),
        json.dumps({"format": 1, "key": asdict(KEY), "chosen": {"a": {"many": 1}}}),
        json.dumps({"format": 1, "key": asdict(KEY), "chosen": {"a": {}}}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_passed_over(empty_cache, content):
    path = kept.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert kept.load(KEY) == {}
    kept.store(KEY, {"a": {8: 1}})
    assert kept.load(KEY) == {"a": {8: 1}}


@pytest.fixture
def products(monkeypatch, empty_cache):
    """Products whose library and chip are played by the CPU."""

    class Plan(FakePlan):
        def __init__(self, kind, num_tokens, device):
            super().__init__(kind, num_tokens)

        def run(self, index, *args):
            used.append((self.num_tokens, index))
            super().run(index, *args)

    measured, used = [], []
    monkeypatch.setattr(cublas, "Product", Plan)
    monkeypatch.setattr(
        cublas, "fastest", lambda plan, pairs: measured.append((plan.num_tokens, len(pairs))) or 1
    )
    monkeypatch.setattr(kept, "key_of", lambda device: KEY)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cublas, "ALIGNMENT", 16)  # the CPU's memory is not laid out for a GPU
    made = cublas.Products(torch.device("cpu"))
    made.measured, made.used = measured, used
    return made


def test_products_that_a_pass_shows_are_measured_once_and_used(products):
    pairs, x = _pairs(KIND), torch.randn(4, 32, dtype=torch.bfloat16)
    with products.tuning((1, 4, 8)):
        for weight, _ in pairs:
            products.product(x[:2], weight)
        products.product(x.float(), pairs[0][0].float())  # full precision is left to torch
    assert products.measured == [(4, 3), (8, 3)]  # one token has a kernel of its own
    assert products.summary.startswith("2 faster than by PyTorch's choice, measured in")
    assert not products.used
    assert torch.equal(products.product(x, pairs[0][0]), reference.product(x, pairs[0][0]))
    assert torch.equal(products.product(x[:3], pairs[0][0]), reference.product(x[:3], pairs[0][0]))
    assert products.used == [(4, 1)]  # three tokens were not measured
    again = cublas.Products(torch.device("cpu"))
    with again.tuning((4, 8, 16)):
        again.product(x[:2], pairs[0][0])
    assert products.measured[2:] == [(16, 1)]
    with again.tuning((4,)):
        again.product(x[:2], pairs[0][0])
    assert again.summary.endswith("measured before")


def test_what_is_not_laid_out_plainly_goes_to_torch(products):
    weight, x = _pairs(KIND)[0][0], torch.randn(4, 64, dtype=torch.bfloat16)
    with products.tuning((4,)):
        products.product(x[:2, :32].contiguous(), weight)
    assert torch.equal(products.product(x[:, :32], weight), reference.product(x[:, :32], weight))
    flat = torch.randn(4 * 32 + 1, dtype=torch.bfloat16)[1:].view(4, 32)  # dense, but not aligned
    assert torch.equal(products.product(flat, weight), reference.product(flat, weight))
    assert not products.used


@pytest.mark.parametrize("fault", [OSError("no library"), RuntimeError("cuBLASLt answered with status 3")])
def test_a_fault_costs_speed_only(products, monkeypatch, fault, caplog):
    def fail(*_):
        raise fault

    monkeypatch.setattr(kept, "key_of", fail)
    weight, x = _pairs(KIND)[0][0], torch.randn(4, 32, dtype=torch.bfloat16)
    with products.tuning((4,)):
        products.product(x, weight)
    assert not products.summary
    assert torch.equal(products.product(x, weight), reference.product(x, weight))


def test_without_memory_for_large_ones_the_small_ones_are_kept(products, monkeypatch):
    def measured(plan, pairs):
        if plan.num_tokens > 4:
            raise torch.OutOfMemoryError("full")
        return 0

    monkeypatch.setattr(cublas, "fastest", measured)
    with products.tuning((2, 4, 8, 16)):
        products.product(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(KIND)[0][0])
    assert kept.load(KEY) == {str(KIND): {2: 0, 4: 0}}


def test_one_product_that_fails_leaves_the_others(products, monkeypatch):
    def measured(plan, pairs):
        if plan.num_tokens == 4:
            raise RuntimeError("cuBLASLt answered with status 15")
        return 0

    monkeypatch.setattr(cublas, "fastest", measured)
    with products.tuning((2, 4, 8)):
        products.product(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(KIND)[0][0])
    assert kept.load(KEY) == {str(KIND): {2: 0, 8: 0}}


def test_a_cache_that_cannot_be_written_costs_the_next_start_only(products, monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept, "write_whole", refuse)
    with products.tuning((4,)):
        products.product(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(KIND)[0][0])
    assert products.summary.endswith(", not kept: Permission denied")
    assert len(products._chosen) == 1


def test_an_error_inside_the_pass_is_the_passes(products):
    with pytest.raises(ZeroDivisionError), products.tuning((4,)):
        1 / 0
    assert products._seen is None
