"""Building an engine: resolve every setting, load the weights, wire the parts, report what was decided."""

from quire.engine.build.assemble import Built, build
from quire.engine.build.encoder import build_encoder, build_engine
from quire.engine.build.report import Report
from quire.engine.build.resolve import (
    DEFAULT_MAX_TOKENS,
    BuildPlan,
    Progress,
    block_layout,
    default_sampling,
    end_token_ids,
    set_threads,
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "BuildPlan",
    "Built",
    "Progress",
    "Report",
    "block_layout",
    "build",
    "build_encoder",
    "build_engine",
    "default_sampling",
    "end_token_ids",
    "set_threads",
]
