"""Full attention by native code. Promises are those of the reference, and one more:

a sequence's result has the same bits alone and among any others.
"""

from torch import Tensor

from quire.kernels import native


def full_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv, as k and v
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32: sequence r is tokens starts[r]:starts[r + 1]
    scale: float,
    out: Tensor | None = None,
) -> Tensor:  # [T, Hq * D]
    """Every token attends to all tokens of its own sequence, and to no other."""
    tokens, heads, head_dim = q.shape
    out = native.empty(tokens, heads * head_dim) if out is None else out
    native.check_floats(q, k, v, out)
    native.check_integers(starts, None)
    if not q.stride() == k.stride() == v.stride():  # views into one qkv, or three alike
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if k.stride() != q.stride():
            raise TypeError("q, k and v must lie alike, as views into one qkv do")
    native.call(
        "full_attention",
        (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), q.stride(1), heads, k.shape[1], head_dim,
            starts.data_ptr(), starts.shape[0] - 1, native.real(scale), out.data_ptr(), out.stride(0),
        ),
        (q, k, v, starts, out),
    )  # fmt: skip
    return out
