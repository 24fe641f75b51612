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
    """Writes causal attention of each row over its own tokens into `out`; leaves other tokens alone."""
    num_heads, head_dim = q.shape[1:]
    results = out.view(out.shape[0], num_heads, head_dim)
    for first, end in rows:
        if end <= first:
            continue
        results[first:end] = _attend(q[first:end], k[first:end], v[first:end], scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # Nothing to prefer where PyTorch has one backend.
    preferred = sdpa_kernel(GPU_BACKENDS, set_priority=True) if q.device.type == "cuda" else nullcontext()
    with preferred:
        result = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return result[0].transpose(0, 1)
