"""Who drafts, by the method's name."""

from quire.core.errors import ConfigError
from quire.core.speculation import SpeculativeConfig
from quire.engine.speculation import Proposer
from quire.speculate.ngram import NgramProposer


def make_proposer(config: SpeculativeConfig) -> Proposer:
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    raise ConfigError(f"speculative_config: method {config.method!r} is not known")
