"""Who drafts, by the method's name: prompt lookup, or a model of its own that is loaded beside the target."""

from dataclasses import dataclass, replace

from quire.core.config import EngineConfig, ModelConfig, ModelOptions
from quire.core.draft import MAX_NODES
from quire.core.errors import ConfigError
from quire.core.speculation import SpeculativeConfig
from quire.engine.draft_model import DraftModel
from quire.engine.resolve import Precision, resolve_precision
from quire.engine.speculation import Proposer
from quire.layers.factory import LayerFactory
from quire.models import registry
from quire.models.loading import load
from quire.models.model import Model
from quire.speculate.ngram import NgramProposer
from quire.text.load import load_tokenizer
from quire.weights.open import open_source
from quire.weights.source import Source

SAMPLE = "Two quires, 48 pages: «naïve»\n\tdef f(x): return x ** 2  # 漢字"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, and the numbers it runs in."""

    model: Model
    numbers: Precision


def load_draft(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    target: ModelConfig,
    source: Source,
    max_model_len: int,
) -> LoadedDraft | None:
    """The draft model where the method has one. Raises ConfigError if it cannot speak for the target."""
    if speculative.method != "draft_model":
        return None
    options = ModelOptions(
        model=speculative.model,
        quantization=speculative.quantization,
        load_format=config.model.load_format,
        dtype=config.model.dtype,
    )
    draft_source = open_source(options.model, load_format=options.load_format)
    described = registry.describe(draft_source.config)
    _check_fits(described, target, max_model_len)
    _check_tokenizer(draft_source, source)
    numbers = resolve_precision(replace(config, model=options), described)
    factory = LayerFactory(numbers.format, numbers.device, max_position=max_model_len)
    return LoadedDraft(load(draft_source, factory, seed=config.model.seed), numbers)


def check_trees(
    speculative: SpeculativeConfig, target: ModelConfig, numbers: Precision, deterministic: bool
) -> None:
    """Raises ConfigError where this device cannot verify trees: a GPU's faster kernel takes nodes by their places, and
    so no window may end among them. The deterministic one takes them by their positions, as a CPU's does."""
    if speculative.tree_width == 1 or numbers.device.type == "cpu" or deterministic:
        return
    window = target.hf.get("sliding_window") or 0
    if 0 < window < MAX_NODES:
        raise ConfigError(
            f"speculative_config: tree_width above 1 needs attention over {MAX_NODES} tokens or more, and this model's "
            f"window is {window}: leave out tree_width, or add deterministic"
        )


def make_proposer(speculative: SpeculativeConfig, draft_model: DraftModel | None) -> Proposer:
    if draft_model is not None:
        return draft_model
    return NgramProposer(speculative.prompt_lookup_min, speculative.prompt_lookup_max)


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
    """Equal sizes are not equal words: a sample must give the same tokens."""
    ours, theirs = load_tokenizer(target), load_tokenizer(draft)
    if ours is None or theirs is None:
        return
    if list(ours.encode(SAMPLE)) != list(theirs.encode(SAMPLE)):
        raise ConfigError(
            "the draft model's tokenizer gives other tokens than the target's: choose a draft model with the same one"
        )
