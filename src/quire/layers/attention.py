"""The pool of KV pages, and attention over it: q and k are rotated, k and v stored, then every query looks back."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.layout import SCALE_DTYPE, BlockLayout
from quire.kernels import huge_pages
from quire.kernels.attention.cudnn import contiguous_attention
from quire.layers.batch import Batch
from quire.layers.norm import RMSNorm


class Pool:
    """num_blocks × block_bytes, page-major. Block 0 is never given out: padded rows of a graph write there."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        memory: Tensor | None = None,
    ) -> None:
        """`memory`: zeros, uint8; None: it is allocated."""
        self.layout = layout
        self.num_blocks = num_blocks
        if memory is None:
            memory = _zeros(num_blocks, layout.block_bytes, torch.device(device))
        self.data = memory.view(num_blocks, layout.block_bytes)
        self._planes = [(self._plane(i, False), self._plane(i, True)) for i in range(layout.num_layers)]
        self._scales = self._scale_planes() if layout.has_scales else [(None, None)] * layout.num_layers

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's K and V pages: two views [num_blocks, block_size, kv_heads, head_dim], strided by block."""
        return self._planes[index]

    def scales(self, index: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Scales of a layer's K and V in int8: two views [num_blocks, kv_heads, block_size]; None in other types."""
        return self._scales[index]

    def slots(self) -> list[Tensor]:
        """All that positions have in a block, as views [num_blocks, planes, block_size, bytes] uint8."""
        layout = self.layout
        values, scales = self.data[:, : layout.scales_offset], self.data[:, layout.scales_offset :]
        shapes = [(values, 2 * layout.num_layers)]
        if layout.has_scales:
            shapes.append((scales, 2 * layout.num_layers * layout.num_kv_heads))
        return [part.unflatten(1, (planes, layout.block_size, -1)) for part, planes in shapes]

    def elements(self, dtype: torch.dtype) -> Tensor:
        """All bytes as one vector of this type, which holds the adapters' weights."""
        return self.data.view(-1).view(dtype)

    def _plane(self, layer: int, value: bool) -> Tensor:
        layout = self.layout
        elements = self.data.view(getattr(torch, layout.dtype))
        return torch.as_strided(
            elements,
            (self.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim),
            (elements.stride(0), layout.position_elements, layout.head_dim, 1),
            elements.storage_offset() + layout.plane_offset(layer, value),
        )

    def _scale_planes(self) -> list[tuple[Tensor, Tensor]]:
        layout = self.layout
        scales = self.data[:, layout.scales_offset :].view(getattr(torch, SCALE_DTYPE))
        layers = scales.unflatten(1, (layout.num_layers, layout.num_kv_heads, 2, layout.block_size))
        return [(layers[:, i, :, 0], layers[:, i, :, 1]) for i in range(layout.num_layers)]


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes. On the CPU they are mapped, so a page costs memory only once it is written."""
    if device.type == "cpu":
        try:
            return huge_pages.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            size = f"{num_blocks * block_bytes / 1e9:,.1f} GB"
            raise ConfigError(
                f"a pool of {size} is more than this machine can give ({error}): "
                "lower kv_cache_memory_bytes or num_blocks"
            ) from error
    return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One layer's attention between its fused qkv projection and its output projection. Has no weights."""

    rotary: ModuleType
    attention: ModuleType
    index: int  # which layer of a block
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # 0: none; else a query sees its last `window` positions, itself included
    cos_sin: Tensor | None = None  # [positions, rotary_dim] float32; None: no rotation
    soft_cap: float = 0.0  # 0: none; else scores become soft_cap * tanh(score / soft_cap)
    slopes: Tensor | None = None  # [heads] float32: a score gains slope * position of its key (ALiBi)
    group: int = 0  # of layers, whose blocks it reads and writes

    def __call__(
        self,
        qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim], overwritten
        batch: Batch,
        pool: Pool,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, heads * head_dim]; with norms, q and k are normalised before they are rotated. `sinks` [heads] float32:
        of each head the score of a key without a value.

        A norm as wide as a head takes every head alone, one as wide as all of q or k takes them together.
        """
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self.head_dim)
        if q_norm is not None and k_norm is not None:
            query, key = num_heads * self.head_dim, num_kv_heads * self.head_dim
            q_norm.heads(qkv[:, :query].unflatten(1, (-1, q_norm.weight.shape[0])))
            k_norm.heads(qkv[:, query : query + key].unflatten(1, (-1, k_norm.weight.shape[0])))
        k_pages, v_pages = pool.layer(self.index)
        k_scales, v_scales = pool.scales(self.index)
        self.rotary.rotate_and_store(
            qkv,
            num_heads,
            num_kv_heads,
            self.head_dim,
            self.cos_sin,
            batch.positions,
            (batch if not self.group else batch.group(self.group)).slots,
            k_pages,
            v_pages,
            k_scales,
            v_scales,
        )
        more = {"k_scales": k_scales, "v_scales": v_scales, "sinks": sinks}
        return self._attend(heads, batch, k_pages, v_pages, more)

    def _attend(
        self, heads: Tensor, batch: Batch, k_pages: Tensor, v_pages: Tensor, more: dict[str, Tensor | None]
    ) -> Tensor:
        """heads [T, heads + 2 * kv_heads, head_dim], rotated; `more` arguments of the kernel, by name."""
        queries = heads[:, : self.num_heads]
        tables = (batch if not self.group else batch.group(self.group)).block_tables
        where = (k_pages, v_pages, batch.query_starts, batch.context_lens, tables)
        trees = () if batch.trees is None else (batch.trees.starts, batch.trees.ancestors)
        if batch.plans is None:
            masks = (None, *trees) if trees else ()
            return self.attention.paged_attention(
                queries, *where, self.scale, self.window, *masks,
                soft_cap=self.soft_cap, slopes=self.slopes, **more,
            )  # fmt: skip
        out = queries.new_empty(queries.shape[0], self.num_heads * self.head_dim)
        # every row needs the paged kernel
        whole = bool(self.window or self.soft_cap or self.slopes is not None or more["sinks"] is not None)
        fresh = () if whole else batch.fresh
        if fresh:
            spans = [(span.first, span.last, span.padded) for span in fresh]
            out = contiguous_attention(heads, self.num_heads, spans, self.scale, out)
        if len(fresh) < batch.context_lens.shape[0]:
            self.attention.paged_attention(
                queries,
                *where,
                self.scale,
                self.window,
                out,
                *((*trees, batch.positions) if trees else ()),
                plan=batch.plans.of(self.window, whole),
                max_query_len=batch.max_query_len,
                soft_cap=self.soft_cap,
                slopes=self.slopes,
                **more,
            )
        return out
