"""Policies as settings: presets, and names that are not known."""

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError


def test_a_preset_sets_several_and_those_named_themselves_win():
    config = EngineConfig.of(preset="ft")
    assert (config.scheduler.batching, config.memory.reservation) == ("static", "max")
    config = EngineConfig.of(preset="ft", batching="dynamic")
    assert (config.scheduler.batching, config.memory.reservation) == ("dynamic", "max")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"preset": "tf"}, "preset='tf' is not known: choose one of ft"),
        (
            {"reservation": "buddy"},
            "reservation='buddy' is not known: choose one of paged, max, pow2, oracle",
        ),
        ({"reservation": "max", "block_size": 32}, "block_size=32 says nothing with reservation='max'"),
        ({"batching": "Static"}, "batching='Static' is not known"),
        ({"max_prompt_chunk": 0}, "max_prompt_chunk=0 must be a whole number of at least 1"),
    ],
)
def test_what_is_not_known_is_one_line_that_says_what_is(settings, line):
    with pytest.raises(ConfigError, match=line):
        EngineConfig.of(**settings)
