"""A built engine with a model so small that it starts at once."""

import pytest

from quire.core.config import EngineConfig
from quire.engine.build import build
from tests.cli.conftest import write_model


@pytest.fixture
def tiny_built(tmp_path):
    config = EngineConfig.of(
        model=str(write_model(tmp_path / "tiny")), load_format="dummy", num_blocks=64, max_num_seqs=8
    )
    built = build(config)
    yield config, built
    built.engine.check_integrity()
    built.engine.close()
