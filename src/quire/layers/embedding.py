"""Rows of a table: token embeddings and learned positions."""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from quire.layers.lora import LoraBatch, LoraGroup
from quire.layers.parameters import LayerPart, Loader, check_shape


class TokenEmbedding:
    """A table [num_rows, width]; results are in the model's activation type.

    With `compact` a 16-bit table stays as it is and a 32-bit one becomes float16: it is only read row by row.
    """

    def __init__(
        self,
        kernel: ModuleType,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        compact: bool,
        first_row: int = 0,
    ) -> None:
        self._kernel = kernel
        self._shape = (num_rows, width)
        self._dtype = dtype
        self._device = device
        self._compact = compact
        self._first_row = first_row  # rows of the checkpoint's table before the first that is kept
        self._table: Tensor | None = None  # [num_rows, width]
        self._lora: LoraGroup | None = None

    @property
    def table(self) -> Tensor:
        assert self._table is not None, "an embedding must be loaded before it is used"
        return self._table

    def __call__(self, ids: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """ids [T] int32 or int64 -> [T, width], plus the rows' adapters."""
        rows = self._kernel.gather(self._table, ids, dtype=self._dtype)
        if lora is None or self._lora is None or not lora.adds_to(self._lora):
            return rows
        num_ids = self._first_row + self._shape[0]
        return self._lora.add_embedded(ids, rows, lora, num_ids, self._first_row)

    def take_lora(self, group: LoraGroup) -> None:
        self._lora = group

    def loader(self) -> Loader:
        num_rows, width = self._first_row + self._shape[0], self._shape[1]
        return Loader((num_rows, width), self.load, (LayerPart(self, 0, width, num_rows, is_embedding=True),))

    def load(self, tensor: Tensor) -> None:
        """tensor [first_row + num_rows, width]."""
        kept = self._kept_dtype(tensor)
        self._table = tensor[self._first_row :].to(device=self._device, dtype=kept, copy=True)

    def _kept_dtype(self, tensor: Tensor) -> torch.dtype:
        if not self._compact:
            return self._dtype
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.dtype
        return torch.float16

    def state(self) -> dict[str, Tensor]:
        return {"table": self.table}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        check_shape(state["table"], self._shape)
        self._table = state["table"].to(self._device)
