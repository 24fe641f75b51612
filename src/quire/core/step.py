"""Step: one forward pass as scheduled. StepResult: its outcome. Arrays and deltas, no object per token."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.core.draft import Draft
from quire.core.request import Ints, ints
from quire.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copies an adapter from host memory into blocks of the pool, in order."""

    key: str
    block_ids: Ints  # [blocks] int32


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row, for the first time or after a preemption: all that the runner needs of it."""

    row: int
    token_ids: Ints  # [known] int32, all tokens the host knows
    block_ids: Ints  # [blocks] int32, the block table so far
    sampling: SamplingParams
    seed: int
    sample_index: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()  # banned until min_tokens are there
    adapter: str | None = None
    num_encoder_tokens: int = 0  # as in the request


@dataclass(frozen=True, slots=True)
class BeamSet:
    """Samples of a step that are beams of one request: the best candidates over all of them are wanted."""

    samples: Ints  # [B] int32, indices into [S], best beam first
    scores: tuple[float, ...]  # [B], the beams' log probabilities so far
    num_candidates: int
    # If there are any: as many candidates again, the best of those left that are none of these tokens.
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best continuations over the beams of one BeamSet, best first; ties: better beam, lower token id."""

    samples: Ints  # [C] int32, indices into [S]: which beam goes on
    token_ids: Ints  # [C] int32
    scores: tuple[float, ...]  # [C], of the beam with this token


@dataclass(frozen=True, slots=True)
class HostTransfers:
    """Block copies between the pool and host memory. Copies out are made before the step writes anything."""

    out_blocks: Ints  # [O] int32, blocks of the pool that are copied out
    out_hosts: Ints  # [O] int32, their host blocks
    in_hosts: Ints  # [I] int32, host blocks that are copied in
    in_blocks: Ints  # [I] int32, their blocks of the pool


@dataclass(frozen=True, slots=True)
class DiskTierRead:
    """A finished read: the content is in the host block, verified; or it is not `valid`, and the block is garbage."""

    content: bytes  # its hash
    host: int
    valid: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Rows advance by `num_tokens` from position `num_computed`; S of them yield a sampled token.

    Applied in this order: row starts, forced tokens, drafts, table deltas, host transfers, adapter evictions and loads,
    block copies, forward, sampling. If the device runs out of memory, forward and sampling do not count, and all before
    them is applied at the latest before the next step. A row with a draft of K tokens yields K + 1 samples: the
    target's choice at the draft's first position, and after each of its tokens. Of a tree, the tokens and blocks of the
    accepted path are at their positions when the step is over.
    """

    step_id: int
    starts: tuple[RowStart, ...]
    rows: Ints  # [R] int32, rows that advance
    num_computed: Ints  # [R] int32, position of each row's first token in this step
    num_tokens: Ints  # [R] int32
    sample_sources: Ints  # [S] int32, index into `rows`: whose last logits are sampled
    sample_rows: Ints  # [S] int32, the row that receives the token (a fork samples into several rows)
    table_rows: Ints = field(default_factory=ints)  # [D] int32, table delta: block_tables[row, index] = block
    table_indices: Ints = field(default_factory=ints)  # [D] int32
    table_blocks: Ints = field(default_factory=ints)  # [D] int32
    # [C] int32, blocks copied before the pass (copy-on-write)
    copy_sources: Ints = field(default_factory=ints)
    copy_targets: Ints = field(default_factory=ints)  # [C] int32
    forced_rows: Ints = field(default_factory=ints)  # [B] int32, rows whose token the host has chosen
    forced_positions: Ints = field(default_factory=ints)  # [B] int32
    forced_tokens: Ints = field(default_factory=ints)  # [B] int32
    masked: Ints = field(default_factory=ints)  # [M] int32, indices into [S] that wait for a grammar's mask
    beams: tuple[BeamSet, ...] = ()
    drafts: tuple[Draft, ...] = ()  # of rows in `rows`
    # [S] int32, tokens back from the row's last; [] is all 0
    sample_offsets: Ints = field(default_factory=ints)
    drawn: Ints = field(default_factory=ints)  # [S] int32, how many different tokens to draw; [] is all 0
    moves: HostTransfers | None = None
    adapter_evictions: tuple[str, ...] = ()  # adapters whose blocks are reused from now on
    adapter_loads: tuple[AdapterLoad, ...] = ()  # adapters that rows of this step or of later ones run with

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def verified(self) -> Iterator[tuple[Draft, int]]:
        """Each draft, and the index into [S] of the first of its K + 1 samples."""
        if self.drafts:
            first: dict[int, int] = {}
            for index, row in enumerate(self.sample_rows):
                first.setdefault(row, index)
            for draft in self.drafts:
                yield draft, first[draft.row]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's raw distribution."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens first_position, first_position + 1, … of one row."""

    row: int
    first_position: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    token_ids: Ints  # [S] int32, one per Step.sample_rows
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # [S], or empty if no row asked for them
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failed: tuple[int, ...] = ()  # indices into [S] whose logits were not finite
    seconds: float = 0.0  # wall time of forward and sampling
    beams: tuple[BeamCandidates, ...] = ()  # one per Step.beams
    drawn: tuple[Ints, ...] = ()  # [S], as Step.drawn asks; empty when it does not


@dataclass(slots=True)  # not frozen: there is one per token, and freezing triples the cost of making it
class SequenceUpdate:
    """New tokens of one sequence, or its end: what a commit returns to the engine's caller."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]  # newly committed
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # once, with the first token
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    error: str | None = None
    param: str | None = None  # with an error: the field of the request that is at fault
