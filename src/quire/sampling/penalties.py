"""Repetition, presence and frequency penalties, straight from the rows' tokens.

No count per vocabulary entry is kept between steps: the work follows the length of the histories, and a row
that is preempted, forked or rolled back needs no repair. As transformers and vLLM define them: repetition
divides positive and multiplies negative logits of tokens in prompt or output; frequency and presence subtract
by count and by occurrence in the output alone.
"""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quire.sampling.records import SampleRequests, device_inputs, on_device

ROWS_PER_PASS = 32  # bounds the scratch that counts tokens: [32, V] int32


class Penalties:
    """Changes logits in place. Its scratch of zeros makes counting cost the history's length, not V."""

    def __init__(self, kernel: ModuleType | None = None) -> None:
        """`kernel`: a device's own, with `penalise_rows`."""
        self._kernel = kernel
        self._counts: Tensor | None = None  # [ROWS_PER_PASS, V] int32, all zero between calls

    def apply(
        self,
        logits: Tensor,  # [S, V] float32, changed in place
        indices: np.ndarray,  # [P] int64, which of the S rows have penalties
        requests: SampleRequests,
    ) -> None:
        if self._kernel is not None:
            rows, positions, columns = device_inputs(requests, logits.device)
            counts = self._zeros(logits.shape[1], logits.device)
            self._kernel.penalise_rows(logits, rows, positions, columns.packed, requests.token_ids, counts)
            return
        for start in range(0, len(indices), ROWS_PER_PASS):
            self._apply_pass(logits, indices[start : start + ROWS_PER_PASS], requests)

    def _apply_pass(self, logits: Tensor, indices: np.ndarray, requests: SampleRequests) -> None:
        columns, rows, ends = requests.columns, requests.rows[indices], requests.positions[indices]
        outputs = columns.num_prompt_tokens[rows]
        repetition = columns.repetition[rows]
        starts = np.where(repetition != 1.0, 0, np.minimum(outputs, ends))
        width = int((ends - starts).max(initial=0))
        if width == 0:
            return
        device, vocab_size = logits.device, logits.shape[1]
        whole = on_device(np.stack([indices * vocab_size, rows, starts, ends, outputs]), device)[:, :, None]
        base, row, start, end, output_start = whole.unbind(0)  # each [P, 1]
        amounts = np.stack([repetition, columns.presence[rows], columns.frequency[rows]])
        penalty, presence, frequency = on_device(amounts, device)[:, :, None].unbind(0)  # each [P, 1]
        places = start + torch.arange(width, device=device)  # [P, width]
        # Past a row's end its last token stands in. Each place writes what its token's logit becomes, so
        # writing one twice does no harm.
        ids = requests.token_ids[row, places.clamp(max=end - 1).clamp_(min=0)].long()
        flat = logits.view(-1)
        targets = base + ids
        values = _repetition(flat[targets], penalty)
        if amounts[1:].any():
            in_output = (places >= output_start) & (places < end)
            counts = self._count(ids, in_output, vocab_size)
            values = values - frequency * counts
            values = values - presence * (counts > 0)
        flat[targets] = values

    def _count(self, ids: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
        """[P, width] int32: for each place, how many counted places of its row hold the same token."""
        zeros = self._zeros(vocab_size, ids.device)
        self._counts = None  # until they are zeros again: memory may run out in between
        scratch = zeros[: ids.shape[0]]
        scratch.scatter_add_(1, ids, counted.int())
        counts = scratch.gather(1, ids)
        scratch.scatter_(1, ids, 0)
        self._counts = zeros
        return counts

    def _zeros(self, vocab_size: int, device: torch.device) -> Tensor:
        if self._counts is None or self._counts.shape[1] != vocab_size or self._counts.device != device:
            self._counts = torch.zeros(ROWS_PER_PASS, vocab_size, dtype=torch.int32, device=device)
        return self._counts


def _repetition(values: Tensor, penalty: Tensor) -> Tensor:
    """A penalty of 1 leaves every value as it is, bit for bit."""
    return torch.where(values > 0, values / penalty, values * penalty)
