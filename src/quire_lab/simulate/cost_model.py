"""CostModel: how long a step takes on a simulated device, from what the step reads, computes and launches.

    seconds = step + layers × layer + rows × row + starts × start     started: launches, the host's share
            + max(weights × read, products × compute)                 the dense layers, whichever is slower
            + KV × read + attention × compute + copies × read         attention and pages
            + activations × read + logits × read                      what moves between the products
            + all-reduces                                             several ranks only, not fitted
    but at least what the blocks that are swapped take over the host's link, beside the pass

`read` and `compute` are ideal times at the data sheet's rates; each term's factor over the ideal is fitted to measured
steps (see quire_lab.fit). Everything is counted per rank: weights, KV, products and attention are split evenly.
"""

from dataclasses import asdict, dataclass, fields

from quire.core.step import Step

LOGIT_BYTES = 4  # logits are float32 in every format


@dataclass(frozen=True, slots=True)
class StepCounts:
    """All that a step's cost depends on beside the model."""

    num_rows: int
    num_tokens: int
    num_samples: int
    context_tokens: int  # positions that attention reads: the sum of the rows' contexts
    attended: float  # pairs of a query and a position it sees
    num_starts: int = 0  # sequences that are admitted
    num_copies: int = 0  # blocks copied before the pass
    num_moves: int = 0  # blocks that go to host memory or come back
    num_encoder_tokens: int = 0  # of `num_tokens`: they go through the encoder and not through the decoder


def count_step(step: Step) -> StepCounts:
    num_rows, num_tokens, computed = len(step.rows), sum(step.num_tokens), sum(step.num_computed)
    context = computed + num_tokens
    attended = float(context)  # a decode's query sees its whole context
    if num_tokens != num_rows:
        attended = sum(n * (c + (n + 1) / 2) for c, n in zip(step.num_computed, step.num_tokens, strict=True))
    # a beam's new branch is no admission
    starts = sum(
        not start.sampling.use_beam_search or len(start.token_ids) == start.num_prompt_tokens
        for start in step.starts
    )
    encoded = {start.row: start.num_encoder_tokens for start in step.starts if start.num_encoder_tokens}
    num_encoder_tokens = 0
    if encoded:  # a prompt is whole in its step
        rows = zip(step.rows, step.num_computed, strict=True)
        num_encoder_tokens = sum(encoded.get(row, 0) for row, computed in rows if computed == 0)
    moves = 0 if step.moves is None else len(step.moves.out_blocks) + len(step.moves.in_blocks)
    return StepCounts(
        num_rows,
        num_tokens,
        len(step.sample_rows),
        context,
        attended,
        starts,
        len(step.copy_sources),
        moves,
        num_encoder_tokens,
    )


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """What a model costs per step, token and position, in the numbers that it would be served in."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    attention_width: int  # heads × head_dim
    read_bytes: int  # weights that a step of one token reads
    dense_parameters: int  # multiplied for every token
    head_parameters: int  # multiplied for every sampled token
    kv_bytes_per_token: int
    block_bytes: int
    activation_bytes: int  # of one number
    expert_bytes: int = 0  # of all experts of a mixture
    expert_share: float = 0.0  # of a layer's experts, what one token goes through
    encoder_bytes: int = 0  # weights that prompts of an encoder-decoder model go through
    encoder_parameters: int = 0

    def bytes_read(self, num_tokens: int) -> float:
        """Weights that a step reads: expected experts of its tokens, if all are equally likely."""
        more = 1.0 - (1.0 - self.expert_share) ** num_tokens - self.expert_share
        return self.read_bytes + more * self.expert_bytes if self.expert_bytes else self.read_bytes


@dataclass(frozen=True, slots=True)
class Factors:
    """Fitted: seconds of what is started, and how many times the ideal each other term takes."""

    step: float = 0.0  # seconds
    layer: float = 0.0  # seconds
    row: float = 0.0  # seconds
    start: float = 0.0  # seconds
    weights: float = 1.0
    products: float = 1.0
    kv: float = 1.0
    attention: float = 1.0
    activations: float = 1.0
    logits: float = 1.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


FACTOR_NAMES = tuple(field.name for field in fields(Factors))


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one device as its maker describes it, and of the link between several."""

    bandwidth: float  # bytes per second
    flops: float  # per second, dense, in the numbers that are served
    link_bandwidth: float = 0.0  # bytes per second and direction, to the other ranks
    link_latency: float = 0.0  # seconds of one all-reduce of nothing
    host_link: float = 0.0  # bytes per second, to host memory and back


def ideal_terms(rates: Rates, model: ModelNumbers, counts: StepCounts, ranks: int = 1) -> tuple[float, ...]:
    """What each of the factors multiplies, in their order. Weights and products do not add: the slower counts."""
    read = 1.0 / (rates.bandwidth * ranks)
    compute = 2.0 / (rates.flops * ranks)
    decoded = counts.num_tokens - counts.num_encoder_tokens
    products = decoded * model.dense_parameters + counts.num_samples * model.head_parameters
    products += counts.num_encoder_tokens * model.encoder_parameters
    weights = model.bytes_read(decoded) + (model.encoder_bytes if counts.num_encoder_tokens else 0)
    kv = counts.context_tokens * model.kv_bytes_per_token + 2 * counts.num_copies * model.block_bytes
    moved = counts.num_tokens * model.num_layers * model.hidden_size * model.activation_bytes
    return (
        1.0,
        model.num_layers,
        counts.num_rows,
        counts.num_starts,
        weights * read,
        products * compute,
        kv * read,
        2.0 * counts.attended * model.num_layers * model.attention_width * compute,
        moved * read,
        counts.num_samples * model.vocab_size * LOGIT_BYTES * read,
    )


class CostModel:
    """Charges steps of one model on one device."""

    def __init__(self, rates: Rates, factors: Factors, model: ModelNumbers, ranks: int = 1) -> None:
        self._rates, self._model, self._ranks = rates, model, ranks
        self._factors = tuple(factors.as_dict().values())

    def seconds(self, counts: StepCounts, added: float = 0.0, on_link: float = 0.0) -> float:
        """`added` to the pass by adapters; their pages take the host's link for `on_link` beside it."""
        step, layer, row, start, weights, products, kv, attention, moved, logits = (
            factor * ideal
            for factor, ideal in zip(
                self._factors, ideal_terms(self._rates, self._model, counts, self._ranks), strict=True
            )
        )
        device = max(weights, products) + kv + attention + moved + logits
        charged = step + layer + row + start + device + self._all_reduces(counts) + added
        return max(charged, counts.num_moves * self.move_seconds + on_link)

    @property
    def move_seconds(self) -> float:
        """Of one block to host memory, or back: each rank moves its part."""
        link = self._rates.host_link * self._ranks
        return self._model.block_bytes / link if link else 0.0

    def _all_reduces(self, counts: StepCounts) -> float:
        """Two per layer, as a ring: each rank sends and receives 2 (n − 1) / n of the activations."""
        if self._ranks == 1:
            return 0.0
        model, rates = self._model, self._rates
        activations = counts.num_tokens * model.hidden_size * model.activation_bytes
        sent = 2 * (self._ranks - 1) / self._ranks * activations
        return 2 * model.num_layers * (rates.link_latency + sent / rates.link_bandwidth)
