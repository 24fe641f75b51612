"""StepPlan: a Step while it is being decided. ScheduledStep: the Step with its sequences."""

from dataclasses import dataclass

from quire.core.draft import Draft, TokenTree
from quire.core.request import Sequence, ints
from quire.core.step import BeamSet, HostTransfers, RowStart, Step
from quire.memory.paged import TableDelta
from quire.scheduler.adapter_admission import AdapterAdmission

FEW_STOP_TOKENS = 3  # of a beam search: with more, its candidates come from two top-k


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step with its sequences: what commit needs once the result is there."""

    step: Step
    sequences: list[Sequence]  # as step.rows
    receivers: list[Sequence]  # as step.sample_rows

    @property
    def num_tokens(self) -> int:
        return sum(self.step.num_tokens)


class StepPlan:
    """Entries are in the schedule's order, so that a group that is preempted half-way is cut off the end."""

    def __init__(self, step_id: int, prompt_budget: int) -> None:
        self.step_id = step_id
        self.prompt_budget = prompt_budget  # tokens that prefills may still take
        self.sequences: list[Sequence] = []  # that advance
        self.positions: list[int] = []  # of each one's first token in this step
        self.num_tokens: list[int] = []
        self.starts: list[Sequence] = []  # that take a row
        self.forced: list[Sequence] = []  # beams that keep their row, whose last token the host chose
        self.sources: list[int] = []  # of samples: whose logits, as an index into `sequences`
        self.receivers: list[Sequence] = []  # of samples: the sequence that gets the token
        self.offsets: list[int] = []  # of samples: tokens back from the source's last
        self.drafts: dict[int, TokenTree] = {}  # by index into `sequences`: proposed tokens to verify
        self.delta = TableDelta()

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence computes `num_tokens`, and samples a token if then all its known tokens are computed."""
        start = sequence.num_computed
        if start + num_tokens == len(sequence.token_ids) + sequence.num_pending:
            self.sample(len(self.sequences), sequence)
        self.sequences.append(sequence)
        self.positions.append(start)
        self.num_tokens.append(num_tokens)
        if num_tokens > 1:
            self.prompt_budget -= num_tokens

    def recompute_last(self, sequence: Sequence, samples: bool) -> None:
        """The sequence computes its last computed position once more: the same K and V, at the cost of a decode."""
        if samples:
            self.sample(len(self.sequences), sequence)
        self.sequences.append(sequence)
        self.positions.append(sequence.num_computed - 1)
        self.num_tokens.append(1)

    def sample(self, source: int, receiver: Sequence, offset: int = 0) -> None:
        """`receiver` gets a token from the logits `offset` tokens before the last of `sequences[source]`."""
        self.sources.append(source)
        self.receivers.append(receiver)
        self.offsets.append(offset)

    def verify(self, sequence: Sequence, draft: TokenTree) -> None:
        """The sequence computes its last known token and the draft, and samples a token at each of them."""
        source = len(self.sequences)
        self.drafts[source] = draft
        self.sequences.append(sequence)
        self.positions.append(sequence.num_computed)
        self.num_tokens.append(1 + len(draft))
        for offset in range(len(draft), -1, -1):
            self.sample(source, sequence, offset)

    @property
    def num_decodes(self) -> int:
        """Sequences that compute all they know and had one token left."""
        return self.num_tokens.count(1) + len(self.drafts)

    def take_back(self, group: list[Sequence]) -> tuple[int, dict[int, int]]:
        """Drops a group and everything planned after it; returns how many tokens that frees, and the origins of the
        group's block copies, which are not made.
        """
        self.starts = [s for s in self.starts if s not in group]
        origins = self.delta.take_back(group)
        cut = next((self.sequences.index(s) for s in group if s in self.sequences), len(self.sequences))
        freed = sum(self.num_tokens[cut:])
        del self.sequences[cut:], self.positions[cut:], self.num_tokens[cut:]
        while self.sources and self.sources[-1] >= cut:
            self.sources.pop()
            self.receivers.pop()
            self.offsets.pop()
        for index in [index for index in self.drafts if index >= cut]:
            del self.drafts[index]
        return freed, origins

    def force_beam_tokens(self) -> None:
        """Adds the token that commit chose for each beam since its last step; of a new branch, all tokens."""
        started = set(map(id, self.starts))
        for sequence in self.sequences:
            if sequence.is_beam and sequence.num_outputs and id(sequence) not in started:
                (self.forced if sequence.has_started else self.starts).append(sequence)

    def step(self, transfers: HostTransfers | None, adapters: AdapterAdmission | None) -> Step:
        """Freezes the plan. The sequences' counters are still those before this step."""
        delta = self.delta
        for sequence in self.starts:
            sequence.has_started = True
        return Step(
            step_id=self.step_id,
            starts=tuple(row_start(s) for s in self.starts),
            rows=ints([s.row for s in self.sequences]),
            num_computed=ints(self.positions),
            num_tokens=ints(self.num_tokens),
            table_rows=ints(delta.rows),
            table_indices=ints(delta.indices),
            table_blocks=ints(delta.blocks),
            copy_sources=ints(delta.copy_sources),
            copy_targets=ints(delta.copy_targets),
            sample_sources=ints(self.sources),
            sample_rows=ints([s.row for s in self.receivers]),
            forced_rows=ints([s.row for s in self.forced]),
            forced_positions=ints([len(s.token_ids) - 1 for s in self.forced]),
            forced_tokens=ints([s.token_ids[-1] for s in self.forced]),
            masked=ints(
                [i for i, s in enumerate(self.receivers) if s.request.sampling.structured is not None]
            ),
            beams=_beam_sets(self.receivers),
            drafts=tuple(self._draft(index) for index in self.drafts),
            sample_offsets=ints(self.offsets) if self.drafts else ints(),
            moves=transfers,
            adapter_loads=adapters.take_loads() if adapters is not None else (),
            adapter_evictions=adapters.take_evicted() if adapters is not None else (),
        )

    def _draft(self, index: int) -> Draft:
        sequence = self.sequences[index]
        draft = self.drafts[index]
        position = len(sequence.token_ids)
        return Draft(sequence.row, position, draft.token_ids, draft.parents, drawn=draft.drawn)


def _beam_sets(receivers: list[Sequence]) -> tuple[BeamSet, ...]:
    samples: dict[str, list[int]] = {}
    for i, sequence in enumerate(receivers):
        if sequence.is_beam:
            samples.setdefault(sequence.request.request_id, []).append(i)
    return tuple(_beam_set(receivers, indices) for indices in samples.values())


def _beam_set(receivers: list[Sequence], samples: list[int]) -> BeamSet:
    """Asks for as many candidates as leave a full set of beams, whichever of them end."""
    request = receivers[samples[0]].request
    scores, width = tuple(receivers[i].score for i in samples), request.sampling.num_sequences
    if len(request.stop_token_ids) > FEW_STOP_TOKENS:
        return BeamSet(ints(samples), scores, 2 * width, request.stop_token_ids)
    return BeamSet(ints(samples), scores, max(2, 1 + len(request.stop_token_ids)) * width)


def row_start(sequence: Sequence) -> RowStart:
    """The sequence as it is now, for the runner that gives it a row."""
    request = sequence.request
    return RowStart(
        row=sequence.row,
        token_ids=sequence.token_ids[:],
        block_ids=ints(sequence.block_ids),
        sampling=request.sampling,
        seed=request.seed,
        sample_index=sequence.index,
        num_prompt_tokens=request.num_prompt_tokens,
        stop_token_ids=request.stop_token_ids,
        adapter=request.adapter,
        num_encoder_tokens=request.num_encoder_tokens,
    )
