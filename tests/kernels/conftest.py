"""Kernels in Triton run in its interpreter here (tests/conftest.py)."""

import os

import pytest

from quire.kernels import registry


@pytest.fixture(autouse=True)
def small_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: small tiles, so that small vocabularies reach every branch of the sampling kernel."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in registry.alternatives("sample"):
        module = registry.load("sample", "triton")
        sizes = {"piece": 256, "tile": 256, "sample": 128, "listed": 64, "wide": 256, "narrow": 64}
        tuning = module.SampleTuning(stages=1, warps=4, **sizes)
        monkeypatch.setattr(module, "TUNING", tuning)
