"""Attention over the pool's pages: q and k are rotated, k and v stored, then every query looks back."""

from types import ModuleType

from torch import Tensor

from quire.kernels.attention.cudnn import contiguous_attention
from quire.layers.batch import Batch
from quire.layers.norm import RMSNorm
from quire.layers.pool import Pool


class Attention:
    """One layer's attention between its fused qkv projection and its output projection. Has no weights."""

    def __init__(
        self,
        rotary: ModuleType,
        attention: ModuleType,
        index: int,  # which layer of the pool
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,  # 0: none; else a query sees its last `window` positions, itself included
        cos_sin: Tensor | None = None,  # [positions, rotary_dim] float32; None: no rotation
    ) -> None:
        self._rotary = rotary
        self._attention = attention
        self._index = index
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = scale
        self._window = window
        self._cos_sin = cos_sin

    def __call__(
        self,
        qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim], overwritten
        batch: Batch,
        pool: Pool,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Tensor:
        """[T, heads * head_dim]; with norms, every head of q and k is normalised before it is rotated."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self._head_dim)
        if q_norm is not None and k_norm is not None:
            q_norm.heads(heads[:, :num_heads])
            k_norm.heads(heads[:, num_heads : num_heads + num_kv_heads])
        k_pages, v_pages = pool.layer(self._index)
        self._rotary.rotate_and_store(
            qkv,
            num_heads,
            num_kv_heads,
            self._head_dim,
            self._cos_sin,
            batch.positions,
            batch.slots,
            k_pages,
            v_pages,
        )
        return self._attend(heads, batch, k_pages, v_pages)

    def _attend(self, heads: Tensor, batch: Batch, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """heads [T, heads + 2 * kv_heads, head_dim], rotated."""
        queries = heads[:, : self._num_heads]
        where = (k_pages, v_pages, batch.query_starts, batch.context_lens, batch.block_tables)
        trees = () if batch.trees is None else (batch.trees.starts, batch.trees.ancestors)
        if batch.plans is None:
            masks = (None, *trees) if trees else ()
            return self._attention.paged_attention(queries, *where, self._scale, self._window, *masks)
        out = queries.new_empty(queries.shape[0], self._num_heads * self._head_dim)
        fresh = () if self._window else batch.fresh
        if fresh:
            spans = [(span.first, span.last, span.padded) for span in fresh]
            out = contiguous_attention(heads, self._num_heads, spans, self._scale, out)
        if len(fresh) < batch.context_lens.shape[0]:
            self._attention.paged_attention(
                queries,
                *where,
                self._scale,
                self._window,
                out,
                *((*trees, batch.positions) if trees else ()),
                plan=batch.plans.of(self._window),
                max_query_len=batch.max_query_len,
            )
        return out
