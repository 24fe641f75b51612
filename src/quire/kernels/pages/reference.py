"""Block copies in plain torch."""

from torch import Tensor


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool uint8 [num_blocks, block_bytes]: block targets[i] becomes a copy of sources[i] as it was before."""
    pool[targets] = pool[sources]
