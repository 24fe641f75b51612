"""Plan: a Step while it is being decided."""

from quire.core.draft import Draft, TokenTree
from quire.core.ints import ints
from quire.core.request import Sequence
from quire.core.step import BeamSet, HostTransfers, RowStart, Step
from quire.memory.paged import TableDelta
from quire.scheduler.adapter_admission import AdapterAdmission


class StepPlan:
    """Entries in arrival order, so that a group that loses its blocks half-way is cut off the end."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.sequences: list[Sequence] = []  # that advance
        self.num_tokens: list[int] = []
        self.starts: list[Sequence] = []  # that take a row
        self.told: list[Sequence] = []  # beams that keep theirs, whose last token the host chose
        self.sources: list[int] = []  # of samples: whose logits, as an index into `sequences`
        self.receivers: list[Sequence] = []  # of samples: who gets the token
        self.offsets: list[int] = []  # of samples: tokens back from the source's last
        self.drafts: dict[
            int, TokenTree
        ] = {}  # by index into `sequences`: proposed tokens that it computes too
        self.delta = TableDelta()

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence computes that many tokens, and yields a token if then all it knows is computed."""
        if sequence.num_computed + num_tokens == len(sequence.token_ids) + sequence.num_pending:
            self.sample(len(self.sequences), sequence)
        self.sequences.append(sequence)
        self.num_tokens.append(num_tokens)

    def sample(self, source: int, receiver: Sequence, offset: int = 0) -> None:
        """`receiver` gets the token that is chosen so many tokens before the last of `sequences[source]`."""
        self.sources.append(source)
        self.receivers.append(receiver)
        self.offsets.append(offset)

    def verify(self, sequence: Sequence, draft: TokenTree) -> None:
        """The sequence computes its last known token and the draft, and yields a token at each of them."""
        source = len(self.sequences)
        self.drafts[source] = draft
        self.sequences.append(sequence)
        self.num_tokens.append(1 + len(draft))
        for offset in range(len(draft), -1, -1):
            self.sample(source, sequence, offset)

    @property
    def num_decodes(self) -> int:
        """Sequences that compute all they know and had one token left."""
        return self.num_tokens.count(1) + len(self.drafts)

    def drop_from(self, sequence: Sequence) -> int:
        """Takes back everything planned from `sequence` on; returns how many tokens that frees."""
        if sequence not in self.sequences:
            return 0
        cut = self.sequences.index(sequence)
        freed = sum(self.num_tokens[cut:])
        del self.sequences[cut:], self.num_tokens[cut:]
        while self.sources and self.sources[-1] >= cut:
            self.sources.pop()
            self.receivers.pop()
            self.offsets.pop()
        for index in [index for index in self.drafts if index >= cut]:
            del self.drafts[index]
        return freed

    def force_beam_tokens(self) -> None:
        """The runner hears which token each beam was given since its last step; of a new branch, all."""
        started = set(map(id, self.starts))
        for sequence in self.sequences:
            if sequence.is_beam and sequence.num_outputs and id(sequence) not in started:
                (self.told if sequence.has_started else self.starts).append(sequence)

    def step(self, moves: HostTransfers | None = None, adapters: AdapterAdmission | None = None) -> Step:
        """Freezes the plan. Sequences' counters still say what was computed before this step."""
        delta = self.delta
        for sequence in self.starts:
            sequence.has_started = True
        return Step(
            step_id=self.step_id,
            starts=tuple(_row_start(s) for s in self.starts),
            rows=ints([s.row for s in self.sequences]),
            num_computed=ints([s.num_computed for s in self.sequences]),
            num_tokens=ints(self.num_tokens),
            table_rows=ints(delta.rows),
            table_indices=ints(delta.indices),
            table_blocks=ints(delta.blocks),
            copy_sources=ints(delta.copy_sources),
            copy_targets=ints(delta.copy_targets),
            sample_sources=ints(self.sources),
            sample_rows=ints([s.row for s in self.receivers]),
            forced_rows=ints([s.row for s in self.told]),
            forced_positions=ints([len(s.token_ids) - 1 for s in self.told]),
            forced_tokens=ints([s.token_ids[-1] for s in self.told]),
            masked=ints(
                [i for i, s in enumerate(self.receivers) if s.request.sampling.structured is not None]
            ),
            beams=_beam_sets(self.receivers),
            drafts=tuple(self._draft(index) for index in self.drafts),
            sample_offsets=ints(self.offsets) if self.drafts else ints(),
            moves=moves,
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
    """So many candidates that, whichever of them end, enough are left to go on with."""
    request = receivers[samples[0]].request
    num_candidates = max(2, 1 + len(request.stop_token_ids)) * request.sampling.num_sequences
    return BeamSet(ints(samples), tuple(receivers[i].score for i in samples), num_candidates)


def _row_start(sequence: Sequence) -> RowStart:
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
    )
