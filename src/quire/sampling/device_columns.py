"""DeviceColumns: the parameters that the sampling kernel reads, on the device beside the logits."""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sample.columns import WORDS, Word
from quire.sampling.columns import SamplingColumns


class DeviceColumns:
    """A mirror of some of the columns. A row is current as of its last `update`."""

    def __init__(self, columns: SamplingColumns, device: torch.device | str) -> None:
        self._columns = columns
        self._device = torch.device(device)
        # [max_rows, WORDS], see `Word`
        self.packed: Tensor = torch.zeros((columns.max_rows, WORDS), dtype=torch.int32, device=self._device)

    def update(self, row_ids: np.ndarray) -> None:
        """Copies these rows to the device, in stream order, without waiting.

        Called once per step, after `start_row` of the step's new rows and before it samples.
        """
        if not len(row_ids):
            return
        is_cuda = self._device.type == "cuda"
        # pinned memory comes from torch's cache, which reuses a piece only after its copy is done
        staged = torch.zeros((len(row_ids), WORDS), dtype=torch.int32, pin_memory=is_cuda)
        _fill(staged.numpy(), self._columns, row_ids)
        sent = staged.to(self._device, non_blocking=True)
        self.packed.index_copy_(0, sent[:, Word.ROW].long(), sent)


def _fill(words: np.ndarray, columns: SamplingColumns, row_ids: np.ndarray) -> None:
    keys = columns.token_key[row_ids]
    words[:, Word.TEMPERATURE] = columns.temperature[row_ids].view(np.int32)
    words[:, Word.TOP_K] = columns.top_k[row_ids]
    words[:, Word.TOP_P] = columns.top_p[row_ids].view(np.int32)
    words[:, Word.MIN_P] = columns.min_p[row_ids].view(np.int32)
    words[:, Word.KEY_LOW] = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    words[:, Word.KEY_HIGH] = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    words[:, Word.ROW] = row_ids
    words[:, Word.REPETITION] = columns.repetition[row_ids].view(np.int32)
    words[:, Word.PRESENCE] = columns.presence[row_ids].view(np.int32)
    words[:, Word.FREQUENCY] = columns.frequency[row_ids].view(np.int32)
    words[:, Word.PROMPT] = columns.num_prompt_tokens[row_ids]
