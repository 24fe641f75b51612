"""GEMMs: what was measured is autotune, what is not surely faster or is wrong is not chosen, torch serves elsewhere."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import measurement
from quire.kernels.linear import autotune, cublas, reference
from quire.kernels.linear.autotune import TORCH_DEFAULT, ChipKey
from quire.kernels.linear.cublaslt import GemmShape

KEY = ChipKey("A chip", "130000", "2.11.0")
SHAPE = GemmShape(24, 32, torch.bfloat16)
EXTRAS = [(), ("residual",), ("bias",), ("relu",), ("bias", "relu"), ("bias", "residual"), ("widened",)]


@pytest.mark.parametrize("extras", EXTRAS)
def test_the_reference_is_a_linear_layer(extras):
    x, weight = torch.randn(5, 32), torch.randn(24, 32)
    bias = torch.randn(24) if "bias" in extras else None
    residual = torch.randn(5, 24) if "residual" in extras else None
    expected = F.linear(x, weight, bias) + (residual if residual is not None else 0)
    expected = expected.relu() if "relu" in extras else expected
    named = {name: True for name in extras if name in ("relu", "widened")}
    torch.testing.assert_close(reference.gemm(x, weight, bias, residual, **named), expected)


class FakePlan:
    """Candidates that multiply on the CPU, some wrongly, and take as long as their cost says."""

    def __init__(self, shape, num_tokens, errors=(0.0, 0.0, 0.0), spend=lambda index: None):
        self.shape, self.num_tokens, self._errors, self._spend = shape, num_tokens, errors, spend

    @property
    def candidates(self):
        return list(range(len(self._errors)))

    def run(self, index, x, weight, bias, out):
        if self._errors[index] is None:
            raise RuntimeError("cuBLASLt answered with status 15")
        self._spend(index)
        residual = out.clone() if self.shape.residual else None
        out.copy_(reference.gemm(x, weight, bias, residual, self.shape.relu) * (1 + self._errors[index]))


class Clock:
    """Time that passes by what is launched: -1 is PyTorch's choice, else a candidate."""

    def __init__(self, costs):
        self._costs, self._now = costs, 0.0

    def spend(self, index):
        self._now += self._costs[index]

    def torchs(self, *args):
        self.spend(TORCH_DEFAULT)
        return reference.gemm(*args)

    def seconds(self, run, num_launches):
        before = self._now
        run()
        return self._now - before


def _pairs(shape, count=3):
    make = lambda *sizes: torch.randn(*sizes, dtype=shape.dtype)
    return [
        (make(shape.num_rows, shape.num_columns), make(shape.num_rows) if shape.bias else None)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("times", "errors", "chosen"),
    [
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, 0), 2),
        ({-1: 10.0, 0: 10.0, 1: 9.9, 2: 9.85}, (0, 0, 0), TORCH_DEFAULT),  # not by enough
        ({-1: 10.0, 0: 11.0, 1: 12.0, 2: 13.0}, (0, 0, 0), TORCH_DEFAULT),
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, 0.5), TORCH_DEFAULT),  # fast and wrong
        ({-1: 10.0, 0: 10.0, 1: 9.0, 2: 8.0}, (0, 0, None), 1),  # fast and refused
        ({-1: 10.0, 0: 9.0, 1: 8.0}, (0, None), 0),  # fewer than there are finals
        ({-1: 10.0, 0: 8.0}, (None,), TORCH_DEFAULT),
        ({-1: 10.0}, (), TORCH_DEFAULT),
    ],
)
@pytest.mark.parametrize("extras", [{}, {"residual": True}, {"bias": True, "relu": True}])
def test_the_fastest_that_is_right_is_chosen(monkeypatch, times, errors, chosen, extras):
    clock, shape = Clock(times), GemmShape(24, 32, torch.bfloat16, **extras)
    monkeypatch.setattr(autotune, "queued_seconds", clock.seconds)
    monkeypatch.setattr(autotune, "gemm", clock.torchs)
    assert autotune.fastest(FakePlan(shape, 4, errors, clock.spend), _pairs(shape)) == chosen


def test_weights_go_round_until_they_come_from_memory(monkeypatch):
    pairs = _pairs(SHAPE, 9)
    monkeypatch.setattr(autotune, "COLD_BYTES", 4 * 24 * 32 * 2)
    assert len(autotune._cold(pairs)) == 4
    assert len(autotune._cold(pairs[:2])) == 2


def test_choices_are_kept_per_chip_and_added_to(empty_cache):
    assert autotune.cache.load(KEY) is None
    autotune.store(KEY, {"a": {8: 1, 16: TORCH_DEFAULT}})
    autotune.store(KEY, {"a": {32: 2}, "b": {8: 0}})
    expected = {"a": {8: 1, 16: TORCH_DEFAULT, 32: 2}, "b": {8: 0}}
    assert autotune.cache.load(KEY) == expected
    assert autotune.cache.load(ChipKey("A chip", "130001", "2.11.0")) is None
    assert autotune.cache.entries() == [(KEY, expected)]
    assert autotune.cache.forget() == 1
    assert autotune.cache.entries() == []


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
    path = autotune.cache.path(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert autotune.cache.load(KEY) is None
    autotune.store(KEY, {"a": {8: 1}})
    assert autotune.cache.load(KEY) == {"a": {8: 1}}


@pytest.fixture
def gemms(monkeypatch, empty_cache):
    """GEMMs whose library and chip are played by the CPU."""

    class Plan(FakePlan):
        def __init__(self, shape, num_tokens, device):
            super().__init__(shape, num_tokens)

        def run(self, index, *args):
            used.append((self.num_tokens, index))
            super().run(index, *args)

    measured, used = [], []
    monkeypatch.setattr(cublas, "GemmPlan", Plan)
    monkeypatch.setattr(
        cublas, "fastest", lambda plan, pairs: measured.append((plan.num_tokens, len(pairs))) or 1
    )
    monkeypatch.setattr(autotune, "key_of", lambda device: KEY)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cublas, "ALIGNMENT", 16)  # the CPU's memory is not laid out for a GPU
    made = cublas.GemmAutotuner(torch.device("cpu"))
    made.measured, made.used = measured, used
    return made


def test_gemms_that_a_pass_shows_are_measured_once_and_used(gemms):
    pairs, x = _pairs(SHAPE), torch.randn(4, 32, dtype=torch.bfloat16)
    with gemms.tuning((1, 4, 8)):
        for weight, _ in pairs:
            gemms.gemm(x[:2], weight)
        gemms.gemm(x.float(), pairs[0][0].float())  # full precision is left to torch
    assert gemms.measured == [(4, 3), (8, 3)]  # one token has a kernel of its own
    assert gemms.summary.startswith("2 faster than by PyTorch's choice, measured in")
    assert not gemms.used
    assert torch.equal(gemms.gemm(x, pairs[0][0]), reference.gemm(x, pairs[0][0]))
    assert torch.equal(gemms.gemm(x[:3], pairs[0][0]), reference.gemm(x[:3], pairs[0][0]))
    assert gemms.used == [(4, 1)]  # three tokens were not measured
    again = cublas.GemmAutotuner(torch.device("cpu"))
    with again.tuning((4, 8, 16)):
        again.gemm(x[:2], pairs[0][0])
    assert gemms.measured[2:] == [(16, 1)]
    with again.tuning((4,)):
        again.gemm(x[:2], pairs[0][0])
    assert again.summary.endswith("measured before")


def test_what_is_not_laid_out_plainly_goes_to_torch(gemms):
    weight, x = _pairs(SHAPE)[0][0], torch.randn(4, 64, dtype=torch.bfloat16)
    with gemms.tuning((4,)):
        gemms.gemm(x[:2, :32].contiguous(), weight)
    assert torch.equal(gemms.gemm(x[:, :32], weight), reference.gemm(x[:, :32], weight))
    flat = torch.randn(4 * 32 + 1, dtype=torch.bfloat16)[1:].view(4, 32)  # dense, but not aligned
    assert torch.equal(gemms.gemm(flat, weight), reference.gemm(flat, weight))
    assert not gemms.used


@pytest.mark.parametrize("fault", [OSError("no library"), RuntimeError("cuBLASLt answered with status 3")])
def test_a_fault_costs_speed_only(gemms, monkeypatch, fault, caplog):
    def fail(*_):
        raise fault

    monkeypatch.setattr(autotune, "key_of", fail)
    weight, x = _pairs(SHAPE)[0][0], torch.randn(4, 32, dtype=torch.bfloat16)
    with gemms.tuning((4,)):
        gemms.gemm(x, weight)
    assert not gemms.summary
    assert torch.equal(gemms.gemm(x, weight), reference.gemm(x, weight))


def test_without_memory_for_large_ones_the_small_ones_are_kept(gemms, monkeypatch):
    def measured(plan, pairs):
        if plan.num_tokens > 4:
            raise torch.OutOfMemoryError("full")
        return 0

    monkeypatch.setattr(cublas, "fastest", measured)
    with gemms.tuning((2, 4, 8, 16)):
        gemms.gemm(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(SHAPE)[0][0])
    assert autotune.cache.load(KEY) == {str(SHAPE): {2: 0, 4: 0}}


def test_one_gemm_that_fails_leaves_the_others(gemms, monkeypatch):
    def measured(plan, pairs):
        if plan.num_tokens == 4:
            raise RuntimeError("cuBLASLt answered with status 15")
        return 0

    monkeypatch.setattr(cublas, "fastest", measured)
    with gemms.tuning((2, 4, 8)):
        gemms.gemm(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(SHAPE)[0][0])
    assert autotune.cache.load(KEY) == {str(SHAPE): {2: 0, 8: 0}}


def test_a_cache_that_cannot_be_written_costs_the_next_start_only(gemms, monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(measurement, "write_whole", refuse)
    with gemms.tuning((4,)):
        gemms.gemm(torch.randn(2, 32, dtype=torch.bfloat16), _pairs(SHAPE)[0][0])
    assert gemms.summary.endswith(", not kept: Permission denied")
    assert len(gemms._chosen) == 1


def test_an_error_inside_the_pass_is_the_passes(gemms):
    with pytest.raises(ZeroDivisionError), gemms.tuning((4,)):
        1 / 0
    assert gemms._seen is None
