"""Sampler: one token per row, by the row's own parameters and in any batch."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels import choose
from quire.kernels.registry import REFERENCE
from quire.sampling import masks
from quire.sampling.beams import best_candidates, normalise
from quire.sampling.columns import CHANGING, RowFlag, uniforms
from quire.sampling.draw import Draws, draw, filtered_weights
from quire.sampling.logprobs import measure
from quire.sampling.penalties import Penalties
from quire.sampling.records import LogprobTensors, Sampled, SampleRequests, device_inputs, on_device


class Sampler:
    """Bias and bans, penalties, then the choice; logprobs are of the logits as they came.

    The host decides from the rows' flags what runs, and never waits for the device. A row that cannot be
    sampled (logits that are not finite, every token banned) is marked in `Sampled.finite`, not raised.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._kernel = choose("sample", self._device)
        # the reference sorts every row; `draw` is as plain, and sorts where it must
        self._fused = not self._kernel.__name__.endswith(REFERENCE)
        # a kernel for whole steps, where the device has one
        self._samples_rows = hasattr(self._kernel, "sample_rows")
        self._penalties = Penalties(self._kernel if hasattr(self._kernel, "penalise_rows") else None)

    @property
    def writes_tokens(self) -> bool:
        """Whether chosen tokens are written to `SampleRequests.token_ids` here, not by the caller."""
        return self._samples_rows

    def __call__(self, logits: Tensor, requests: SampleRequests) -> Sampled:
        """logits [S, V] float32, contiguous. Overwritten: edits are made in place."""
        flags = _current_flags(requests)
        usable = None
        if not self._samples_rows or requests.mask is not None or (flags & CHANGING).any():
            usable = self._kernel.peaks(logits).isfinite()  # an edit may hide what was wrong
        if requests.beams:
            logits = normalise(logits, requests.beams)
        asking = np.flatnonzero(flags & RowFlag.LOGPROBS)
        raw = self._raw(logits, flags, asking, requests)
        self._edit(logits, flags, requests)
        beams = best_candidates(logits, requests.beams) if requests.beams else ()
        if self._samples_rows:
            chosen, finite = self._sample_rows(logits, usable, requests)
        else:
            chosen, finite = self._sample(logits, usable, flags, requests)
        logprobs = None if raw is None else self._measure(raw, chosen, asking, requests)
        return Sampled(chosen, finite, logprobs, beams)

    def distributions(self, logits: Tensor, requests: SampleRequests, indices: np.ndarray) -> Tensor:
        """[N, V] float32: what these of the S tokens are drawn from, every edit and filter applied.

        Leaves `logits` as they are. Rows whose choice depends on a mask or on the tokens before it are not asked for.
        """
        chosen = on_device(indices, logits.device)
        of_these = replace(
            requests, rows=requests.rows[indices], positions=requests.positions[indices], mask=None, beams=(),
            device_rows=None, device_positions=None,
        )  # fmt: skip
        own = logits.index_select(0, chosen).float()
        self._edit(own, _current_flags(of_these), of_these)
        draws = Draws.of(requests.columns, of_these.rows, np.zeros(len(of_these.rows)))
        weights = filtered_weights(own, draws)
        return weights / weights.sum(dim=1, keepdim=True)

    def _sample_rows(
        self, logits: Tensor, usable: Tensor | None, requests: SampleRequests
    ) -> tuple[Tensor, Tensor]:
        """The tokens and whether they are finite, in one call, which writes the tokens to their rows as well."""
        chosen = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        finite = torch.empty(len(logits), dtype=torch.bool, device=self._device)
        rows, positions, columns = device_inputs(requests, self._device)
        self._kernel.sample_rows(
            logits, rows, positions, columns, requests.token_ids, chosen, finite, usable=usable
        )
        return chosen, finite

    def _sample(
        self, logits: Tensor, usable: Tensor | None, flags: np.ndarray, requests: SampleRequests
    ) -> tuple[Tensor, Tensor]:
        """The tokens and whether they are finite."""
        chosen = self._choose(logits, flags, requests).clamp_(0, logits.shape[1] - 1)
        finite = logits.gather(1, chosen[:, None]).squeeze(1).isfinite()
        if usable is not None:
            finite &= usable
        return chosen.masked_fill_(~finite, 0), finite

    def _raw(
        self, logits: Tensor, flags: np.ndarray, asking: np.ndarray, requests: SampleRequests
    ) -> Tensor | None:
        """The logits that logprobs are taken from, [asking, V]: a copy only if an edit would reach them."""
        if not len(asking):
            return None
        changing = (flags[asking] & CHANGING).any() or requests.mask is not None
        if len(asking) == len(logits):
            return logits.clone() if changing else logits
        return logits.index_select(0, on_device(asking, self._device))

    def _edit(self, logits: Tensor, flags: np.ndarray, requests: SampleRequests) -> None:
        if requests.mask is not None or (flags & (CHANGING & ~RowFlag.PENALISED)).any():
            masks.apply_edits(logits, flags, requests)
        penalised = np.flatnonzero(flags & RowFlag.PENALISED)
        if len(penalised):
            self._penalties.apply(logits, penalised, requests)

    def _choose(self, logits: Tensor, flags: np.ndarray, requests: SampleRequests) -> Tensor:
        sampled = np.flatnonzero(flags & RowFlag.SAMPLED)
        if not len(sampled):
            return self._kernel.argmax(logits)
        if len(sampled) == len(logits):
            return self._draw(logits, requests, sampled)
        drawing = on_device(sampled, self._device)
        greedy = on_device(np.flatnonzero(~flags & RowFlag.SAMPLED), self._device)
        chosen = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        chosen[greedy] = self._kernel.argmax(logits.index_select(0, greedy))
        chosen[drawing] = self._draw(logits.index_select(0, drawing), requests, sampled)
        return chosen

    def _draw(self, logits: Tensor, requests: SampleRequests, indices: np.ndarray) -> Tensor:
        columns, rows = requests.columns, requests.rows[indices]
        draws = Draws.of(columns, rows, uniforms(columns.token_key[rows], requests.positions[indices]))
        if not self._fused:
            return draw(logits, draws)
        inputs = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniforms)
        return self._kernel.sample_filtered(logits, *(on_device(value, self._device) for value in inputs))

    def _measure(
        self, raw: Tensor, chosen: Tensor, asking: np.ndarray, requests: SampleRequests
    ) -> LogprobTensors:
        token_ids = chosen if len(asking) == len(chosen) else chosen[on_device(asking, self._device)]
        num_top = requests.columns.num_logprobs[requests.rows[asking]]
        return measure(raw, token_ids, asking, num_top, self._kernel)


def _current_flags(requests: SampleRequests) -> np.ndarray:
    """[S] uint8: the rows' flags, without MIN_TOKENS where the row is long enough by now."""
    columns, rows = requests.columns, requests.rows
    flags = columns.flags[rows]
    if (flags & RowFlag.MIN_TOKENS).any():
        reached = requests.positions - columns.num_prompt_tokens[rows] >= columns.min_tokens[rows]
        flags[reached] &= ~np.uint8(RowFlag.MIN_TOKENS)
    return flags
