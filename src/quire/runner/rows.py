"""Rows: what the runner remembers of each running sequence, so that a Step needs to carry only deltas."""

import numpy as np
import torch

from quire.core.ints import Ints
from quire.core.step import RowStart, Step
from quire.sampling.columns import SamplingColumns


class RowSettings:
    """How each row is sampled and scored: decided when it starts, on the host."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.columns = SamplingColumns(max_rows, vocab_size)
        self.num_prompt_tokens = np.zeros(max_rows, np.int32)  # [max_rows]
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)  # [max_rows]; -1: not asked for

    def start(self, start: RowStart) -> None:
        row, sampling = start.row, start.sampling
        self.num_prompt_tokens[row] = start.num_prompt_tokens
        self.prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        self.columns.start_row(
            row, sampling, start.seed, start.sample_index, start.num_prompt_tokens, start.stop_token_ids
        )

    def wants_prompt_logprobs(self, rows: Ints) -> bool:
        return bool((self.prompt_logprobs[np.asarray(rows)] >= 0).any())


class Rows:
    """Token ids and block tables, one line per row, in host memory. Untouched lines cost no memory."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(max_rows, max_model_len, dtype=torch.int32)  # [max_rows, max_len]
        self.tokens = self.token_ids.numpy()  # the same memory
        self.tables = np.zeros((max_rows, self.max_blocks), np.int32)  # [max_rows, max_blocks] block ids
        self.settings = RowSettings(max_rows, vocab_size)

    def apply(self, step: Step) -> None:
        """Starts rows, writes told tokens, drafts and table entries, in this order."""
        for start in step.starts:
            self._start(start)
        if step.forced_rows:
            self.tokens[np.asarray(step.forced_rows), np.asarray(step.forced_positions)] = step.forced_tokens
        for draft in step.drafts:
            self.tokens[draft.row, draft.position : draft.position + len(draft.token_ids)] = draft.token_ids
        if step.table_rows:
            self.tables[np.asarray(step.table_rows), np.asarray(step.table_indices)] = step.table_blocks

    def _start(self, start: RowStart) -> None:
        self.tokens[start.row, : len(start.token_ids)] = start.token_ids
        self.tables[start.row, : len(start.block_ids)] = start.block_ids
        self.settings.start(start)
