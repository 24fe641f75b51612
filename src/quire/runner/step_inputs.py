"""StepInputs: the integers of a step as arrays, computed once, whichever device runs it."""

from dataclasses import dataclass

import numpy as np

from quire.core.step import RowStart, Step
from quire.observe.logs import get_logger
from quire.runner.drafts import SpreadTrees, spread_trees
from quire.sampling.columns import SamplingColumns

log = get_logger(__name__)


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
        try:
            self.columns.start_row(
                row, sampling, start.seed, start.sample_index, start.num_prompt_tokens, start.stop_token_ids
            )
        except Exception:  # a fault of one request's parameters, which admission missed
            log.exception("the sampling parameters of a row cannot be used: %.500s", sampling)
            self.columns.ban_row(row)


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Positions first … first + count - 1 of a row predict the prompt tokens after them."""

    row: int
    first: int
    count: int
    num_top: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """R rows advance, S tokens are sampled: what every path reads, a decode of a GPU included."""

    step: Step
    rows: np.ndarray  # [R] int32, rows that advance
    computed: np.ndarray  # [R] int32, position of each row's first token
    counts: np.ndarray  # [R] int32, tokens of each row
    sources: np.ndarray  # [S] int64, index into `rows`: the row whose token is sampled
    sample_rows: np.ndarray  # [S] int64, the row that receives the token
    scored: tuple[ScoredRow, ...]  # rows that want logprobs of prompt tokens from this step

    @property
    def is_decode(self) -> bool:
        """Every row advances by one token and is sampled, in order."""
        return (
            int(self.counts.max()) <= 1
            and np.array_equal(self.sources, np.arange(len(self.rows)))
            and not self.scored
        )


def step_inputs(step: Step, settings: RowSettings) -> StepInputs:
    """int32 arrays share the step's memory."""
    rows = np.asarray(step.rows, np.int32)
    computed = np.asarray(step.num_computed, np.int32)
    counts = np.asarray(step.num_tokens, np.int32)
    return StepInputs(
        step,
        rows,
        computed,
        counts,
        np.asarray(step.sample_sources, np.int64),
        np.asarray(step.sample_rows, np.int64),
        _scored_rows(settings, rows, computed, counts),
    )


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The T tokens of a step in the order of the batch, and L of them whose hidden states are wanted."""

    inputs: StepInputs
    contexts: np.ndarray  # [R] int32, tokens of each row once the step has run
    ends: np.ndarray  # [R] int64, where each row's tokens end in the batch
    wanted: np.ndarray  # [L] int64, token indices: one per sample, then those of scored rows
    sample_positions: np.ndarray  # [S] int64, where the sampled token will stand
    trees: SpreadTrees | None  # None: every draft is a chain
    num_tokens: int

    @property
    def are_all_sampled(self) -> bool:
        """Every token is sampled, in order: one of a row, or a draft and the token before it."""
        if len(self.wanted) != self.num_tokens or self.inputs.scored:
            return False
        return bool((self.wanted == np.arange(self.num_tokens)).all())

    def token_rows(self) -> np.ndarray:
        """[T], the row of each token."""
        rows = self.inputs.rows
        return rows if self.num_tokens == len(rows) else np.repeat(rows, self.inputs.counts)

    def places(self) -> np.ndarray:
        """[T], where each token's K and V lie in its row; without trees its position."""
        inputs = self.inputs
        if self.num_tokens == len(inputs.rows):
            return inputs.computed
        return np.arange(self.num_tokens) + np.repeat(self.contexts - self.ends, inputs.counts)

    def wanted_rows(self) -> np.ndarray:
        """[S], the row whose token each sample reads."""
        return self.inputs.rows[self.inputs.sources]


def token_inputs(inputs: StepInputs) -> TokenInputs:
    step, sources = inputs.step, inputs.sources
    contexts = inputs.computed + inputs.counts
    ends = np.cumsum(inputs.counts, dtype=np.int64)
    wanted = ends[sources] - 1
    positions = contexts[sources].astype(np.int64)
    if step.sample_offsets:
        offsets = np.asarray(step.sample_offsets, np.int64)
        wanted -= offsets
        positions -= offsets
    trees = spread_trees(step.drafts, inputs.rows, inputs.computed, inputs.counts) if step.drafts else None
    if trees is not None:
        positions = trees.positions[wanted] + 1
    if inputs.scored:
        wanted = np.concatenate((wanted, *(_scored_tokens(inputs, ends, score) for score in inputs.scored)))
    return TokenInputs(inputs, contexts, ends, wanted, positions, trees, int(ends[-1]))


def _scored_tokens(inputs: StepInputs, ends: np.ndarray, scored: ScoredRow) -> np.ndarray:
    index = int(np.flatnonzero(inputs.rows == scored.row)[0])
    begin = int(ends[index] - inputs.counts[index])
    return np.arange(begin, begin + scored.count)


def _scored_rows(
    settings: RowSettings, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray
) -> tuple[ScoredRow, ...]:
    asked = settings.prompt_logprobs[rows]
    if (asked < 0).all():
        return ()
    scored = []
    for i in np.flatnonzero(asked >= 0):
        last = int(settings.num_prompt_tokens[rows[i]]) - 1  # the position that predicts an output
        count = min(int(counts[i]), last - int(computed[i]))
        if count > 0:
            scored.append(ScoredRow(int(rows[i]), int(computed[i]), count, int(asked[i])))
    return tuple(scored)
