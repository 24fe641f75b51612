"""The reference of packed attention is torch's own, gradients included; a sparse mask is a mask."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import registry
from quire.kernels.packed_attention import reference


def case(lengths: list[int], heads: int = 4, kv_heads: int = 2, width: int = 24) -> tuple[torch.Tensor, ...]:
    total = sum(lengths)
    q = torch.randn(total, heads, width)
    k, v = torch.randn(2, total, kv_heads, width)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return q, k, v, starts


def sparse_mask(num_blocks: int, density: float) -> torch.Tensor:
    """Random blocks, and each block of queries sees itself."""
    drawn = torch.rand(num_blocks, num_blocks, generator=torch.Generator().manual_seed(1)) < density
    return (drawn | torch.eye(num_blocks, dtype=torch.bool)).to(torch.uint8)


def test_the_reference_has_the_values_and_gradients_of_torch():
    q, k, v, starts = case([150, 1, 70])
    for mask in (None, sparse_mask(3, 0.3)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        parts = []
        for first, last in ((0, 150), (150, 151), (151, 221)):
            mine = [x[first:last].transpose(0, 1)[None] for x in leaves]
            mine[1:] = [x.repeat_interleave(2, 1) for x in mine[1:]]
            seen = torch.ones(last - first, last - first, dtype=torch.bool).tril()
            if mask is not None:
                at = torch.arange(last - first) // reference.BLOCK
                seen &= mask.bool()[at][:, at]
            parts.append(F.scaled_dot_product_attention(*mine, attn_mask=seen, scale=0.2)[0].transpose(0, 1))
        expected, grad = torch.cat(parts), torch.randn_like(q)
        expected.backward(grad)
        out, sums = reference.forward(q, k, v, starts, 150, 0.2, mask)
        torch.testing.assert_close(out, expected)
        for mine, theirs in zip(
            reference.backward(grad, q, k, v, out, sums, starts, 150, 0.2, mask), leaves, strict=True
        ):
            torch.testing.assert_close(mine, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    "triton" not in registry.alternatives("packed_attention"), reason="Triton does not run here"
)
@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize(
    ("lengths", "heads", "width", "dtype"),
    [
        ([150, 1, 70], (4, 2), 24, torch.float32),
        ([64], (2, 2), 16, torch.float32),
        ([5, 200], (3, 1), 32, torch.float32),
        ([330, 3], (4, 2), 32, torch.float16),  # tiles of 16-bit inputs: 128 on one side
    ],
)
def test_the_kernel_and_its_gradients_agree(lengths, heads, width, dtype, density):
    triton = registry.load("packed_attention", "triton")
    q, k, v, starts = case(lengths, *heads, width)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 4e-3}
    mask = None if density == 1.0 else sparse_mask(-(-max(lengths) // reference.BLOCK), density)
    given = (starts, max(lengths), width**-0.5, mask)
    expected, sums = reference.forward(q, k, v, *given)
    out, own_sums = triton.forward(q, k, v, *given)
    torch.testing.assert_close(out, expected, **near)
    torch.testing.assert_close(own_sums, sums, **near)
    grad = torch.randn_like(q)
    grads = triton.backward(grad, q, k, v, out, own_sums, *given)
    for actual, wanted in zip(grads, reference.backward(grad, q, k, v, expected, sums, *given), strict=True):
        torch.testing.assert_close(actual, wanted, **near)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 2)])
def test_the_gradients_of_hoppers_kernel_are_those_of_the_reference(heads, kv_heads, dtype):
    hopper = registry.load("packed_attention", "cuda")
    lengths = [330, 1, 200]
    drawn = (*case(lengths, heads, kv_heads, 128), torch.randn(sum(lengths), heads, 128))
    q, k, v, starts, grad = (x.cuda() if x.dtype is torch.int32 else x.to("cuda", dtype) for x in drawn)
    assert hopper.serves(q)
    given = (starts, max(lengths), 128**-0.5)
    out, sums = hopper.forward(q, k, v, *given)
    grads = hopper.backward(grad, q, k, v, out, sums, *given)
    wide = [x.float() for x in (grad, q, k, v, out)]
    for one, expected in zip(grads, reference.backward(*wide, sums, *given), strict=True):
        torch.testing.assert_close(one.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(
    "triton" not in registry.alternatives("packed_attention"), reason="Triton does not run here"
)
def test_the_kernel_reads_rows_of_a_fused_projection():
    triton = registry.load("packed_attention", "triton")
    qkv = torch.randn(100, 8 * 16)
    q, k, v = (x.unflatten(1, (-1, 16)) for x in qkv.split([64, 32, 32], dim=1))
    given = (torch.tensor([0, 100], dtype=torch.int32), 100, 0.25)
    whole = [x.contiguous() for x in (q, k, v)]
    torch.testing.assert_close(triton.forward(q, k, v, *given)[0], reference.forward(*whole, *given)[0])
