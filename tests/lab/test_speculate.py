"""quire bench speculate: both engines serve the same requests, and say the same."""

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build
from quire.text.template import load_template
from quire_lab.measure.speculate import SpeculatePlan, run_speculate


def test_the_report_compares_what_both_engines_did() -> None:
    drafts = {"method": "ngram", "adaptive": False}
    config = EngineConfig.of(num_blocks=200, speculative_config={**drafts, "tree_width": 3})
    plain, speculating = build(EngineConfig.of(num_blocks=200)), build(config)
    chains = build(EngineConfig.of(num_blocks=200, speculative_config=drafts))
    plan = SpeculatePlan(num_tokens=12, rounds=1, workloads=("quote", "random"))
    report = run_speculate(config, plain, speculating, load_template(plain.source), plan, chains)
    assert set(report.results) == {"quote", "random"}
    for result in report.results.values():
        assert result["same_tokens"]
        assert result["num_drafted"] >= result["num_accepted"]
        assert len(result["plain_tokens_per_second"]) == len(result["speculating_tokens_per_second"]) == 1
        assert len(result["chains_tokens_per_second"]) == 1
    assert "quote" in report.as_text()
    assert "with chains" in report.as_text()
    for built in (plain, speculating, chains):
        built.engine.close()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds is 0"):
        SpeculatePlan(rounds=0)
