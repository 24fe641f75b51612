"""Block copies by native code. Promises are those of the reference."""

import numpy
import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.pages import reference


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool uint8 [num_blocks, block_bytes]: block targets[i] becomes a copy of sources[i] as it was before."""
    if numpy.intersect1d(sources.numpy(), targets.numpy()).size:
        reference.copy_blocks(pool, sources, targets)  # chains need the copy through a third place
        return
    native.check_indices(torch.int64, sources, targets)
    native.call(
        "copy_blocks",
        (
            pool.data_ptr(), pool.stride(0), pool.shape[1],
            sources.data_ptr(), targets.data_ptr(), sources.shape[0],
        ),
        (pool, sources, targets),
    )  # fmt: skip
