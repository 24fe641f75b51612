"""Attention of fresh prompts, K and V straight from the projection, by PyTorch's fused attention.

For rows that have no cached prefix: their keys are this step's own tokens, so no page need be read. On NVIDIA GPUs
cuDNN is asked for first; it is faster than any kernel over pages where prompts are long.
"""

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# In the order they are tried on a GPU; elsewhere PyTorch chooses.
GPU_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def contiguous_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    rows: Sequence[tuple[int, int]],  # (first, last + 1) token of each prompt, in host memory
    scale: float,
    out: Tensor,  # [T, Hq * D]
) -> Tensor:
    """Causal attention of each row over its own tokens: in `out`, whose other tokens are left alone, or in new memory.

    Prompts of one length that are all there is go through in one call, and what it returns is the result: `out` is not
    written, which saves a copy of every token.
    """
    num_tokens, num_heads, head_dim = q.shape
    lengths = {end - first for first, end in rows}
    if len(lengths) == 1 and len(rows) * min(lengths) == num_tokens > 0:
        together = (len(rows), -1)
        result = _attend(q.unflatten(0, together), k.unflatten(0, together), v.unflatten(0, together), scale)
        return result.reshape(num_tokens, num_heads * head_dim)
    results = out.view(out.shape[0], num_heads, head_dim)
    for first, end in rows:
        if end > first:
            of_row = (None, slice(first, end))
            results[first:end] = _attend(q[of_row], k[of_row], v[of_row], scale)[0]
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[B, T, H, D] each; the result as well."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # Nothing to prefer where PyTorch has one backend.
    preferred = sdpa_kernel(GPU_BACKENDS, set_priority=True) if q.device.type == "cuda" else nullcontext()
    with preferred:
        result = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return result.transpose(1, 2)
