"""Speculation at start: the draft model where there is one, and what proposes drafts."""

from dataclasses import dataclass, replace

from quire.core.config import ModelConfig, ModelOptions, SchedulerConfig
from quire.core.draft import MAX_NODES
from quire.core.errors import ConfigError
from quire.core.speculation import SpeculativeConfig
from quire.engine.build.resolve import BuildPlan, Precision, block_layout, resolve_precision
from quire.engine.build.runner import build_runner, runner_limits
from quire.engine.draft_model import DraftModel
from quire.engine.speculation import Proposer
from quire.layers.attention import Pool
from quire.layers.factory import LayerFactory
from quire.models import registry
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.runner.drafts import Proposals
from quire.runner.sizing import PoolSize
from quire.speculate.ngram import NgramProposer
from quire.text.load import load_tokenizer
from quire.weights.open import open_source
from quire.weights.source import Source

SAMPLE = "Two quires, 48 pages: «naïve»\n\tdef f(x): return x ** 2  # 漢字"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    model: DecoderModel
    precision: Precision


def load_draft(plan: BuildPlan) -> LoadedDraft | None:
    """The draft model where the method has one. Raises ConfigError if it does not match the target."""
    config, speculative = plan.config, plan.speculative
    if speculative is None or speculative.method != "draft_model":
        return None
    options = ModelOptions(
        model=speculative.model,
        quantization=speculative.quantization,
        load_format=config.model.load_format,
        dtype=config.model.dtype,
    )
    draft_source = open_source(options.model, load_format=options.load_format)
    described = registry.describe(draft_source.config)
    _check_fits(described, plan.model, plan.max_model_len)
    _check_tokenizer(draft_source, plan.source)
    precision = resolve_precision(replace(config, model=options), described)
    factory = LayerFactory(precision.format, precision.device, max_position=plan.max_model_len)
    return LoadedDraft(load(draft_source, factory, seed=config.model.seed), precision)


def check_trees(
    speculative: SpeculativeConfig, target: ModelConfig, precision: Precision, deterministic: bool
) -> None:
    """Raises ConfigError where this device cannot verify trees.

    A GPU's faster kernel takes nodes by their index, so no attention window may end among them. The deterministic one
    takes them by their positions, as a CPU's does.
    """
    if speculative.tree_width == 1 or precision.device.type == "cpu" or deterministic:
        return
    window = target.hf.get("sliding_window") or 0
    if 0 < window < MAX_NODES:
        raise ConfigError(
            f"speculative_config: tree_width above 1 needs attention over {MAX_NODES} tokens or more, and this model's "
            f"window is {window}: leave out tree_width, or add deterministic"
        )


def make_proposals(speculative: SpeculativeConfig | None) -> Proposals | None:
    """Where drafts are judged by their probabilities: what the draft model's runner and the target's share."""
    return Proposals() if speculative is not None and speculative.acceptance == "rejection" else None


def make_proposer(
    plan: BuildPlan,
    scheduler: SchedulerConfig,
    draft: LoadedDraft | None,
    size: PoolSize,
    proposals: Proposals | None,
) -> Proposer:
    """`size` of the target's pool: a draft model's blocks have the target's ids."""
    if draft is None:
        speculative = plan.speculative
        assert speculative is not None
        return NgramProposer(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    model, precision = draft.model, draft.precision
    layout = block_layout(size.block_size, model.config, precision)
    pool = Pool(layout, size.num_blocks + 1, precision.device)
    limits = runner_limits(plan, scheduler, model, precision)
    built = build_runner(model, pool, limits, precision.device, proposals)
    return DraftModel(built.runner, limits.max_num_batched_tokens, draws=proposals is not None)


def _check_fits(draft: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: choose a draft model with the target's tokenizer"
        )
    if draft.max_position < max_model_len:
        raise ConfigError(
            f"the draft model has {draft.max_position} positions, fewer than max_model_len={max_model_len}: lower "
            f"max_model_len to {draft.max_position} or choose another draft model"
        )


def _check_tokenizer(draft: Source, target: Source) -> None:
    """Vocabularies of one size may differ: a sample must give the same tokens."""
    ours, theirs = load_tokenizer(target), load_tokenizer(draft)
    if ours is None or theirs is None:
        return
    if list(ours.encode(SAMPLE)) != list(theirs.encode(SAMPLE)):
        raise ConfigError(
            "the draft model's tokenizer gives other tokens than the target's: choose a draft model with the same one"
        )
