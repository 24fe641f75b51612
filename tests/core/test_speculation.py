"""--speculative-config: what is wrong is said, and how to mend it."""

import msgspec
import pytest

from quire.core.config import EngineConfig, SpeculativeConfig, parse_speculative
from quire.core.errors import ConfigError


def test_json_and_mappings_are_the_same() -> None:
    mapping = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    text = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'
    assert parse_speculative(text) == parse_speculative(mapping) == SpeculativeConfig("ngram", 5, 4, 2)
    assert EngineConfig.of(speculative_config=mapping).speculative_config == SpeculativeConfig(
        "ngram", 5, 4, 2
    )
    assert EngineConfig.of().speculative_config is None


def test_it_crosses_the_link_as_part_of_the_engines_config() -> None:
    config = EngineConfig.of(speculative_config='{"method": "ngram", "tree_width": 2}', pin_prefix="a.txt")
    sent = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(sent, type=EngineConfig) == config
    assert EngineConfig.of(speculative_config=config.speculative_config) == EngineConfig.of(
        speculative_config={"method": "ngram", "tree_width": 2}
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{method: ngram}", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "has no method"),
        ('{"method": "medusa"}', "'medusa' is not known: choose one of ngram, draft_model"),
        ('{"method": "ngram", "num_speculative_token": 5}', "did you mean num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "at least 1"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "at least 1"),
        ('{"method": "ngram", "num_speculative_tokens": 400}', "at most 32"),
        ('{"method": "ngram", "prompt_lookup_min": 9}', "is more than prompt_lookup_max"),
        ('{"method": "ngram", "adaptive": "yes"}', "true or false"),
        ('{"method": "ngram", "model": "x"}', "has no model of its own"),
        ('{"method": "draft_model"}', "draft_model and its model together"),
        ('{"method": "ngram", "tree_width": 0}', "tree_width is 0: give a whole number of at least 1"),
        ('{"method": "ngram", "tree_width": "wide"}', "tree_width is 'wide'"),
        ('{"method": "ngram", "tree_width": 17}', "tree_width is 17: at most 16"),
        ('{"method": "ngram", "tree_width": 9}', "9 × 8 = 72: a tree has at most 64 tokens"),
        ('{"method": "ngram", "tree_widths": 3}', "did you mean tree_width"),
        ('{"method": "ngram", "acceptance": "typical"}', "choose one of coupled, rejection"),
        (
            '{"method": "ngram", "acceptance": "rejection"}',
            "choose method draft_model or leave acceptance out",
        ),
    ],
)
def test_mistakes_are_named(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.of(speculative_config=given)
