"""Attention within whole sequences: every token sees all of its own sequence. No pool, no pages."""

from types import ModuleType

from torch import Tensor


class FullAttention:
    """One layer's attention between its fused qkv projection and its output projection. Has no weights."""

    def __init__(self, kernel: ModuleType, num_heads: int, head_dim: int, scale: float) -> None:
        self._kernel = kernel
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._scale = scale

    def __call__(self, qkv: Tensor, starts: Tensor) -> Tensor:
        """qkv [T, 3 * heads * head_dim], sequence r in rows starts[r]:starts[r + 1] -> [T, heads * head_dim]."""
        q, k, v = qkv.view(qkv.shape[0], 3, self._num_heads, self._head_dim).unbind(1)
        return self._kernel.full_attention(q, k, v, starts, self._scale)
