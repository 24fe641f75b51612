"""PinnedMemory: one large piece of host memory that a GPU copies from by itself, at the link's full speed."""

import weakref
from contextlib import suppress

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import huge_pages


class PinnedMemory:
    """Pinned once and as a whole, in huge pages: registering page by page would take most of a start."""

    def __init__(self, num_bytes: int, device: torch.device, setting: str = "cpu_offload_gb") -> None:
        """`setting`: what to lower where the system does not allow it."""
        # in a mapping of its own: a page cannot be pinned twice, and small pieces share theirs with others
        alone = max(num_bytes, huge_pages.SMALLEST_ALONE)
        self.bytes: Tensor = huge_pages.zeros(alone, dtype=torch.uint8)[:num_bytes]
        if device.type != "cuda":
            return
        self.bytes.zero_()  # by many threads: the pages are there before the driver asks for them one by one
        cudart = torch.cuda.cudart()
        result = cudart.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
        if result != cudart.cudaError.success:
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # which is told of the error in our place, and ends it
            raise ConfigError(
                f"{num_bytes / 1e9:.1f} GB of host memory could not be pinned ({result}): lower "
                f"{setting}, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(self, cudart.cudaHostUnregister, self.bytes.data_ptr()).atexit = False

    def pieces(self, num_bytes: int) -> list[Tensor]:
        """Cut into as many pieces of `num_bytes` as fit."""
        count = len(self.bytes) // num_bytes
        return list(self.bytes[: count * num_bytes].view(count, num_bytes).unbind(0)) if count else []
