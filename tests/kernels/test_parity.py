"""Every alternative of every operation, on every instruction set, agrees with the reference."""

import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from quire.core.layout import BlockLayout
from quire.kernels import registry
from quire.kernels.lora.records import A_OFFSET, B_OFFSET
from quire.layers.attention import Pool
from tests.kernels.cases import Shape, instruction_set, instruction_sets, random_case
from tests.kernels.lora_cases import lora_case, pack_case
from tests.kernels.test_trees import check_settling

_tested: set[str] = set()


def _parametrize(
    operation: str, names: tuple[str, ...] = ("cpu", "triton")
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    _tested.add(operation)
    found = [
        (operation, name, isa)
        for name in registry.alternatives(operation)
        if name in names
        for isa in (instruction_sets() if name == "cpu" else ("",))
    ]
    if not found:
        return pytest.mark.skip(reason=f"{operation} by {' or '.join(names)} does not run on this machine")
    return pytest.mark.parametrize("kernel", found, indirect=True, ids="-".join)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleType, ModuleType]]:
    """(the alternative, the reference) of the test's operation."""
    operation, name, isa = request.param
    torch.manual_seed(0)
    with instruction_set(isa):
        yield registry.load(operation, name), registry.load(operation, "reference")


Kernel = tuple[ModuleType, ModuleType]


def test_every_operation_has_a_parity_test() -> None:
    elsewhere = {
        "encoded_linear",  # test_encoded_linear.py: its reference is the schemes' decoding
        "moe",  # test_experts.py
        "packed_attention",  # test_packed_attention.py: with gradients
    }
    assert _tested | elsewhere == set(registry.operations())


@_parametrize("int8_linear")
@pytest.mark.parametrize(("tokens", "columns", "channels"), [
    (1, 576, 960), (3, 33, 7), (8, 64, 32), (13, 100, 50), (17, 576, 96), (40, 130, 48), (300, 64, 80),
])  # fmt: skip
def test_int8_linear_has_the_bits_of_the_reference(
    kernel: Kernel, tokens: int, columns: int, channels: int
) -> None:
    native, reference = kernel
    q, scales = reference.quantize(torch.randn(channels, columns))
    sums = reference.row_sums(q)
    wide = torch.randn(tokens, columns + 5) * torch.rand(tokens, 1) * 10
    x = wide[:, :columns]
    x[0] = 0
    bias, residual = torch.randn(channels), torch.randn(tokens, channels)
    for extra in ((None, None), (bias, None), (bias, residual)):
        expected = reference.linear(x, reference.pack(q), scales, sums, *extra)
        assert torch.equal(native.linear(x, native.pack(q), scales, sums, *extra), expected)
    assert torch.equal(native.unpack(native.pack(q), channels, columns), q)


@_parametrize("int8_linear")
@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (9, 64), (20, 21), (33, 32)])
def test_gated_linear_agrees(kernel: Kernel, tokens: int, width: int) -> None:
    native, reference = kernel
    q, scales = reference.quantize(torch.randn(2 * width, 70))
    sums, x = reference.row_sums(q), torch.randn(tokens, 70) * 3
    expected = reference.linear_silu_mul(x, reference.pack(q), scales, sums)
    actual = native.linear_silu_mul(x, native.pack(q), scales, sums)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-5)


@_parametrize("int8_linear")
def test_rows_may_be_packed_piece_by_piece(kernel: Kernel) -> None:
    native, reference = kernel
    q, _ = reference.quantize(torch.randn(45, 70))
    packed = native.empty_packed(45, 70)
    for first, last in ((0, 9), (9, 30), (30, 45)):
        native.pack_rows(packed, first, q[first:last])
    assert torch.equal(packed, native.pack(q))


@_parametrize("linear", ("cublas",))
@pytest.mark.parametrize(
    "extras", [(), ("residual",), ("bias",), ("bias", "relu"), ("bias", "residual"), ("widened",)]
)
def test_measured_gemms_agree(kernel: Kernel, extras: tuple[str, ...], empty_cache: object) -> None:
    fast, reference = kernel
    device, like = torch.device("cuda"), {"dtype": torch.bfloat16, "device": "cuda"}
    x, weight, autotuner = torch.randn(64, 512, **like), torch.randn(256, 512, **like), fast.make_gemm(device)
    given: dict[str, object] = {name: True for name in extras if name in ("relu", "widened")}
    if "bias" in extras:
        given["bias"] = torch.randn(256, **like)
    residual = torch.randn(64, 256, **like) if "residual" in extras else None
    with autotuner.tuning((64,)):
        autotuner.gemm(x, weight, residual=residual.clone() if residual is not None else None, **given)
    expected = reference.gemm(x, weight, residual=residual.clone() if residual is not None else None, **given)
    actual = autotuner.gemm(x, weight, residual=residual, **given)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-1)
    assert autotuner.summary


@_parametrize("norm")
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (7, 33), (200, 100)])
def test_norms_agree(kernel: Kernel, tokens: int, width: int) -> None:
    native, reference = kernel
    x, weight, bias = torch.randn(tokens, width + 3)[:, :width], torch.randn(width), torch.randn(width)
    close = torch.testing.assert_close
    close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    close(
        native.layer_norm(x, weight, bias, 1e-5),
        reference.layer_norm(x, weight, bias, 1e-5),
        rtol=1e-5,
        atol=1e-5,
    )
    for name, extra in (("add_rms_norm", ()), ("add_layer_norm", (bias,))):
        one, two = torch.randn(tokens, width), None
        two = one.clone()
        actual = getattr(native, name)(x, one, weight, *extra, 1e-5)
        close(actual, getattr(reference, name)(x, two, weight, *extra, 1e-5), rtol=1e-5, atol=1e-5)
        assert torch.equal(one, two)
    one = torch.randn(tokens, width)
    two = one.clone()
    assert native.rms_norm_onto(x, one, weight, 1e-5) is one
    close(one, reference.rms_norm_onto(x, two, weight, 1e-5), rtol=2e-6, atol=1e-6)


@_parametrize("norm")
def test_head_norm_agrees_in_place(kernel: Kernel) -> None:
    native, reference = kernel
    weight, qkv = torch.randn(32), torch.randn(5, 9 * 32)
    other = qkv.clone()
    native.head_rms_norm(qkv[:, 32:160].view(5, 4, 32), weight, 1e-6)
    reference.head_rms_norm(other[:, 32:160].view(5, 4, 32), weight, 1e-6)
    torch.testing.assert_close(qkv, other, rtol=2e-6, atol=1e-6)


@_parametrize("rotary")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(64, 64, 16), (24, 12, 1), (80, 0, 128)])
def test_rotation_and_store_have_the_bits_of_the_reference(
    kernel: Kernel, dtype: torch.dtype, head_dim: int, rotary_dim: int, block_size: int
) -> None:
    native, reference = kernel
    tokens, heads, kv_heads = 19, 4, 2
    cos_sin = torch.randn(50, rotary_dim) if rotary_dim else None
    positions = torch.randint(50, (tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * block_size * 16)[:tokens]
    start = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    start[0, :8] *= 1e-7  # below the normal numbers of fp16
    results = []
    for module in (native, reference):
        qkv, pool = start.clone(), torch.zeros(64, 3, 2, block_size, kv_heads, head_dim, dtype=dtype)
        module.rotate_and_store(
            qkv, heads, kv_heads, head_dim, cos_sin, positions, slots, pool[:, 1, 0], pool[:, 1, 1]
        )
        results.append((qkv, pool))
    assert torch.equal(results[0][0], results[1][0])
    # Triton's interpreter cuts bits off where it should round to bfloat16
    exact = dtype is not torch.bfloat16 or native.__name__.endswith("cpu")
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0 if exact else 2**-7, atol=0)


@_parametrize("rotary")
@pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(64, 64, 16), (24, 12, 1), (80, 0, 128)])
def test_int8_pages_have_the_bits_of_the_reference(
    kernel: Kernel, head_dim: int, rotary_dim: int, block_size: int
) -> None:
    native, _ = kernel
    tokens, heads, kv_heads = 19, 4, 2
    cos_sin = torch.randn(50, rotary_dim) if rotary_dim else None
    positions = torch.randint(50, (tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * block_size * 16)[:tokens]
    start = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim) * torch.logspace(-20, 20, tokens)[:, None]
    start[3] = 0
    pools, content = [Pool(BlockLayout(2, block_size, kv_heads, head_dim, "int8"), 64) for _ in kernel], []
    for module, pool in zip(kernel, pools, strict=True):
        qkv, pages, scales = start.clone(), pool.layer(1), pool.scales(1)
        module.rotate_and_store(
            qkv, heads, kv_heads, head_dim, cos_sin, positions, slots, *pages, *scales
        )  # fmt: skip
        stored = [
            (p.float() * s.float().transpose(1, 2)[..., None]).flatten(0, 1)[slots]
            for p, s in zip(pages, scales, strict=True)
        ]
        content.append(torch.cat(stored, 1))
    assert pools[0].scales(0)[0].abs().max() == 0  # the other layer is left alone
    wanted = qkv.view(tokens, -1, head_dim)[:, heads:]
    half_a_step = wanted.abs().amax(-1, keepdim=True) / 254 * (1 + 2**-7)
    assert ((content[1] - wanted).abs() <= half_a_step).all()
    if native.__name__.endswith("cpu"):
        assert torch.equal(pools[0].data, pools[1].data)
    else:  # Triton's interpreter cuts bits off where it should round to bfloat16
        assert ((content[0] - wanted).abs() <= 3 * half_a_step).all()


@_parametrize("attention")
def test_int8_pages_without_scales_are_refused(kernel: Kernel) -> None:
    case = random_case(Shape(4, 2, 32, dtype=torch.int8), [20], [1])
    with pytest.raises(TypeError, match="pages in int8 have scales"):
        kernel[0].paged_attention(*case.arguments())


@_parametrize("attention", ("triton",))
@pytest.mark.parametrize(("q_dtype", "dtype", "heads", "kv_heads", "head_dim", "block_size", "window"), [
    (torch.float32, torch.float16, 6, 2, 64, 16, 0), (torch.bfloat16, torch.bfloat16, 3, 3, 24, 1, 0),
    (torch.float16, torch.float16, 16, 1, 80, 128, 30), (torch.float32, torch.float32, 4, 1, 128, 16, 30),
    (torch.float32, torch.int8, 6, 2, 64, 16, 0), (torch.bfloat16, torch.int8, 8, 1, 80, 128, 30),
])  # fmt: skip
def test_attention_in_triton_agrees(
    kernel: Kernel, q_dtype: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
    block_size: int, window: int,
) -> None:  # fmt: skip
    """Few shapes, each with something of its own: the interpreter is slow."""
    triton, reference = kernel
    case = random_case(
        Shape(heads, kv_heads, head_dim, block_size, dtype), [1, 70, 5, 130, 64], [1, 1, 5, 40, 3]
    )
    q, *others = case.arguments(window)
    actual = triton.paged_attention(q.to(q_dtype), *others, **case.scales)
    expected = reference.paged_attention(q.to(q_dtype), *others, **case.scales)
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[q_dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@_parametrize("attention", ("cpu",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (16, 1, 80)])
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (1, 0), (128, 30)])
def test_attention_agrees(
    kernel: Kernel, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int
) -> None:
    native, reference = kernel
    shape = Shape(heads, kv_heads, head_dim, block_size, dtype)
    case = random_case(shape, [1, 70, 5, 130, 64], [1, 1, 5, 40, 3])
    actual = native.paged_attention(*case.arguments(window), **case.scales)
    torch.testing.assert_close(
        actual, reference.paged_attention(*case.arguments(window), **case.scales), rtol=2e-5, atol=2e-5
    )


@_parametrize("trees")
def test_accepted_paths_agree(kernel: Kernel) -> None:
    for module in kernel:
        check_settling(module, block_size=4, position_bytes=8)


@_parametrize("attention", ("cpu", "triton"))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 12, 32), (4, 2, 24), (3, 3, 80)])
def test_full_attention_agrees(kernel: Kernel, heads: int, kv_heads: int, head_dim: int) -> None:
    native, reference = kernel
    starts = torch.tensor([0, 1, 6, 39, 103, 103, 233, 836], dtype=torch.int32)  # one sequence is empty
    qkv = torch.randn(836, heads + 2 * kv_heads, head_dim) * 2
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    actual = native.full_attention(q, k, v, starts, head_dim**-0.5)
    expected = reference.full_attention(q, k, v, starts, head_dim**-0.5)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    for reach in (1, 5, 64, 300, 2000):  # tokens on each side
        actual = native.full_attention(q, k, v, starts, head_dim**-0.5, reach=reach)
        expected = reference.full_attention(q, k, v, starts, head_dim**-0.5, reach=reach)
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    for width in (3, 255, 1999):  # of a table of scores by distance
        slopes = torch.randn(heads, width)
        actual = native.full_attention(q, k, v, starts, head_dim**-0.5, slopes=slopes)
        expected = reference.full_attention(q, k, v, starts, head_dim**-0.5, slopes=slopes)
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@_parametrize("rotary", ("cpu",))
def test_rotation_without_a_store_agrees(kernel: Kernel) -> None:
    native, reference = kernel
    qkv, positions = torch.randn(9, 3, 4, 24), torch.arange(9, dtype=torch.int32).flip(0)
    cos_sin = torch.randn(12, 16)  # a part of each head
    expected = qkv.clone()
    for rows, module in ((qkv, native), (expected, reference)):
        module.rotate(rows[:, :2].flatten(1, 2), cos_sin, positions)
    torch.testing.assert_close(qkv, expected, rtol=2e-6, atol=2e-6)


@_parametrize("activation")
def test_activations_agree(kernel: Kernel) -> None:
    native, reference = kernel
    x = torch.randn(7, 2 * 45) * 20
    torch.testing.assert_close(native.silu_mul(x), reference.silu_mul(x), rtol=2e-6, atol=1e-6)
    for kind in ("none", "tanh"):
        torch.testing.assert_close(native.gelu(x, kind), reference.gelu(x, kind), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(
            native.gelu_mul(x, kind), reference.gelu_mul(x, kind), rtol=2e-6, atol=2e-5
        )  # an error of gelu's, times up to 60
    assert torch.equal(native.relu(x), reference.relu(x))


@_parametrize("embedding")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_embedding_rows_are_exact(kernel: Kernel, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    native, reference = kernel
    table = torch.randn(100, 41).to(dtype)
    token_ids = torch.randint(100, (70,), dtype=id_dtype)
    token_ids[[3, 69]] = -1
    rows = native.gather(table, token_ids)
    assert torch.equal(rows, reference.gather(table, token_ids))
    assert torch.equal(rows[[0, 3, 69]], torch.stack([table[token_ids[0]].float(), *torch.zeros(2, 41)]))
    assert torch.equal(native.gather(table, token_ids, scale=3.7), rows * 3.7)


@_parametrize("pages")
@pytest.mark.parametrize("targets", [[5, 6, 0], [1, 2, 7]])
def test_blocks_are_copied_as_they_were(kernel: Kernel, targets: list[int]) -> None:
    native, reference = kernel
    pool = torch.randint(256, (8, 1000), dtype=torch.uint8)
    other = pool.clone()
    native.copy_blocks(pool, torch.tensor([1, 2, 3]), torch.tensor(targets))
    reference.copy_blocks(other, torch.tensor([1, 2, 3]), torch.tensor(targets))
    assert torch.equal(pool, other)


@_parametrize("sample", ("cpu",))
@pytest.mark.parametrize("vocabulary", [5, 1000, 49152])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_sampling_agrees(kernel: Kernel, vocabulary: int, spread: float) -> None:
    _check_sampling(kernel, vocabulary, spread, torch.arange(24))


@_parametrize("sample", ("triton",))
@pytest.mark.parametrize(("vocabulary", "spread"), [(5, 3.0), (700, 0.1), (700, 3.0)])
def test_sampling_in_triton_agrees(kernel: Kernel, vocabulary: int, spread: float) -> None:
    """Three pieces and a bit of 256: the interpreter is slow, and more of them would take the same branches."""
    _check_sampling(kernel, vocabulary, spread, torch.randperm(24)[:6])


def _check_sampling(kernel: Kernel, vocabulary: int, spread: float, chosen: torch.Tensor) -> None:
    native, reference = kernel
    rows = 24
    logits = torch.randn(rows, vocabulary) * spread
    logits[:, 3] = logits[:, 1]  # ties
    assert torch.equal(native.argmax(logits), reference.argmax(logits))
    broken = logits.clone()
    broken[0, 1], broken[-1, -1] = float("nan"), float("inf")
    assert torch.equal(native.peaks(broken).nan_to_num(-1.0), reference.peaks(broken).nan_to_num(-1.0))
    tokens = torch.randint(vocabulary, (rows,))
    torch.testing.assert_close(
        native.log_softmax_gather(logits, tokens),
        reference.log_softmax_gather(logits, tokens),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(native.token_ranks(logits, tokens), reference.token_ranks(logits, tokens))
    arguments = (
        logits,
        torch.tensor([0.0, 0.7, 1.0, 2.0] * 6),
        torch.tensor([0, 1, 7, 60, 0, 3000] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.5, 0.95] * 8),
        torch.tensor([0.0] * 12 + [0.05] * 12),
        torch.rand(rows, dtype=torch.float64),
    )
    arguments = tuple(argument[chosen].contiguous() for argument in arguments)
    actual, expected = native.sample_filtered(*arguments), reference.sample_filtered(*arguments)
    # A uniform may fall between two sums that differ in their last bits; more than one such row is a mistake.
    assert (actual != expected).sum() <= (1 if vocabulary > 1000 else 0)


@_parametrize("sample")
def test_filters_keep_ties_lowest_id_first(kernel: Kernel) -> None:
    for module in kernel:
        rows = 4 if module.__name__.endswith("triton") else 40
        logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]]).repeat(rows, 1)
        uniforms = torch.arange(rows, dtype=torch.float64) / rows
        ones, zeros = torch.ones(rows), torch.zeros(rows)
        two = torch.full((rows,), 2, dtype=torch.int32)
        drawn = module.sample_filtered(logits, ones, two, ones, zeros, uniforms)
        assert drawn.tolist() == [1] * (rows // 2) + [2] * (rows // 2)
        one_only = module.sample_filtered(logits, ones, torch.zeros_like(two), zeros + 1e-6, zeros, uniforms)
        assert one_only.tolist() == [1] * rows


@_parametrize("inputs")
def test_a_step_is_spread_alike(kernel: Kernel) -> None:
    """A chunk in the middle of a row, padding, and a prompt over several programs."""
    rows = torch.tensor([3, -1, 0], dtype=torch.int32)
    num_computed = torch.tensor([5, -1, 0], dtype=torch.int32)
    starts = torch.tensor([0, 3, 4, 304], dtype=torch.int32)
    tokens = torch.randint(99, (5, 400), dtype=torch.int32)
    tables = torch.randint(1, 50, (5, 100), dtype=torch.int32)
    results = []
    for module in kernel:
        whole = [torch.zeros(304, dtype=kind) for kind in (torch.int32, torch.int32, torch.int64)]
        lens, gathered = torch.full((3,), 7, dtype=torch.int32), torch.zeros(3, 100, dtype=torch.int32)
        module.spread(rows, num_computed, starts, tokens, tables, 4, 300, *whole, lens, gathered)
        results.append([*whole, lens, gathered[0, :2], gathered[2, :75]])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@_parametrize("inputs")
def test_entries_are_scattered_alike(kernel: Kernel) -> None:
    places = torch.randperm(40 * 50)[:1500].int()
    results = []
    for module in kernel:
        target = torch.zeros(40, 50, dtype=torch.int32)
        module.scatter(target, places // 50, places % 50, torch.arange(1500, dtype=torch.int32))
        results.append(target)
    assert torch.equal(*results)


@_parametrize("narrow_linear")
@pytest.mark.parametrize(("rows", "columns"), [(50, 700), (8, 2048), (8, 9216)])
@pytest.mark.parametrize("normed", [False, True])
def test_narrow_products_agree(kernel: Kernel, rows: int, columns: int, normed: bool) -> None:
    fast, reference = kernel
    x, weight = torch.randn(1, columns), torch.randn(rows, columns) * 0.1
    bias, residual = torch.randn(rows), torch.randn(1, rows)
    norm = (torch.randn(columns), 1e-5) if normed else (None, 0.0)
    close = torch.testing.assert_close
    expected = reference.linear(x, weight, bias, residual.clone(), *norm)
    close(fast.linear(x, weight, bias, residual.clone(), *norm), expected, rtol=1e-4, atol=1e-4)
    expected = reference.linear(x, weight, None, None, *norm)
    close(fast.linear(x, weight, None, None, *norm), expected, rtol=1e-4, atol=1e-4)
    expected = reference.linear_silu_mul(x, weight, *norm)
    close(fast.linear_silu_mul(x, weight, *norm), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("ordered_dots")
@_parametrize("invariant_linear")
def test_invariant_products_agree_and_rows_do_not_depend_on_their_number(kernel: Kernel) -> None:
    x, weight, bias, residual = (
        torch.randn(70, 100),
        torch.randn(90, 100),
        torch.randn(90),
        torch.randn(70, 90),
    )
    fast, reference = kernel
    expected = reference.linear(x, weight, bias, residual.clone())
    actual = fast.linear(x, weight, bias, residual.clone())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for module in kernel:
        whole = module.linear(x, weight)
        assert torch.equal(module.linear(x[65:66], weight), whole[65:66])
        sums = module.linear(x[:, :64].contiguous(), weight[:, :64].contiguous(), sums=torch.zeros(70, 90))
        module.linear(x[:, 64:].contiguous(), weight[:, 64:].contiguous(), sums=sums)
        torch.testing.assert_close(sums, whole, rtol=1e-4, atol=1e-4)
        assert module is reference or torch.equal(sums, whole)


@_parametrize("fp8_rows")
def test_float8_rows_agree(kernel: Kernel) -> None:
    fast, reference = kernel
    x = torch.randn(5, 300) * torch.tensor([[1.0], [0.0], [1e-4], [1e4], [3.0]])
    (actual, scales), (expected, expected_scales) = fast.quantize(x), reference.quantize(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # Neighbours in e4m3 may differ by an eighth; Triton's interpreter loses some carries when it rounds.
    close = torch.isclose(actual.float(), expected.float(), rtol=2**-3, atol=2**-9)
    assert close.float().mean() > 0.97


LORA_CASES = {
    "one line": ([0], [[8, 8, 8]], 576, [576, 192, 192]),
    "rank 1, odd widths": ([0, -1, 1, 0], [[1, 0, 1], [0, 3, 17]], 50, [33, 7, 20]),
    "many adapters": (
        [2, 0, 1, -1, 2, 2, 0, 3, -1, 1], [[4, 8, 16], [30, 64, 9], [0, 0, 0], [-12, 33, -7]], 96, [80, 64, 48],
    ),
    "long runs": ([0] * 37 + [1] * 21 + [-1] * 5, [[16, 40, 5], [-23, 2, 64]], 64, [48, 16, 16]),
    "rank 512": ([1, 0, 1], [[512], [300]], 32, [40]),
    "nobody": ([-1, -1], [[4]], 32, [32]),
}  # fmt: skip


@_parametrize("lora")
@pytest.mark.parametrize("case", LORA_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_lora_agrees(kernel: Kernel, case: str, dtype: torch.dtype) -> None:
    alternative, reference = kernel
    native = alternative.__name__.endswith("cpu")  # computes in float32, whatever adapters are kept in
    if not native and dtype is torch.int8:
        pytest.skip("adapters are kept in bytes on CPUs only")
    made = lora_case(*LORA_CASES[case], dtype=torch.float32 if native else dtype, weights_dtype=dtype)
    expected = reference.add(made.x, made.y.clone(), *made.arguments())
    actual = alternative.add(made.x, made.y.clone(), *made.arguments())
    loose = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(made.x.dtype, 2e-5)
    torch.testing.assert_close(actual, expected, rtol=loose, atol=loose)
    untouched = [i for i, slot in enumerate(LORA_CASES[case][0]) if slot < 0]
    assert torch.equal(actual[untouched], made.y[untouched])


@_parametrize("lora")
def test_long_segments_agree_too(kernel: Kernel) -> None:
    alternative, reference = kernel
    made = lora_case([0] * 70 + [1] * 9 + [-1, 0], [[20, 3], [-12, 0]], 200, [48, 40], max_lines=64)
    expected = reference.add(made.x, made.y.clone(), *made.arguments())
    actual = alternative.add(made.x, made.y.clone(), *made.arguments())
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@_parametrize("lora")
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding_lora_agrees(kernel: Kernel, ids_dtype: torch.dtype) -> None:
    alternative, reference = kernel
    native = alternative.__name__.endswith("cpu")
    kept = torch.int8 if native and ids_dtype is torch.int32 else torch.float32
    made = lora_case([0, 1, -1, 0, 1, 1], [[7], [-33]], 40, [48], weights_dtype=kept)
    ids = torch.tensor([0, 37, 5, 12, 12, 3], dtype=ids_dtype)
    rest = (made.tables, made.segments, 1, 40, 2)
    expected = reference.add_embedded(ids, made.y.clone(), *rest)
    torch.testing.assert_close(
        alternative.add_embedded(ids, made.y.clone(), *rest), expected, rtol=2e-5, atol=2e-5
    )


@_parametrize("lora_pack", ("cpu", "host", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapters_are_packed_with_the_bits_of_the_reference(
    kernel: Kernel, given: torch.dtype, dtype: torch.dtype
) -> None:
    native, reference = kernel
    source, places, size = pack_case(given, dtype)
    expected, actual = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    assert reference.pack(source, places, expected, dtype) == -1
    assert native.pack(source, places, actual, dtype) == -1
    cuts = native.__name__.endswith("triton") and os.environ.get("TRITON_INTERPRET") == "1"
    if cuts and dtype is torch.bfloat16:  # Triton's interpreter does not round
        torch.testing.assert_close(actual.view(dtype), expected.view(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(actual, expected)
    for site, column, number in (
        (1, A_OFFSET, float("nan")),
        (2, B_OFFSET, float("inf")),
        (3, B_OFFSET, 0.0),
    ):
        broken, first = source.clone(), int(places.sites[site, column])
        broken[first : first + given.itemsize] = torch.tensor([number]).to(given).view(torch.uint8)
        wrong = -1 if number == 0 else 2 * site + (column == B_OFFSET)
        for one in (native, reference):
            assert one.pack(broken, places, torch.zeros_like(actual), dtype) == wrong
